"""Posting from threads to the event loop: no post is lost, and many posts wake it once."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from xlaserve.serving.stations.outbox import Outbox


class CountingLoop:
    """A fake event loop whose callbacks run when the test says so."""

    def __init__(self) -> None:
        self.woken: list[Callable[[], None]] = []

    def call_soon_threadsafe(self, call: Callable[[], None]) -> None:
        self.woken.append(call)

    call_soon = call_soon_threadsafe

    def turn(self) -> None:
        woken, self.woken = self.woken, []
        for call in woken:
            call()


def made() -> tuple[CountingLoop, Outbox]:
    loop: Any = CountingLoop()
    return loop, Outbox(loop)


def test_loop_is_woken_once_behind_all_that_a_thread_gathers() -> None:
    """This holds even if the loop delivered earlier posts in the meantime."""
    loop, outbox = made()
    found: list[int] = []
    outbox.post(lambda: found.append(0))
    with outbox.gathered():
        loop.turn()
        outbox.post(lambda: found.append(1))
        outbox.post(lambda: found.append(2))
        assert (loop.woken, found) == ([], [0])
    assert len(loop.woken) == 1
    loop.turn()

    assert (loop.woken, found) == ([], [0, 1, 2])


def test_posts_of_other_threads_wait_for_nobody_who_gathers() -> None:
    loop, outbox = made()
    found: list[int] = []
    with outbox.gathered():
        outbox.post(lambda: found.append(1))
        other = threading.Thread(target=outbox.post, args=(lambda: found.append(2),))
        other.start()
        other.join()
        loop.turn()

        assert found == [1, 2]
    assert loop.woken == []


def test_error_of_who_gathers_leaves_nothing_behind() -> None:
    """Later posts of this thread wake the loop again."""
    loop, outbox = made()
    found: list[int] = []

    def fail() -> None:
        with outbox.gathered():
            outbox.post(lambda: found.append(1))
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()
    loop.turn()
    outbox.post(lambda: found.append(2))
    loop.turn()

    assert found == [1, 2]


async def test_many_threads_gather_and_everything_arrives_in_their_order() -> None:
    outbox, found = Outbox(asyncio.get_running_loop()), list[tuple[int, int]]()
    threads, count = 4, 200

    def post(thread: int) -> None:
        for number in range(0, count, 5):
            with outbox.gathered():
                for more in range(5):
                    outbox.post(lambda one=(thread, number + more): found.append(one))  # type: ignore[misc]

    await asyncio.gather(*(asyncio.to_thread(post, thread) for thread in range(threads)))
    async with asyncio.timeout(60):
        while len(found) < threads * count:
            await asyncio.sleep(0)

    for thread in range(threads):
        assert [number for one, number in found if one == thread] == list(range(count))
