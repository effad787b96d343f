"""Other workers of a server that are played: what they say crosses as it would between two."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from xlaserve.concurrency.others import About, Answering, Asked, Question

T = TypeVar("T")


class PlayedOthers:
    """Worker 0 asks; the others say what they are given, or are missing."""

    are_there = True

    def __init__(
        self, others: Mapping[str, object], missing: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._others = others
        self._missing = missing
        self.asked: list[tuple[Question, About]] = []
        self.answering: dict[Question, Answering] = {}

    async def ask(self, question: Question, about: About, own: T, kind: object) -> Asked[T]:
        """Return the answers that were given."""
        self.asked.append((question, about))
        answers: dict[str, Any] = {"0": own}
        for worker, answer in self._others.items():
            data = msgspec.json.encode(answer, enc_hook=_plain)
            answers[worker] = msgspec.json.decode(data, type=kind)
        return Asked(answers, self._missing)

    def answer(self, question: Question, answering: Answering) -> None:
        """Keep it for a test to call."""
        self.answering[question] = answering


def _plain(value: object) -> object:
    assert isinstance(value, MappingProxyType)
    return dict(value)
