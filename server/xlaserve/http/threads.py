"""Threads for work that would block the event loop."""

from collections.abc import Callable
from traceback import clear_frames
from typing import TypeAlias, TypeVar

from xlaserve.concurrency.host import HostThreads
from xlaserve.net.ledger import Account

T = TypeVar("T")

INLINE_BYTES = 64 << 10
"""Work on up to this many bytes runs on the event loop: handing it to a thread costs as much."""

Size: TypeAlias = int | Callable[[], int]
"""A number of bytes, or a function that computes it in a thread."""


class OffLoop:
    """Runs small calls on the event loop, and large ones in a thread.

    JSON takes a tenth of a microsecond per number, during which the loop would serve no one else.
    """

    def __init__(self, threads: HostThreads) -> None:
        self._threads = threads

    async def run(self, size_bytes: int, call: Callable[[], T]) -> T:
        """Run a call whose duration depends on `size_bytes`."""
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
        """Run a call that makes at most `made` bytes from `size_bytes`; charge both while it runs.

        With `is_counted` the input is already charged. If the call fails, its error holds no
        reference to the bytes. Raises BudgetExhausted if there is no memory for the result.
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
            # The traceback's frames would keep alive the bytes written so far.
            clear_frames(error.__traceback__)
            raise
        finally:
            account.release(taken)
