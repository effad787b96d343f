"""Work that would hold the event loop for too long, and the threads that do it instead."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")

Submit: TypeAlias = Callable[..., "Future[Any]"]
"""Runs a call in a thread for computing."""

INLINE_BYTES = 64 << 10
"""What is read, written or packed on the event loop: a hop to a thread costs as much."""


class OffLoop:
    """Runs calls on the event loop while they are small, else in a thread.

    JSON takes a tenth of a microsecond for each number: others are served meanwhile.
    """

    def __init__(self, submit: Submit) -> None:
        self._submit = submit

    async def run(self, size_bytes: int, call: Callable[[], T]) -> T:
        """Run a call whose time grows with so many bytes."""
        if size_bytes <= INLINE_BYTES:
            return call()
        result: T = await asyncio.wrap_future(self._submit(call))
        return result
