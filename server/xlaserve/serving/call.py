"""One request of any protocol: made when its headers are there, ended exactly once.

A transport makes a `Call` and says how an answer is written (`write`, `refuse`); `Gates` let it
pass; a handler or a station answers it. Whatever a call holds is released when it ends, however it
ends, and before its client and its observers are notified.

    NEW --admit--> BEGUN --answer, last--> ENDED
                   BEGUN --answer--------> BEGUN
    NEW or BEGUN --fail, cancel, expire--> ENDED

ENDED is final: a later answer is dropped, which is no error.

Observers see what the client got: an answered call is `close`d, its answer is written, and then its
observers are notified of its `outcome`. A transport that fails to write the answer makes the
outcome an error; one that writes later sets `is_told_later`, and calls `end` again after the write.
"""

import asyncio
import weakref
from collections.abc import Callable, Sequence
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

from xlaserve.concurrency.completion import settle
from xlaserve.errors import DeadlineExceeded
from xlaserve.errors.panics import ENDS
from xlaserve.net.ledger import Account
from xlaserve.serving.access.principal import Principal
from xlaserve.serving.call_record import CallRecord


class Operation(StrEnum):
    """Operations that clients ask for, and that permissions allow."""

    INFER = "infer"
    METADATA = "metadata"
    """Reads what models are: metadata, configuration, index, statistics, reflection."""
    MANAGE = "manage"
    """Loads and unloads."""
    RUNTIME = "runtime"
    """The model runtime of a mesh."""
    METRICS = "metrics"
    PAGE = "page"
    """Reads the page's data: models, history, events."""
    SHELL = "shell"
    """Reads the page's own files, which hold nothing of the server."""
    HEALTH = "health"
    """Whether the server is live and ready."""
    READINESS = "readiness"
    """Readiness of a model, which reveals that it exists."""
    SERVICE = "service"
    """A method of a custom service."""


OPEN = frozenset({Operation.SHELL})
"""Operations of everybody: a browser shows no token before a page has asked for one."""


class Api(StrEnum):
    """Groups of requests that Triton restricts together."""

    HEALTH = "health"
    METADATA = "metadata"
    INFERENCE = "inference"
    SHARED_MEMORY = "shared-memory"
    MODEL_CONFIG = "model-config"
    MODEL_REPOSITORY = "model-repository"
    STATISTICS = "statistics"
    TRACE = "trace"
    LOGGING = "logging"


class Headers(Protocol):
    """The headers of a request, looked up in whatever the transport has; names in lower case."""

    def get(self, name: str, /) -> str | None:
        """Return the value of a header, None where it is absent."""
        ...


UNIX = "unix"
"""Address of a peer on a unix socket."""
NO_HEADERS: Headers = MappingProxyType[str, str]({})


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of a connection, or the client of a trusted proxy; shared by all calls."""

    listener: str = ""
    """Setting of its endpoint: `grpc_endpoint`. Empty inside the process."""
    address: str = ""
    """Its address: `10.0.0.7:51824`, or `unix`; without a port behind a proxy that omits it."""
    tls_identity: str | None = None
    """The subject of its verified client certificate."""
    unix_user: int | None = None
    """The user id of the process at the other end of a unix socket."""
    account: Account | None = field(default=None, compare=False, repr=False)
    """Account of its connection; None inside the process, which is not charged."""
    tls_names: tuple[str, ...] = ()
    """The alternative names of that certificate: `DNS:gateway.example`, `URI:spiffe://mesh/a`."""
    granted: dict[str | None, object] = field(default_factory=dict, compare=False, repr=False)
    """Findings of the permission gate by token, under None for calls without one; for it alone."""
    proxy: str = ""
    """Address of the trusted proxy; empty for a direct connection."""
    scheme: str = ""
    """Scheme of the request to that proxy, `http` or `https`; empty if unknown."""
    prefix: str = ""
    """The path below which that proxy serves this server: `/models`; empty for none."""
    clients: dict[object, "Peer"] = field(default_factory=dict, compare=False, repr=False)
    """Clients behind this proxy, by their headers; for `Proxies` alone."""


def host_of(address: str) -> str:
    """Return the address of a peer without its port: all connections of a host are one client's."""
    host, _, port = address.rpartition(":")
    has_port = port.isdecimal() and (":" not in host or host.endswith("]"))
    return host if has_port and host else address


NOBODY = Peer()
"""The peer of the server's own calls."""


class Admission:
    """The number of calls of one model in progress, and its limit."""

    __slots__ = ("in_progress", "limit", "model")

    def __init__(self, model: str, limit: int) -> None:
        self.model = model
        self.limit = limit
        self.in_progress = 0
        """Calls that were not answered at once, of all versions together."""


class Sight(Protocol):
    """Models that the caller of a call may see and use."""

    def permits(self, model: str) -> bool:
        """Tell whether it is permitted; raises NotPermitted for a visible but forbidden model."""
        ...

    def shows(self, model: str) -> bool:
        """Tell whether it is visible; raises nothing."""
        ...

    def absent(self, model: str, version: str, *, detail: str) -> Exception:
        """Return the error for a hidden model, the same as for a missing one."""
        ...

    def refuse_server(self) -> None:
        """Raise NotPermitted: nothing of the whole server is for it to change."""
        ...


