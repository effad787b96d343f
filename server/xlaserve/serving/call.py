"""One request of any protocol: created when its headers arrive, ended exactly once.

A transport creates a `Call` and implements how an answer is written (`write`, `refuse`); `Gates`
admit it; a handler or a station answers it. When a call ends, for whatever reason, its resources
are released before its client and its observers are notified.

    NEW --admit--> BEGUN --answer, last--> ENDED
                   BEGUN --answer--------> BEGUN
    NEW or BEGUN --fail, cancel, expire--> ENDED

ENDED is final: a later answer is silently dropped.

Observers see what the client got: an answered call is closed (`close`), its answer is written, and
then its observers get its `outcome`. If the transport fails to write the answer, the outcome is the
error; a transport that writes later sets `notifies_later` and calls `end` again after the write.
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
    """Operations that clients request and permissions allow."""

    INFER = "infer"
    METADATA = "metadata"
    """Reading metadata, configuration, index, statistics, or gRPC reflection."""
    MANAGE = "manage"
    """Loading and unloading models."""
    RUNTIME = "runtime"
    """The model runtime interface of ModelMesh."""
    METRICS = "metrics"
    PAGE = "page"
    """Reading the data of the status page: models, history, events."""
    SHELL = "shell"
    """Reading the static files of the status page, which contain no server data."""
    HEALTH = "health"
    """Liveness and readiness of the server."""
    READINESS = "readiness"
    """Readiness of a model; the answer reveals that the model exists."""
    SERVICE = "service"
    """A method of a custom service."""


OPEN = frozenset({Operation.SHELL})
"""Operations that need no permission: a browser has no token until the page has asked for one."""


class Api(StrEnum):
    """Groups of requests as Triton restricts them."""

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
    """The headers of a request, in the transport's own representation; names are in lower case."""

    def get(self, name: str, /) -> str | None:
        """Return the value of a header, or None if it is absent."""
        ...


UNIX = "unix"
"""Address of a peer on a unix socket."""
NO_HEADERS: Headers = MappingProxyType[str, str]({})


@dataclass(frozen=True, slots=True)
class Peer:
    """The remote end of a connection, or the client behind a trusted proxy; shared by its calls."""

    listener: str = ""
    """Setting that names the endpoint: `grpc_endpoint`. Empty for calls from inside the process."""
    address: str = ""
    """`10.0.0.7:51824`, or `unix`; without a port if a proxy omits it."""
    tls_identity: str | None = None
    """Subject of the verified client certificate."""
    unix_user: int | None = None
    """User id of the process at the other end of a unix socket."""
    account: Account | None = field(default=None, compare=False, repr=False)
    """Memory account of the connection; None inside the process, where nothing is charged."""
    tls_names: tuple[str, ...] = ()
    """Alternative names of the client certificate: `DNS:gateway.example`, `URI:spiffe://mesh/a`."""
    granted: dict[str | None, object] = field(default_factory=dict, compare=False, repr=False)
    """Cache of the permission gate, by token, with None for calls without a token."""
    proxy: str = ""
    """Address of the trusted proxy; empty for a direct connection."""
    scheme: str = ""
    """Scheme of the request as the proxy received it, `http` or `https`; empty if unknown."""
    prefix: str = ""
    """Path prefix under which the proxy serves this server: `/models`; empty if there is none."""
    clients: dict[object, "Peer"] = field(default_factory=dict, compare=False, repr=False)
    """Cache of `Proxies`: clients behind this proxy, by their headers."""


def host_of(address: str) -> str:
    """Return the address of a peer without its port: one host counts as one client."""
    host, _, port = address.rpartition(":")
    has_port = port.isdecimal() and (":" not in host or host.endswith("]"))
    return host if has_port and host else address


NOBODY = Peer()
"""The peer of calls that the server makes itself."""


class Admission:
    """Number of calls in progress for one model, and its limit."""

    __slots__ = ("in_progress", "limit", "model")

    def __init__(self, model: str, limit: int) -> None:
        self.model = model
        self.limit = limit
        self.in_progress = 0
        """Calls not answered within the iteration in which they arrived, over all versions."""


class Sight(Protocol):
    """The models that a caller may see and use."""

    def permits(self, model: str) -> bool:
        """Tell whether the model is permitted; raises NotPermitted if it is only visible."""
        ...

    def shows(self, model: str) -> bool:
        """Tell whether the model is visible; raises nothing."""
        ...

    def absent(self, model: str, version: str, *, detail: str) -> Exception:
        """Return the error for a hidden model, the same as for a missing one."""
        ...

    def refuse_server(self) -> None:
        """Raise NotPermitted: this caller may not change server-wide state."""
        ...


Tokens: TypeAlias = tuple[int | None, int | None]
"""Token counts of the prompt and the answer; None if they are not counted."""
NOT_COUNTED: Tokens = (None, None)

