"""When the heap is trimmed, and memory pressure is logged, with a fake clock."""

from collections.abc import Callable

import pytest
from structlog.testing import capture_logs
from support.clock import HandClock

from xlaserve.net.ledger import Kind, Ledger
from xlaserve.serving.returning import Returning

MIB = 1 << 20
IDLE = 300 * MIB


class Process:
    """A process of a given memory size; a trim returns its free memory to the system."""

    def __init__(self, kept_bytes: int = 0) -> None:
        self.ledger = Ledger(256 * MIB)
        self.clock = HandClock()
        self.used = IDLE
        self.free = 0
        self.trims = 0
        self.returning = Returning(
            self.ledger,
            self.in_thread,
            kept_bytes=kept_bytes,
            resident=lambda: self.used + self.free + self.ledger.held,
            trim=self.trim,
            clock=self.clock,
        )

    async def in_thread(self, call: Callable[[], None]) -> None:
        call()

    def trim(self) -> None:
        self.trims += 1
        self.free = 0

    async def check(self, times: int = 1) -> None:
        for _ in range(times):
            self.clock.now += 1
            await self.returning.check()


@pytest.fixture
def process() -> Process:
    return Process()


async def test_what_clients_left_behind_is_given_back(process: Process) -> None:
    await process.check()
    process.free = 100 * MIB
    await process.check()

    assert (1, 0) == (process.trims, process.free)


async def test_what_the_allocator_keeps_is_given_back_every_ten_seconds() -> None:
    """Until then executions reuse it; a large amount is returned immediately."""
    process = Process(kept_bytes=100 * MIB)
    await process.check()
    process.free = 100 * MIB
    await process.check(8)
    assert 0 == process.trims

    await process.check()
    assert (1, 0) == (process.trims, process.free)

    process.free = 120 * MIB
    await process.check()
    assert (2, 0) == (process.trims, process.free)


async def test_a_little_is_left(process: Process) -> None:
    await process.check()
    process.free = 16 * MIB
    await process.check(30)

    assert 0 == process.trims


async def test_what_is_held_is_not_left_behind(process: Process) -> None:
    await process.check()
    account = process.ledger.open()
    account.reserve(100 * MIB)
    await process.check(30)

    assert 0 == process.trims


async def test_what_does_not_come_back_is_not_asked_for_again(process: Process) -> None:
    """Memory that a trim does not return belongs to models."""
    await process.check()
    process.used += 200 * MIB
    await process.check(30)

    assert 1 == process.trims


async def test_after_an_unload_less_counts(process: Process) -> None:
    await process.check()
    process.used -= 200 * MIB
    await process.check()
    process.free = 20 * MIB
    await process.check()

    assert 1 == process.trims


async def test_while_much_comes_and_goes_it_is_seldom_trimmed(process: Process) -> None:
    await process.check()
    account = process.ledger.open()
    for _ in range(20):
        process.free = 100 * MIB
        account.reserve(50 * MIB, Kind.ANSWERS)
        account.release_all(Kind.ANSWERS)
        await process.check()

    assert 2 == process.trims


async def test_without_a_word_of_the_system_nothing_is_trimmed(process: Process) -> None:
    returning = Returning(process.ledger, process.in_thread, resident=lambda: None)
    await returning.check()

    assert 0 == process.trims


async def test_pressure_is_said_when_it_begins_and_when_it_is_over(process: Process) -> None:
    account = process.ledger.open()
    with capture_logs() as said:
        for _ in range(20):
            account.hold(200 * MIB)
            assert not account.reserve(100 * MIB)
            account.release(200 * MIB)
            await process.check(1)
        events = [(record["event"], record["refused"]) for record in said]
        assert [("client memory high", 1)] == events
        await process.check(40)
    events = [(record["event"], record["refused"]) for record in said]

    assert [("client memory high", 1), ("client memory normal again", 20)] == events


async def test_while_there_is_pressure_its_end_is_not_said(process: Process) -> None:
    account = process.ledger.open()
    account.hold(200 * MIB)
    with capture_logs() as said:
        await process.check(100)

    assert ["client memory high"] == [record["event"] for record in said]
