"""Threads for work that would block the event loop."""

from collections.abc import Callable
from traceback import clear_frames
from typing import TypeAlias, TypeVar

from xlaserve.concurrency.host import HostThreads
from xlaserve.net.ledger import Account

T = TypeVar("T")

INLINE_BYTES = 64 << 10
"""Bytes read, written or packed on the event loop: a hop to a thread costs as much."""

Size: TypeAlias = int | Callable[[], int]
"""A number of bytes, or what finds it out in a thread."""


class OffLoop:
    """Runs calls on the event loop while they are small, else in a thread.

    JSON takes a tenth of a microsecond for each number: others are served meanwhile.
    """

    def __init__(self, threads: HostThreads) -> None:
        self._threads = threads

    async def run(self, size_bytes: int, call: Callable[[], T]) -> T:
        """Run a call whose time grows with a size."""
        if size_bytes <= INLINE_BYTES:
            return call()
        return await self._threads.run(call)

    async def write(
        self,
        size_bytes: int,
        call: Callable[[], T],
        account: Account | None,
        made: Size = 0,
        *,
        is_counted: bool = False,
    ) -> T:
        """Run a call that makes at most `made` bytes out of `size_bytes`; both are charged.

        With `is_counted` the input is charged already. A failed call leaves no bytes alive in its
        error. Raises BudgetExhausted if there is no memory for the result.
        """
        if account is None or size_bytes <= INLINE_BYTES:
            return await self.run(size_bytes, call)
        taken = 0 if is_counted else size_bytes
        account.hold(taken)
        try:
            more = made if isinstance(made, int) else await self._threads.run(made)
            if more:
                account.take("the answer", more)
                taken += more
            return await self._threads.run(call)
        except BaseException as error:
            # It has the frames that it went through, and these have what was written by then.
            clear_frames(error.__traceback__)
            raise
        finally:
            account.release(taken)
