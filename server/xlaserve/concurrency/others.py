"""The peer processes of the server, and questions to them."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from xlaserve.errors import WorkersSilent

T = TypeVar("T")


class Question(StrEnum):
    """A question that every worker answers for itself."""

    STATISTICS = "statistics"
    INDEX = "index"
    STATUS = "status"
    HISTORY = "history"
    METRICS = "metrics"
    MODEL = "model"
    HOSTING = "hosting"


@dataclass(frozen=True, slots=True)
class Asked(Generic[T]):
    """The answers of the workers to one question."""

    answers: Mapping[str, T]
    """One for each worker; the asking one's comes first."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Reasons of missing answers, by worker; workers that are not ready are not asked."""

    def complete(self) -> Mapping[str, T]:
        """Return the answers where every worker has one; else raises WorkersSilent."""
        if self.missing:
            raise WorkersSilent(self.missing)
        return self.answers


About = Mapping[str, str]
"""The arguments of a question."""

Answering = Callable[[About], Awaitable[object]]
"""Returns this process's answer to a question of another."""


class Others(Protocol):
    """The other workers of the server."""

    @property
    def are_there(self) -> bool:
        """Tell whether the server is more than this process."""
        ...

    async def ask(self, question: Question, about: About, own: T, kind: object) -> Asked[T]:
        """Return the answers of all workers within a limit of time; `own` is that of this one.

        Those of the others are read as `kind`, the type of the answer.
        """
        ...

    def answer(self, question: Question, answering: Answering) -> None:
        """Answer a question of another worker."""
        ...


class Nobody:
    """A single-process server."""

    are_there = False

    async def ask(self, question: Question, about: About, own: T, kind: object) -> Asked[T]:
        """Return the one answer."""
        return Asked({"": own})

    def answer(self, question: Question, answering: Answering) -> None:
        """Do nothing: there are no other processes."""


NOBODY = Nobody()
