"""Single-flight work that several callers share."""

import asyncio

import pytest

from xlaserve.concurrency.sharing import CalledOff, Coalesced, SingleFlight, Turns


class Work:
    """Counts its runs, and completes when told to."""

    def __init__(self) -> None:
        self.runs = 0
        self.cancelled = 0
        self.go = asyncio.Event()

    async def __call__(self) -> None:
        self.runs += 1
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


async def _turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_callers_with_one_key_share_one_run() -> None:
    work, flights = Work(), SingleFlight[None](abandonable=True)
    callers = [asyncio.create_task(flights.run("key", work)) for _ in range(10)]
    await _turn()
    work.go.set()
    await asyncio.gather(*callers)

    assert 1 == work.runs


async def test_different_keys_do_not_share() -> None:
    work, flights = Work(), SingleFlight[None](abandonable=True)
    work.go.set()
    await asyncio.gather(flights.run("a", work), flights.run("b", work))

    assert 2 == work.runs


async def test_one_caller_that_leaves_does_not_cancel_the_others() -> None:
    work, flights = Work(), SingleFlight[None](abandonable=True)
    leaving, staying = (asyncio.create_task(flights.run("key", work)) for _ in range(2))
    await _turn()
    leaving.cancel()
    await _turn()
    work.go.set()
    await staying

    assert (1, 0) == (work.runs, work.cancelled)


async def test_the_work_is_cancelled_when_the_last_caller_leaves() -> None:
    work, flights = Work(), SingleFlight[None](abandonable=True)
    caller = asyncio.create_task(flights.run("key", work))
    await _turn()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller

    assert 1 == work.cancelled


async def test_work_that_cannot_be_abandoned_goes_on_alone() -> None:
    work, flights = Work(), SingleFlight[None](abandonable=False)
    caller = asyncio.create_task(flights.run("key", work))
    await _turn()
    caller.cancel()
    await _turn()
    follower = asyncio.create_task(flights.run("key", work))
    await _turn()
    work.go.set()
    await follower

    assert (1, 0) == (work.runs, work.cancelled)


async def test_every_caller_gets_the_error() -> None:
    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("no")

    flights = SingleFlight[None](abandonable=True)
    results = await asyncio.gather(
        *(flights.run("key", fail) for _ in range(3)), return_exceptions=True
    )

    assert ["no"] * 3 == [str(result) for result in results]


async def test_turns_of_one_key_exclude_each_other() -> None:
    turns, inside, most = Turns(), 0, 0

    async def enter() -> None:
        nonlocal inside, most
        async with turns.of("key"):
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0)
            inside -= 1

    await asyncio.gather(*(enter() for _ in range(10)))

    assert (1, {}) == (most, turns._locks)


async def test_calls_during_a_run_share_the_next_one() -> None:
    """Each caller is served by a run that began after its call."""
    work = Work()
    coalesced = Coalesced(work)
    first = asyncio.create_task(coalesced())
    await _turn()
    later = [asyncio.create_task(coalesced()) for _ in range(5)]
    await _turn()
    work.go.set()
    await asyncio.gather(first, *later)

    assert 2 == work.runs


async def test_work_of_some_keys_is_called_off_and_waited_for() -> None:
    work, flights = Work(), SingleFlight[None](abandonable=True)
    ended, staying = (asyncio.create_task(flights.run(key, work)) for key in ("a", "b"))
    await _turn()
    await flights.call_off(lambda key: key == "a")
    with pytest.raises(CalledOff):
        await ended
    over = asyncio.create_task(flights.over(lambda key: key == "b"))
    await _turn()
    was_over = over.done()
    work.go.set()
    await asyncio.gather(staying, over)

    assert (False, 2, 1) == (was_over, work.runs, work.cancelled)
