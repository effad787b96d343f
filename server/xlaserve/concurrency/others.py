"""Questions to the other worker processes of the server."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from xlaserve.errors import WorkersSilent

T = TypeVar("T")


class Question(StrEnum):
    """Questions that every worker answers about itself."""

    STATISTICS = "statistics"
    INDEX = "index"
    STATUS = "status"
    HISTORY = "history"
    METRICS = "metrics"
    MODEL = "model"
    HOSTING = "hosting"


@dataclass(frozen=True, slots=True)
class AllAnswers(Generic[T]):
    """The answers of all workers to a question."""

    answers: Mapping[str, T]
    """Answers by worker; the asking worker's own answer comes first."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Why answers are missing, by worker. Workers that are not ready are not asked."""

    def complete(self) -> Mapping[str, T]:
        """Return the answers if every worker has answered; raises WorkersSilent otherwise."""
        if self.missing:
            raise WorkersSilent(self.missing)
        return self.answers


About = Mapping[str, str]
"""The arguments of a question."""

Answering = Callable[[About], Awaitable[object]]
"""Answers a question from another worker."""


class Others(Protocol):
    """The other worker processes of the server."""

    @property
    def are_there(self) -> bool:
        """Tell whether the server has more than one worker."""
        ...

    async def ask(self, question: Question, about: About, own: T, kind: object) -> AllAnswers[T]:
        """Return the answers of all workers within a time limit; `own` is this worker's answer.

        The other workers' answers are decoded as the type `kind`.
        """
        ...

    def answer(self, question: Question, answering: Answering) -> None:
        """Register the function that answers a question of other workers."""
        ...


class Nobody:
    """The `Others` of a server with a single process."""

    are_there = False

    async def ask(self, question: Question, about: About, own: T, kind: object) -> AllAnswers[T]:
        """Return this process's own answer."""
        return AllAnswers({"": own})

    def answer(self, question: Question, answering: Answering) -> None:
        """Do nothing: there are no other processes."""


NOBODY = Nobody()
