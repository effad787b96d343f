"""Records model changes in this process as events, with caller and cause."""

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import structlog

from xlaserve.errors import LoadCancelled, ModelNotFound, XlaserveError
from xlaserve.serving.call import Operation, current_call
from xlaserve.serving.observability.events import (
    MAX_NAME,
    MAX_TEXT,
    NOBODY,
    Asker,
    Cause,
    Event,
    EventKind,
    EventLog,
    Events,
    Origin,
    cut,
)

_log = structlog.get_logger("loading")

_MAX_FAILED = 1000
"""Maximum number of models whose failed loads are counted by name, because clients choose the
names."""
OTHER_MODELS = "other"
_MESH = "ModelMesh"

_cause: ContextVar[Cause] = ContextVar("cause", default=Cause.NONE)


def cause_now() -> Cause:
    """Return the cause of the current change."""
    return _cause.get()


@contextmanager
def because(cause: Cause) -> Iterator[None]:
    """Set the cause of changes within a block, including tasks started in it."""
    token = _cause.set(cause)
    try:
        yield
    finally:
        _cause.reset(token)


def asker_now() -> Asker:
    """Return the client that requested the current change; NOBODY if none did."""
    call = current_call.get()
    if call is None:
        return NOBODY
    protocol = _MESH if call.operation is Operation.RUNTIME else call.protocol
    return Asker(cut(call.owner, MAX_NAME), call.peer.address, protocol)


def origin_now() -> Origin:
    """Return time, caller and cause of the current change."""
    return Origin(time.time_ns(), asker_now(), _cause.get())


class EventNotes:
    """Creates the events of one process, except those that another process records."""

    def __init__(
        self,
        events: Events | None = None,
        worker: int | None = None,
        *,
        now: Callable[[], int] = time.time_ns,
    ) -> None:
        """`worker` is the number of this process; None if the server has only one."""
        self._events = events or EventLog(0)
        self._worker = worker
        self._now = now
        self.failed_loads: dict[str, int] = {}
        """Failed loads per model, before a version was known; models beyond a limit share
        a count.
        """

    async def load(self, model: str, load: Callable[[], Awaitable[None]]) -> None:
        """Run a load, and record a failure; raises like `load`."""
        try:
            await load()
        except XlaserveError as error:
            if not error.is_noted and not isinstance(error, ModelNotFound | LoadCancelled):
                self._count_failed(model, str(error))
            self.load_failed(model, "", error, str(error), again=False)
            raise

    def _count_failed(self, model: str, reason: str) -> None:
        """Count and log a load that failed before its version was known."""
        counted = model
        if model not in self.failed_loads and len(self.failed_loads) >= _MAX_FAILED:
            counted = OTHER_MODELS
        self.failed_loads[counted] = self.failed_loads.get(counted, 0) + 1
        _log.warning("model not loaded", model=model, version="", reason=reason)

    def loaded(self, model: str, version: str, *, again: bool) -> None:
        """Record the load of a version, or its reload."""
        self._note(EventKind.RELOAD if again else EventKind.LOAD, model, version)

    def load_failed(
        self, model: str, version: str, error: BaseException, reason: str, *, again: bool
    ) -> None:
        """Record a failed load; each error is recorded once."""
        if isinstance(error, XlaserveError):
            if error.is_noted:
                return
            error.is_noted = True
        kind = EventKind.RELOAD if again else EventKind.LOAD
        self._note(kind, model, version, failed=True, text=reason)

    def unloaded(self, model: str, version: str, *, for_model: str = "") -> None:
        """Record an unload; `for_model` is the model that needed the memory."""
        kind = EventKind.EVICTION if for_model else EventKind.UNLOAD
        self._note(kind, model, version, for_model=for_model)

    def read_again(self, subject: str, because_of: str, error: str = "") -> None:
        """Record that files of the server were reread, or could not be."""
        with because(Cause.FILES):
            self._note(
                EventKind.READ_AGAIN, subject=subject, failed=bool(error), text=error or because_of
            )

    def _note(
        self,
        kind: EventKind,
        model: str = "",
        version: str = "",
        *,
        subject: str = "",
        failed: bool = False,
        text: str = "",
        for_model: str = "",
    ) -> None:
        cause = _cause.get()
        if self._worker is not None and not failed and self._is_of_another(cause):
            return
        self._events.note(
            Event(
                kind,
                self._now(),
                model=cut(model, MAX_NAME),
                version=version,
                subject=subject,
                failed=failed,
                text=cut(text, MAX_TEXT),
                for_model=cut(for_model, MAX_NAME),
                asker=asker_now(),
                cause=cause,
                worker=self._worker,
            )
        )

    def _is_of_another(self, cause: Cause) -> bool:
        """Tell whether another process records this change for all processes."""
        if cause is Cause.OTHER_WORKER:
            return True
        return cause in (Cause.START, Cause.FILES) and self._worker != 0