Tokens: TypeAlias = tuple[int | None, int | None]
"""Tokens of prompt and answer; None if nobody counts them."""
NOT_COUNTED: Tokens = (None, None)

Outcome: TypeAlias = object
"""Outcome of a call: an exception, an execution (`Executed`), or None."""


class Observer(Protocol):
    """Sees every call begin and end; on the event loop, and it must not wait."""

    @property
    def began(self) -> "Callable[[Call], None] | None":
        """Return a callback for each call before the gates; None for none."""
        ...

    def ended(self, calls: "Sequence[Call]", outcome: Outcome) -> None:
        """See calls that ended together, before their clients can ask anything else."""
        ...


class Call:
    """One request. Transports subclass it with how an answer is written.

    Of the event loop. Attributes that most calls never set are defaults of the class, so that a
    call is made quickly.
    """

    operation = Operation.INFER
    api: Api | None = None
    """Its group of Triton, if that does not follow from the operation."""
    protocol = ""
    """The protocol of the request, as the event log names it; empty inside the process."""
    method = ""
    """What its client asked, with places for names: `/inference.GRPCInferenceService/ModelInfer`,
    or `POST /v2/models/{model}/infer`; empty inside the process."""
    tokens: Callable[[], Tokens] | None = None
    """Counts its tokens; None if nobody does."""
    carries_calls = False
    """Whether it is a stream of calls, which are counted instead of it."""
    model = ""
    """Name of the model, once known; some protocols have it in the message."""
    version = ""
    """Requested version; empty for the newest."""
    headers: Headers = NO_HEADERS
    peer: Peer = NOBODY
    principal: Principal | None = None
    """The caller, as the permission gate found it; None for anybody."""
    client = 0
    """A number for its connection, where another process has that; 0 where `peer` is its own."""
    sight: Sight | None = None
    """Models that the caller may see, as the permission gate found them; None for all. A part of
    another call has none: who may ask an ensemble needs no permission for its steps."""
    deadline: float | None = None
    """The client's deadline by the clock of the event loop; None for none."""
    admission: Admission | None = None
    """Counter of its model's calls; None until the model is found."""
    parent: "Call | None" = None
    """The call that this one is part of: of an ensemble, or of a custom service."""
    uses: "set[tuple[str, str, weakref.ref[object] | None]] | None" = None
    """The models that its answer is made with, where somebody may keep it; else None."""
    companions: "Sequence[weakref.ref[Call]]" = ()
    """Calls that one run of code answers together, this one among them; empty where it is alone."""
    opened_ns = 0
    """Time its headers were there, by the clock of the engine, where a transport makes it later,
    with its message; 0 for now."""
    record: CallRecord | None = None
    """Times and sizes from its transport; None unless calls are observed in such detail."""
    is_found = False
    """Whether a model was found that answers it: an inference."""
    has_begun = False
    has_ended = False
    outcome: "Outcome" = None
    """The outcome for its observers, once it has ended; an error if its answer cannot be written.
    None again after they are notified."""
    is_told_later = False
    """Whether its observers are notified later, after a deferred write of its answer."""
    is_cancelled = False
    """Whether the answer is no longer wanted: nothing more is written."""
    holds_anything = False
    """Whether `release` has something to do: most calls are answered before they hold anything."""
    on_writable: Callable[[], None] | None = None
    """Called once when the stream takes more, or the call ends; set by the waiting station."""
    _observers: Sequence[Observer] = ()
    _holds: list[Callable[[], None]] | None = None
    _timer: asyncio.TimerHandle | None = None

    # --- how a transport answers: overridden there ---

    def write(self, response: Any, *, last: bool) -> None:
        """Send an answer to the client; raises nothing."""

    def refuse(self, error: BaseException) -> None:
        """Send the status that belongs to an error; raises nothing."""

    @property
    def is_writable(self) -> bool:
        """Tell whether the stream takes another answer; if not, the station pauses."""
        return True

    @property
    def root(self) -> "Call":
        """Return the call of a client that this one is part of, or itself."""
        call: Call = self
        while call.parent is not None:
            call = call.parent
        return call

    @property
    def owner(self) -> str:
        """Return the name of the principal that asks, which owns what it leaves behind.

        Empty where the server knows none, so that all are one. A part of a call is its client's.
        """
        principal = self.principal if self.parent is None else self.root.principal
        return "" if principal is None else principal.name

    @property
    def caller(self) -> str:
        """Return who takes turns with others: the principal, else the host that asks.

        Empty where neither is known, so that all are one. A part of a call is its client's.
        """
        return self.owner or host_of(self.root.peer.address)

    # --- for transports and stations ---

    def answer(self, response: Any, *, last: bool = True) -> None:
        """Write an answer; the last one ends the call. Does nothing once the call has ended."""
        if self.has_ended:
            return
        if not last:
            self.write(response, last=False)
            return
        self.conclude(response, None)

    def fail(self, error: BaseException) -> None:
        """End the call with an error for its client."""
        if not self.has_ended:
            self.end(error)
            self.refuse(error)

    async def writable(self) -> None:
        """Return once the stream takes another answer, or the call has ended (backpressure)."""
        while not (self.is_writable or self.has_ended):
            resumed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.on_writable = partial(settle, resumed, None)
            self.holds_anything = True
            await resumed

    def hold(self, release: Callable[[], None]) -> None:
        """Release something when the call ends, or at once if it has."""
        if self.has_ended:
            release()
            return
        self.holds_anything = True
        if self._holds is None:
            self._holds = []
        self._holds.append(release)

    # --- for transports ---

    def resume(self) -> None:
        """Call `on_writable` once: the stream takes more again."""
        resumed, self.on_writable = self.on_writable, None
        if resumed is not None:
            resumed()

    def cancel(self, reason: str = "") -> None:
        """End an abandoned call; nothing more is written."""
        self.is_cancelled = True
        if not self.has_ended:
            self.end(asyncio.CancelledError(reason))

    def expire(self) -> None:
        """End the call, whose deadline has passed."""
        self.fail(DeadlineExceeded())

    def expire_in_time(self) -> None:
        """Have the call expire at its deadline, if it has one and has not ended by then.

        Asking again changes nothing.
        """
        if self.deadline is not None and not self.has_ended and self._timer is None:
            context = outside_call() if current_call.get() is not None else None
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(self.deadline, self.expire, context=context)
            self.holds_anything = True

    # --- the end of the call ---

    def end(self, outcome: Outcome = None) -> None:
        """End the call without writing; the caller writes the answer by other means.

        With `is_told_later` this notifies its observers, with `outcome` if it is an error.
        """
        if not self.has_ended:
            self.close(outcome)
            self.tell()
        elif self.is_told_later:
            if isinstance(outcome, BaseException):
                self.outcome = outcome
            self.tell()

    def conclude(self, response: Any, outcome: Outcome) -> None:
        """End the call with its last answer, then notify its observers of the outcome.

        In the pass of the event loop in which it is written, so that its client asks later.
        """
        self.has_ended = True
        self.outcome = outcome
        if self.holds_anything:
            self.release()
        try:
            self.write(response, last=True)
        except ENDS:
            raise
        except BaseException as error:
            self.outcome = error
            report(error)
        if not self.is_told_later:
            # As `close` and `tell`, whose calls most requests would pay for.
            told, self.outcome = self.outcome, None
            for observer in self._observers:
                observer.ended((self,), told)

    def close(self, outcome: Outcome) -> None:
        """End a call whose answer is to be written; who has it written tells its observers."""
        self.has_ended = True
        self.outcome = outcome
        if self.holds_anything:
            self.release()

    def tell(self) -> None:
        """Tell the observers how it ended."""
        self.is_told_later = False
        # An error refers to frames that refer to the call.
        outcome, self.outcome = self.outcome, None
        for observer in self._observers:
            observer.ended((self,), outcome)

    def release(self) -> None:
        """Release the call's resources; called once, by `end` or `end_together`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        holds, self._holds = self._holds, None
        for release in holds or ():
            release()
        if self.on_writable is not None:
            self.resume()


def end_together(calls: Sequence[Call], outcome: Outcome) -> None:
    """End calls that have begun and not ended: release what they hold, and tell the observers.

    A caller with its answer may ask again at once, or cancel others: so all have ended before
    anything is written.
    """
    for call in calls:
        call.close(None)
        call.is_told_later = False
    for observer in calls[0]._observers:
        observer.ended(calls, outcome)


def report(error: BaseException) -> None:
    """Log the error of one observer of a call's end; the other observers are notified."""
    asyncio.get_running_loop().call_exception_handler(
        {"message": "An answer could not be delivered", "exception": error}
    )


def tell_together(calls: Sequence[Call], outcome: Outcome) -> None:
    """Notify the observers of calls that were closed with one outcome, after their answers' write.

    Calls whose answer could not be written are notified one by one, with their own outcome.
    """
    alike = [call for call in calls if call.outcome is outcome and not call.is_told_later]
    for observer in alike[0]._observers if alike else ():
        observer.ended(alike, outcome)
    if len(alike) < len(calls):
        for call in calls:
            if call.outcome is not outcome and call.outcome is not None:
                call.tell()


current_call: ContextVar[Call | None] = ContextVar("current_call", default=None)
"""The call that a coroutine answers; set by `Gates.passing` around its handler."""


def owner_now() -> str:
    """Return the owner of the current call's side effects; empty without a call or principal."""
    call = current_call.get()
    return "" if call is None else call.owner


def outside_call() -> Context:
    """Return a copy of the context that has no `current_call`, for timers.

    A timer that is cancelled keeps its context until it is due, and would keep the call that long.
    """
    context = copy_context()
    context.run(current_call.set, None)
    return context
