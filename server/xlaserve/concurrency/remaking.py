"""Makes changes again that may need one another, in whatever order they are known."""

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from xlaserve.concurrency.control_plane import OF_LOADS, ChangeKind


class Remade(Protocol):
    """A change, as one process or another has it."""

    @property
    def kind(self) -> ChangeKind:
        """The kind of change."""
        ...

    @property
    def subject(self) -> str:
        """The model."""
        ...


C = TypeVar("C", bound=Remade)
E = TypeVar("E")

_OF_ANOTHER = re.compile(r"\b(ensemble|step|unknown model|is not ready)\b")
"""Words in the error of a load that failed because of another model."""


@dataclass(slots=True)
class Failed(Generic[C, E]):
    """A change that could not be made."""

    change: C
    error: E
    loads: int
    """How many loads had succeeded by then."""
    needs_another: bool


class Remaking(Generic[C, E]):
    """Makes changes, and those again that failed for a model which was loaded later.

    A load of an ensemble needs those of its steps, whichever was asked for first. Any other load
    that fails would fail again, and may take long to do so: it is made once.
    """

    def __init__(
        self,
        make: Callable[[C], Awaitable[E | None]],
        text: Callable[[E], str],
        without_files: Callable[[C], C],
    ) -> None:
        """`make` returns why a change cannot be made, whose `text` says which model it needs."""
        self.failed: list[Failed[C, E]] = []
        """Changes that could not be made, in order; with their files if they may be made yet."""
        self._make = make
        self._text = text
        self._without_files = without_files
        self._loads = 0

    async def make(self, change: C) -> None:
        """Make a change for the first time."""
        error = await self._tried(change)
        if error is not None:
            needs = self._needs_another(change, error)
            kept = change if needs else self._without_files(change)
            self.failed.append(Failed(kept, error, self._loads, needs))

    async def settle(self) -> None:
        """Make those again that may work, as others were loaded behind them."""
        while again := [
            one for one in self.failed if one.needs_another and one.loads < self._loads
        ]:
            for one in again:
                error = await self._tried(one.change)
                if error is None:
                    self.failed.remove(one)
                else:
                    one.error, one.loads = error, self._loads
                    one.needs_another = self._needs_another(one.change, error)

    async def _tried(self, change: C) -> E | None:
        error = await self._make(change)
        if error is None and change.kind in OF_LOADS:
            self._loads += 1
        return error

    def _needs_another(self, change: C, error: E) -> bool:
        if change.kind not in OF_LOADS:
            return False
        # A model may be called a step.
        said = self._text(error).replace(f"'{change.subject}'", "")
        return _OF_ANOTHER.search(said) is not None