Outcome: TypeAlias = object
"""How a call ended: an exception, an execution (`Executed`), or None."""


class Observer(Protocol):
    """Sees every call begin and end. Runs on the event loop and must not block."""

    @property
    def began(self) -> "Callable[[Call], None] | None":
        """Return a callback to call with each call before the gates check it, or None."""
        ...

    def ended(self, calls: "Sequence[Call]", outcome: Outcome) -> None:
        """Observe calls that ended together, before their clients can send another request."""
        ...


class Call:
    """One request. A transport subclasses it and implements how an answer is written.

    Belongs to the event loop. Attributes that most calls never set are class attributes, which
    makes creating a call cheap.
    """

    operation = Operation.INFER
    api: Api | None = None
    """The call's group in Triton's terms, unless the operation implies it."""
    protocol = ""
    """Protocol of the request, as in the event log; empty inside the process."""
    method = ""
    """The method or route, with placeholders: `/inference.GRPCInferenceService/ModelInfer`,
    or `POST /v2/models/{model}/infer`; empty inside the process.
    """
    tokens: Callable[[], Tokens] | None = None
    """Returns the call's token counts; None if they are not counted."""
    carries_calls = False
    """Whether the call is a stream whose messages are counted as separate calls."""
    model = ""
    """Name of the model, once known; some protocols have it in the message instead of the
    headers."""
    version = ""
    """Requested version; empty for the newest."""
    headers: Headers = NO_HEADERS
    peer: Peer = NOBODY
    principal: Principal | None = None
    """The authenticated caller, set by the permission gate; None for an anonymous one."""
    client = 0
    """Connection number, if another process owns the connection; 0 if `peer` is the connection."""
    sight: Sight | None = None
    """Models that the caller may see, set by the permission gate; None for all. Nested calls have
    None: a caller who may use an ensemble needs no permission for its steps.
    """
    deadline: float | None = None
    """The client's deadline by the event loop's clock; None if there is none."""
    admission: Admission | None = None
    """Count of the model's calls in progress; None until the model is found."""
    parent: "Call | None" = None
    """The enclosing call, of an ensemble or a custom service."""
    uses: "set[tuple[str, str, weakref.ref[object] | None]] | None" = None
    """Models used for the answer, if the answer may be cached; else None."""
    companions: "Sequence[weakref.ref[Call]]" = ()
    """Calls that one run of Python code answers together, including this one; empty if it is alone.
    """
    opened_ns = 0
    """Arrival time of the headers by the engine's clock, if the transport creates the call only
    after its message has arrived; 0 if it creates the call immediately."""
    record: CallRecord | None = None
    """Times and sizes noted by the transport; None unless an observer needs them."""
    is_found = False
    """Whether the model of an inference has been found."""
    has_begun = False
    has_ended = False
    outcome: "Outcome" = None
    """The outcome for the observers, once the call has ended; an error if writing the answer
    failed. Reset to None after the observers are notified.
    """
    notifies_later = False
    """Whether the observers are notified later, after a deferred write of the answer."""
    is_cancelled = False
    """Whether the client has abandoned the call: nothing more is written."""
    holds_anything = False
    """Whether `release` has work to do; false for most calls, which are answered immediately."""
    on_writable: Callable[[], None] | None = None
    """Called once when the stream is writable or the call ends; set by a station that waits."""
    _observers: Sequence[Observer] = ()
    _holds: list[Callable[[], None]] | None = None
    _timer: asyncio.TimerHandle | None = None

    # --- overridden by transports ---

    def write(self, response: Any, *, last: bool) -> None:
        """Send an answer to the client; raises nothing."""

    def refuse(self, error: BaseException) -> None:
        """Send the status for an error; raises nothing."""

    @property
    def is_writable(self) -> bool:
        """Tell whether the stream accepts another answer; if not, the station pauses."""
        return True

    @property
    def root(self) -> "Call":
        """Return the client's call that this one belongs to, or this call if it is the client's."""
        call: Call = self
        while call.parent is not None:
            call = call.parent
        return call

    @property
    def owner(self) -> str:
        """Return the name of the principal who owns the call's side effects.

        Empty for anonymous callers, which all count as one owner. A nested call has the owner of
        the outermost call.
        """
        principal = self.principal if self.parent is None else self.root.principal
        return "" if principal is None else principal.name

    @property
    def caller(self) -> str:
        """Return the identity for fair scheduling: the principal, else the client's host.

        Empty if neither is known; all such calls count as one caller. A nested call has the
        identity of the client that made the outermost call.
        """
        return self.owner or host_of(self.root.peer.address)

    # --- called by transports and stations ---

    def answer(self, response: Any, *, last: bool = True) -> None:
        """Write a response; the last one ends the call. Does nothing once the call has ended."""
        if self.has_ended:
            return
        if not last:
            self.write(response, last=False)
            return
        self.conclude(response, None)

    def fail(self, error: BaseException) -> None:
        """End the call with an error, which is sent to the client."""
        if not self.has_ended:
            self.end(error)
            self.refuse(error)

    async def writable(self) -> None:
        """Return once the stream accepts another answer, or the call has ended (backpressure)."""
        while not (self.is_writable or self.has_ended):
            resumed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.on_writable = partial(settle, resumed, None)
            self.holds_anything = True
            await resumed

    def hold(self, release: Callable[[], None]) -> None:
        """Call `release` when the call ends, or immediately if it has ended."""
        if self.has_ended:
            release()
            return
        self.holds_anything = True
        if self._holds is None:
            self._holds = []
        self._holds.append(release)

    # --- called by transports ---

    def resume(self) -> None:
        """Call `on_writable` once: the stream is writable again."""
        resumed, self.on_writable = self.on_writable, None
        if resumed is not None:
            resumed()

    def cancel(self, reason: str = "") -> None:
        """End an abandoned call; nothing more is written."""
        self.is_cancelled = True
        if not self.has_ended:
            self.end(asyncio.CancelledError(reason))

    def expire(self) -> None:
        """Fail the call because its deadline has passed."""
        self.fail(DeadlineExceeded())

    def expire_in_time(self) -> None:
        """Start a timer that expires the call at its deadline, if it has one and has not ended.

        Idempotent.
        """
        if self.deadline is not None and not self.has_ended and self._timer is None:
            context = outside_call() if current_call.get() is not None else None
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(self.deadline, self.expire, context=context)
            self.holds_anything = True

    # --- ending the call ---

    def end(self, outcome: Outcome = None) -> None:
        """End the call without writing; the caller of `end` writes the answer by other means.

        If `notifies_later` is set, notify the observers now, with `outcome` if it is an error.
        """
        if not self.has_ended:
            self.close(outcome)
            self.tell()
        elif self.notifies_later:
            if isinstance(outcome, BaseException):
                self.outcome = outcome
            self.tell()

    def conclude(self, response: Any, outcome: Outcome) -> None:
        """End the call with its last answer, then notify its observers of the outcome.

        Both in one event-loop iteration: observers have seen the call before its client can send
        another.
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
        if not self.notifies_later:
            # `close` and `tell` inlined: most requests take this path.
            final_outcome, self.outcome = self.outcome, None
            for observer in self._observers:
                observer.ended((self,), final_outcome)

    def close(self, outcome: Outcome) -> None:
        """Mark the call as ended before its answer is written; does not notify the observers."""
        self.has_ended = True
        self.outcome = outcome
        if self.holds_anything:
            self.release()

    def tell(self) -> None:
        """Notify the observers of the outcome."""
        self.notifies_later = False
        # An exception's traceback refers to the call: clear it to avoid a reference cycle.
        outcome, self.outcome = self.outcome, None
        for observer in self._observers:
            observer.ended((self,), outcome)

    def release(self) -> None:
        """Release the call's resources; called once, by `end`, `close` or `conclude`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        holds, self._holds = self._holds, None
        for release in holds or ():
            release()
        if self.on_writable is not None:
            self.resume()


