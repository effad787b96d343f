"""Lets the core ask the other workers questions; answers travel as JSON."""

from types import MappingProxyType
from typing import Any, TypeVar

import msgspec
import structlog

from xlaserve.concurrency.control_plane import ControlPlane
from xlaserve.concurrency.others import About, AllAnswers, Answering, Question

T = TypeVar("T")
ENGINE = "0"
"""The engine, which has the models of front ends."""
_log = structlog.get_logger("worker")


class OtherWorkers:
    """Asks the other workers through the control plane."""

    are_there = True

    def __init__(self, plane: ControlPlane, worker: int) -> None:
        self._plane = plane
        self._worker = str(worker)

    async def ask(self, question: Question, about: About, own: T, kind: object) -> AllAnswers[T]:
        """Return the answers of all workers, and the errors of workers that failed to answer."""
        answers: dict[str, Any] = {self._worker: own}
        if not self._plane.loads:
            # Put the engine first, because folded answers take single-process facts from the first.
            answers = {ENGINE: None, **answers}
        missing: dict[str, str] = {}
        for answer in await self._plane.ask_all(question.value, dict(about)):
            worker, problem = str(answer.worker), answer.problem
            if not problem:
                try:
                    answers[worker] = msgspec.convert(answer.said, kind)
                except msgspec.ValidationError as error:
                    problem = f"its answer cannot be read: {error}"
            if problem:
                missing[worker] = problem
                _log.warning(
                    "worker did not answer", peer=answer.worker, question=question, reason=problem
                )
        found = {worker: answer for worker, answer in answers.items() if answer is not None}
        return AllAnswers(found, missing)

    def answer(self, question: Question, answering: Answering) -> None:
        """Register the answer to questions from other workers."""

        async def reply(arguments: dict[str, str]) -> object:
            return msgspec.to_builtins(await answering(arguments), enc_hook=_plain)

        self._plane.answer(question.value, reply)


def _plain(value: object) -> object:
    if isinstance(value, MappingProxyType):
        return dict(value)
    raise NotImplementedError(f"{type(value).__name__} cannot be sent to another process")
