"""Interfaces of stations and of the instances that they execute."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

from xlaserve.concurrency.abandoned import Abandoned
from xlaserve.concurrency.completion import Cancellable
from xlaserve.concurrency.limited import LimitedCall
from xlaserve.model_config.config import ModelConfig
from xlaserve.serving.checks import QuickCheck
from xlaserve.serving.infer_call import InferCall, ServedInstance


class Station(Protocol):
    """Executes the calls of one loaded instance. Belongs to the event loop.

    Built when loading ends, and replaced as a whole when the instance asks for it (`Served.renew`).
    """

    def pending_since(self) -> Iterator[int]:
        """Yield the submission time of each queued execution, in nanoseconds.

        In no particular order; used by `Backlog.of`.
        """
        ...

    def begin(self, call: InferCall) -> None:
        """Execute an admitted call, and answer it now or later, once or several times.

        The last answer ends it; until then `call.place` is its queue or execution. Raises errors
        that are known immediately.
        """
        ...

    def retire(self) -> Sequence[InferCall]:
        """Start nothing more, and return the queued calls, which the next station begins.

        Running executions continue.
        """
        ...


class Served(ServedInstance, Protocol):
    """A loaded instance, as seen by its station."""

    @property
    def runner(self) -> object:
        """Return the loaded model, from which the kind of station is chosen."""
        ...

    @property
    def config(self) -> ModelConfig:
        """Return the model's configuration at load time."""
        ...

    @property
    def platform(self) -> str:
        """Return the JAX platform of the server."""
        ...

    @property
    def quick(self) -> QuickCheck:
        """Return the quick check of ordinary requests."""
        ...

    @property
    def station(self) -> Station:
        """Return the current station."""
        ...

    @property
    def fault(self) -> str:
        """Return the reason why the instance is unready, or an empty string if it is ready."""
        ...

    @property
    def has_left(self) -> bool:
        """Tell whether the instance is being unloaded or replaced; it is closed when drained."""
        ...

    def suspend(self, fault: str) -> None:
        """Reject requests until `resume`; running ones continue."""
        ...

    def resume(self) -> None:
        """Accept requests again."""
        ...

    def renew(self) -> None:
        """Rebuild the station, since conditions for its choice have changed."""
        ...

    def on_leave(self, call: Callable[[], None]) -> None:
        """Register a callback for the start of unloading; requests may still be in progress."""
        ...

    def on_drain_expired(self, call: Callable[[], None]) -> None:
        """Register a callback for requests still running `drain_seconds` after unloading began."""
        ...

    @property
    def is_stuck(self) -> bool:
        """Tell whether an abandoned thread may still use the model."""
        ...

    def abandon(self, work: LimitedCall[Any], doing: str) -> Abandoned:
        """Record an abandoned thread that may still use the model."""
        ...

    def correct(self) -> None:
        """Update the accounting of the model's memory."""
        ...


@runtime_checkable
class Elsewhere(Protocol):
    """A model loaded by another process, which queues and counts the requests."""

    def station(self, instance: Served) -> Station:
        """Return the station that forwards requests to that process."""
        ...


class Wrapper(Station, Protocol):
    """A station that wraps another one, which may be replaced."""

    within: Station

    def renew(self, within: Station) -> None:
        """Replace the inner station; queued calls move to the new one."""
        ...


MakeStation: TypeAlias = Callable[[Served, Station | None], Station]
"""Builds the station of an instance; the second argument is the replaced one or None."""


class Working:
    """The execution of one call (a Holder)."""

    __slots__ = ("_work",)

    def __init__(self, work: Cancellable) -> None:
        self._work = work

    def leave(self, call: InferCall) -> None:
        """Cancel the execution, if still possible."""
        self._work.cancel()
