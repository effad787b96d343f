"""Calls a model's `is_ready` in a separate thread."""

import asyncio
import inspect
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import structlog

from xlaserve.python_models.failures import failure


class CodeReadiness:
    """Asks one replica; concurrent callers share one call (single-flight).

    Its thread is not the replica's, so a long execution does not make the model unready. It is a
    daemon thread that ends after one answer: an `is_ready` that hangs does not delay shutdown.
    """

    def __init__(self, name: str, is_ready: Callable[[], Any]) -> None:
        self._name = name
        self._is_ready = is_ready
        self._pending: Future[bool] | None = None

    def ask(self) -> "Future[bool]":
        """Return the future of the pending call, or of a new one; it never raises."""
        if self._pending is None or self._pending.done():
            self._pending = answer = Future[bool]()
            title = f"python {self._name} is_ready"
            threading.Thread(target=self._run, args=(answer,), name=title, daemon=True).start()
        return self._pending

    def _run(self, answer: "Future[bool]") -> None:
        answer.set_result(self._answer())

    def _answer(self) -> bool:
        try:
            result = self._is_ready()
            if inspect.iscoroutine(result):
                result = asyncio.run(result)
        except BaseException as error:
            failure(self._name, error, "is_ready")
            return False
        if not isinstance(result, bool):
            structlog.get_logger("python").error(
                "invalid result of is_ready", model=self._name, got=type(result).__name__
            )
            return False
        return result


class PresentReadiness:
    """Readiness that the server knows without asking the model's code."""

    def __init__(self, is_ready: Callable[[], bool]) -> None:
        self._is_ready = is_ready

    def ask(self) -> "Future[bool]":
        """Return the answer as a completed future."""
        answer = Future[bool]()
        answer.set_result(self._is_ready())
        return answer


def ask_all(copies: Sequence[object]) -> "list[Future[bool]]":
    """Return the pending `is_ready` results of the replicas that have readiness checks."""
    found = (getattr(copy, "readiness", None) for copy in copies)
    return [one.ask() for one in found if isinstance(one, CodeReadiness | PresentReadiness)]
