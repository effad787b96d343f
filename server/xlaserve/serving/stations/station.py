"""The interface of stations, and their common access to the model instance."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

from xlaserve.concurrency.abandoned import Abandoned
from xlaserve.concurrency.completion import Cancellable
from xlaserve.concurrency.limited import LimitedCall
from xlaserve.model_config.config import ModelConfig
from xlaserve.serving.checks import QuickCheck
from xlaserve.serving.infer_call import InferCall, ServedInstance


class Station(Protocol):
    """Executor of one loaded instance. Of the event loop.

    It is built when the load ends, and replaced as a whole when something is learnt.
    """

    def pending_since(self) -> Iterator[int]:
        """Yield when each execution that waits to begin was submitted, in nanoseconds.

        In no order; `Backlog.of` makes figures of it.
        """
        ...

    def begin(self, call: InferCall) -> None:
        """Answer a call that was admitted, now or later, once or many times; the last one ends it.

        Until it ends, `call.place` is its queue or execution. Raises errors that are known at once.
        """
        ...

    def retire(self) -> Sequence[InferCall]:
        """Begin nothing more, and return the calls that wait, for the station that comes next.

        What has begun goes on to its end.
        """
        ...


class Served(ServedInstance, Protocol):
    """A loaded instance, as its station knows it."""

    @property
    def runner(self) -> object:
        """Return the loaded model; the table of kinds inspects it."""
        ...

    @property
    def config(self) -> ModelConfig:
        """Return the configuration of the load."""
        ...

    @property
    def platform(self) -> str:
        """Return the JAX platform of the server."""
        ...

    @property
    def quick(self) -> QuickCheck:
        """Return the recogniser of ordinary requests."""
        ...

    @property
    def station(self) -> Station:
        """Return how it works now."""
        ...

    @property
    def fault(self) -> str:
        """Return why it cannot be asked now; empty while it can."""
        ...

    @property
    def has_left(self) -> bool:
        """Whether it was replaced: once it is drained, it is closed."""
        ...

    def suspend(self, fault: str) -> None:
        """Reject requests until `resume`; running ones continue."""
        ...

    def resume(self) -> None:
        """Answer requests again."""
        ...

    def renew(self) -> None:
        """Rebuild the station for new facts."""
        ...

    def on_leave(self, call: Callable[[], None]) -> None:
        """Call something when it begins to leave; requests may still be in progress."""
        ...

    def on_drain_expired(self, call: Callable[[], None]) -> None:
        """Have something called when requests are still in progress `drain_seconds` after that."""
        ...

    @property
    def is_stuck(self) -> bool:
        """Tell whether an abandoned thread may still use the model."""
        ...

    def abandon(self, work: LimitedCall[Any], doing: str) -> Abandoned:
        """Record an abandoned thread that may still use the model."""
        ...

    def correct(self) -> None:
        """Account for the memory that the model holds now."""
        ...


@runtime_checkable
class Elsewhere(Protocol):
    """A model loaded by another process, which queues and counts its requests."""

    def station(self, instance: Served) -> Station:
        """Return the station that forwards requests to that process."""
        ...


class Wrapper(Station, Protocol):
    """A station around another one, which may be replaced."""

    within: Station

    def renew(self, within: Station) -> None:
        """Replace the inner station; queued calls move to the new one."""
        ...


MakeStation: TypeAlias = Callable[[Served, Station | None], Station]
"""Makes the station of an instance; gets the replaced one or None."""


class Working:
    """The execution of a single call."""

    __slots__ = ("_work",)

    def __init__(self, work: Cancellable) -> None:
        self._work = work

    def leave(self, call: InferCall) -> None:
        """Cancel the execution, if still possible."""
        self._work.cancel()