def end_together(calls: Sequence[Call], outcome: Outcome) -> None:
    """End calls that are in progress: release their resources, then notify the observers.

    A client may send another request, or cancel other calls, as soon as it has its answer: so all
    of the calls end before the first answer is written.
    """
    for call in calls:
        call.close(None)
        call.notifies_later = False
    for observer in calls[0]._observers:
        observer.ended(calls, outcome)


def report(error: BaseException) -> None:
    """Log an error in delivering an answer; the remaining calls and observers are still served."""
    asyncio.get_running_loop().call_exception_handler(
        {"message": "An answer could not be delivered", "exception": error}
    )


def tell_together(calls: Sequence[Call], outcome: Outcome) -> None:
    """Notify the observers of calls closed with one outcome, after their answers are written.

    Calls whose answer could not be written are reported one by one, each with its own outcome.
    """
    alike = [call for call in calls if call.outcome is outcome and not call.notifies_later]
    for observer in alike[0]._observers if alike else ():
        observer.ended(alike, outcome)
    if len(alike) < len(calls):
        for call in calls:
            if call.outcome is not outcome and call.outcome is not None:
                call.tell()


current_call: ContextVar[Call | None] = ContextVar("current_call", default=None)
"""The call being answered in this context; set by `Gates.passing` around its handler."""


def owner_now() -> str:
    """Return the owner of the current call; empty if there is no call or principal."""
    call = current_call.get()
    return "" if call is None else call.owner


def outside_call() -> Context:
    """Return a copy of the context without `current_call`, for timers.

    A cancelled timer keeps its context until it is due, and with it the call.
    """
    context = copy_context()
    context.run(current_call.set, None)
    return context
