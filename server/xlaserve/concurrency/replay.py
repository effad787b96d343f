"""Repeats changes that may depend on each other, in any order."""

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from xlaserve.concurrency.control_plane import OF_LOADS, ChangeKind


class ReplayedChange(Protocol):
    """A change to be repeated in this process."""

    @property
    def kind(self) -> ChangeKind:
        """The kind of change."""
        ...

    @property
    def subject(self) -> str:
        """The name of the model."""
        ...


C = TypeVar("C", bound=ReplayedChange)
E = TypeVar("E")

_OF_ANOTHER = re.compile(r"\b(ensemble|step|unknown model|is not ready)\b")
"""Words in a load error which show that the load failed because of another model."""


@dataclass(slots=True)
class Failed(Generic[C, E]):
    """A change that failed."""

    change: C
    error: E
    loads: int
    """Number of successful loads before the change failed."""
    needs_another: bool


class Replay(Generic[C, E]):
    """Repeats changes, and retries those that failed because a model was not loaded yet.

    Loading an ensemble requires its steps, which may come later in the list. Any other failed load
    would fail again, possibly after a long time, so it is not retried.
    """

    def __init__(
        self,
        make: Callable[[C], Awaitable[E | None]],
        text: Callable[[E], str],
        without_files: Callable[[C], C],
    ) -> None:
        """`make` returns an error, or None on success; `text` returns the error's text."""
        self.failed: list[Failed[C, E]] = []
        """Failed changes, in order. They keep their files while they may be retried."""
        self._make = make
        self._text = text
        self._without_files = without_files
        self._loads = 0

    async def make(self, change: C) -> None:
        """Make a change, and record it if it fails."""
        error = await self._tried(change)
        if error is not None:
            needs = self._needs_another(change, error)
            kept = change if needs else self._without_files(change)
            self.failed.append(Failed(kept, error, self._loads, needs))

    async def settle(self) -> None:
        """Retry failed changes for as long as retries load further models."""
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
        # Ignore the model's own name, which may contain one of the words.
        text = self._text(error).replace(f"'{change.subject}'", "")
        return _OF_ANOTHER.search(text) is not None
