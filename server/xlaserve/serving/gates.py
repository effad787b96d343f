"""The gates that every call of every protocol passes, and the observers of calls.

No transport, plan or connection may cache the verdict of a gate.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from xlaserve.errors import DeadlineExceeded, Overloaded, ShuttingDown
from xlaserve.serving.call import Call, Headers, Observer, Operation, Peer, current_call
from xlaserve.serving.call_record import CallRecord
from xlaserve.serving.proxies import Proxies

Check: TypeAlias = Callable[[Call], None]
"""A check; raises to reject a call."""

REFUSED_WHILE_DRAINING = frozenset({Operation.INFER})
"""Operations that a drain refuses. The others continue: health reports the shutdown, and
`ModelControl` refuses loads by itself.
"""


@dataclass(frozen=True, slots=True)
class Gate:
    """One row of the table of gates."""

    name: str
    check: Check
    of_model: bool = False
    """Whether the gate is passed when the call's model is found, not when the call begins."""
    of_deadline: bool = False
    """Whether the gate only concerns calls with a deadline."""


def everybody(call: Call) -> None:
    """Permit every call."""


class Gates:
    """The gates, in order, and the observers."""

    def __init__(
        self,
        *,
        permission: Check = everybody,
        observers: Sequence[Observer] = (),
        trusted: Iterable[str] = (),
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        """`trusted` lists the trusted proxies; `clock` is the engine's."""
        self._clock = clock
        self._proxies = Proxies(trusted) or None
        self.table = (
            Gate("draining", self._is_open),
            Gate("permission", permission),
            Gate("limits", _below_limit, of_model=True),
            Gate("deadline", _in_time, of_deadline=True),
        )
        self._observers: tuple[Observer, ...] = ()
        self._began: tuple[Callable[[Call], None], ...] = ()
        self._recording: tuple[Observer, ...] = ()
        """Observers that need a `CallRecord` of each call."""
        self.are_watched = False
        """Whether an observer sees calls begin or needs records of them."""
        self._see_with(observers)
        self._is_draining = False
        self._open()

    def observe(self, observer: Observer, *, needs_records: bool = False) -> None:
        """Add an observer for calls that begin from now on.

        With `needs_records`, each of these calls has a `CallRecord` that its transport completes.
        """
        if needs_records:
            self._recording = (*self._recording, observer)
        self._see_with((*self._observers, observer))

    def observe_no_more(self, observer: Observer) -> None:
        """Remove an observer; it sees no call that begins from now on."""
        self._recording = tuple(other for other in self._recording if other is not observer)
        self._see_with([other for other in self._observers if other is not observer])

    def _see_with(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)
        self._began = tuple(observer.began for observer in observers if observer.began is not None)
        self.are_watched = bool(self._began or self._recording)

    def admit(self, call: Call) -> None:
        """Begin a call, as soon as its headers have arrived.

        Raises the error of the gate that rejects the call; the caller fails the call with it.
        """
        assert not call.has_begun, "the call already began"
        call.has_begun = True
        call._observers = self._observers
        if self._proxies is not None:
            call.peer = self._proxies.client_of(call.peer, call.headers)
        if self.are_watched:
            # Created here, not by observers: calling one would cost as much as the record itself.
            if self._recording:
                call.record = CallRecord(call.opened_ns or self._clock())
            for began in self._began:
                began(call)
        for check in self._timeless if call.deadline is None else self._at_begin:
            check(call)

    def client_of(self, peer: Peer, headers: Headers) -> Peer:
        """Return the client as determined by `admit`, for checks before admission."""
        return peer if self._proxies is None else self._proxies.client_of(peer, headers)

    def admit_to_model(self, call: Call) -> None:
        """Admit a call to its known model; raises like `admit`."""
        for check in self.of_model:
            check(call)

    @contextmanager
    def passing(self, call: Call) -> Iterator[None]:
        """Admit a call, and end it when the block ends, for handlers that return or raise.

        Sets `current_call` within the block. Raises the error of the gate that rejects the call.
        """
        token = current_call.set(call)
        try:
            self.admit(call)
            yield
        except asyncio.CancelledError as error:
            call.cancel(str(error))
            call.end(error)  # if it had ended with a deferred answer that was never written
            raise
        except BaseException as error:
            call.end(error)
            raise
        else:
            call.end()
        finally:
            current_call.reset(token)

    def drain(self) -> None:
        """Admit no more inferences, except nested calls of admitted ones."""
        self._is_draining = True
        self._open()

    def _open(self) -> None:
        """Collect the checks that can currently refuse anything."""
        idle = {everybody} if self._is_draining else {everybody, self._is_open}
        gates = [gate for gate in self.table if gate.check not in idle]
        at_begin = [gate for gate in gates if not gate.of_model]
        self._at_begin = tuple(gate.check for gate in at_begin)
        self._timeless = tuple(gate.check for gate in at_begin if not gate.of_deadline)
        self.of_model = tuple(gate.check for gate in gates if gate.of_model)

    def _is_open(self, call: Call) -> None:
        if self._is_draining and call.parent is None and call.operation in REFUSED_WHILE_DRAINING:
            raise ShuttingDown


def _below_limit(call: Call) -> None:
    admission = call.admission
    if admission is not None and admission.in_progress >= admission.limit:
        raise Overloaded(admission.model, admission.limit, "max_requests_per_model")


def _in_time(call: Call) -> None:
    if call.deadline is not None and call.deadline <= asyncio.get_running_loop().time():
        raise DeadlineExceeded
