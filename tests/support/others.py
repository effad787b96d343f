"""Fake peer workers of a server; answers are serialized as between real workers."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from xlaserve.concurrency.others import About, AllAnswers, Answering, Question

T = TypeVar("T")


class PlayedOthers:
    """Peers of worker 0: they return prepared answers or are missing."""

    are_there = True

    def __init__(
        self, others: Mapping[str, object], missing: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._others = others
        self._missing = missing
        self.asked: list[tuple[Question, About]] = []
        self.answering: dict[Question, Answering] = {}

    async def ask(self, question: Question, about: About, own: T, kind: object) -> AllAnswers[T]:
        """Return the prepared answers."""
        self.asked.append((question, about))
        answers: dict[str, Any] = {"0": own}
        for worker, answer in self._others.items():
            data = msgspec.json.encode(answer, enc_hook=_plain)
            answers[worker] = msgspec.json.decode(data, type=kind)
        return AllAnswers(answers, self._missing)

    def answer(self, question: Question, answering: Answering) -> None:
        """Store the handler so that a test can call it."""
        self.answering[question] = answering


def _plain(value: object) -> object:
    assert isinstance(value, MappingProxyType)
    return dict(value)
