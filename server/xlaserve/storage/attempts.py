"""Retries store requests that failed temporarily, and tracks the store's health."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from xlaserve.storage.fetching import ATTEMPTS, FetchCounts, pause_seconds
from xlaserve.storage.objects import ObjectChanged, ObjectMissing, StoreProblem

T = TypeVar("T")


class Attempts:
    """Runs requests to one store, with retries. Thread-safe."""

    def __init__(
        self,
        counts: FetchCounts | None = None,
        *,
        most: int = ATTEMPTS,
        seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Limit each request to a number of attempts, the last of which starts within `seconds`."""
        self._counts = counts or FetchCounts()
        self._most = most
        self._seconds = seconds
        self._clock = clock
        self._closed = threading.Event()
        self.problem = ""
        """Why the last request failed, or an empty string if the store answered."""

    @classmethod
    def one(cls) -> "Attempts":
        """Return an instance that makes a single attempt per request."""
        return cls(most=1)

    def run(self, ask: Callable[[], T]) -> T:
        """Run a request with retries; return its result or raise its last problem. Blocks."""
        until, failed = self._clock() + self._seconds, 0
        while True:
            try:
                with self.noting():
                    return ask()
            except StoreProblem as problem:
                failed += 1
                is_last = failed >= self._most or self._clock() >= until or self._closed.is_set()
                if is_last or not problem.is_transient:
                    self._count(problem)
                    raise
            self._closed.wait(pause_seconds(failed))
            self._counts.add(retries=1)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Record the outcome of a request that the caller retries itself."""
        try:
            yield
        except StoreProblem as problem:
            self.problem = "" if _is_answer(problem) else str(problem)
            raise
        else:
            self.problem = ""

    def look(self, ask: Callable[[], object]) -> None:
        """Make a single request to test the store; a missing root counts as a failure."""
        try:
            ask()
        except StoreProblem as problem:
            self.problem = str(problem)
        else:
            self.problem = ""

    def failed(self, problem: StoreProblem) -> None:
        """Record why several concurrent requests failed; some of them may have succeeded since."""
        if problem.is_away:
            self.problem = str(problem)

    def close(self) -> None:
        """Stop retrying."""
        self._closed.set()

    def _count(self, problem: StoreProblem) -> None:
        if not _is_answer(problem):
            self._counts.add(refused=1)


def _is_answer(problem: StoreProblem) -> bool:
    """Tell whether the store works, so that the problem is the object."""
    return isinstance(problem, ObjectMissing | ObjectChanged)
