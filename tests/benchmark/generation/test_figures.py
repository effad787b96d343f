"""Figures of an open loop in virtual time: a known schedule gives known percentiles."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

import pytest
from support.virtual_time import run_in_virtual_time

from xlaserve.bench.errors import ServerUnreachable
from xlaserve.bench.generation import open_loop
from xlaserve.bench.generation.figures import Figures, figures
from xlaserve.bench.generation.lengths import Lengths
from xlaserve.bench.generation.schedule import Arrival

STEP = 0.010


class OneAtATime:
    """Generates one request at a time: a token per step, after a given delay."""

    def __init__(self, beginning: float) -> None:
        self._beginning = beginning
        self._turn = asyncio.Lock()

    async def __call__(self, number: int, arrival: Arrival) -> AsyncGenerator[None, None]:
        async with self._turn:
            await asyncio.sleep(self._beginning)
            yield
            for _ in range(arrival.lengths.answer - 1):
                await asyncio.sleep(STEP)
                yield


def arrivals(times: Sequence[float], answer: int = 11, warmup: float = 0.0) -> list[Arrival]:
    return [Arrival(at, Lengths(4, answer), at >= warmup) for at in times]


def measured(send: open_loop.Send, planned: Sequence[Arrival], wait: float = 1000.0) -> Figures:
    return figures(
        run_in_virtual_time(lambda clock: open_loop.observe(planned, send, wait=wait, clock=clock))
    )


def milliseconds(p50: float, p90: float, p99: float, most: float) -> object:
    return pytest.approx({"p50": p50, "p90": p90, "p99": p99, "max": most})


def test_a_server_that_keeps_up_has_the_times_of_each_request() -> None:
    found = measured(OneAtATime(0.1), arrivals([float(at) for at in range(100)]))

    assert (100, 100, 0, 0) == (found.requests, found.answered, found.late, found.failed)
    assert milliseconds(100, 100, 100, 100) == found.first_token_ms
    assert milliseconds(10, 10, 10, 10) == found.between_tokens_ms
    assert milliseconds(200, 200, 200, 200) == found.answer_ms
    assert (400, 1100) == (found.prompt_tokens, found.tokens)
    assert 99.2 == pytest.approx(found.seconds)
    assert 1100 / 99.2 == pytest.approx(found.tokens_per_second)


def test_those_who_wait_for_others_wait_from_when_they_were_due() -> None:
    """A hundred are due at once, and each takes 0.2 s: a closed loop would report 0.1 s for all."""
    found = measured(OneAtATime(0.1), arrivals([0.0] * 100))

    assert milliseconds(9900, 17_900, 19_700, 19_900) == found.first_token_ms
    assert milliseconds(10_000, 18_000, 19_800, 20_000) == found.answer_ms
    assert milliseconds(10, 10, 10, 10) == found.between_tokens_ms


def test_a_pause_of_the_server_is_told_by_all_who_were_due_in_it() -> None:
    """That is a tenth: ten are due per second for 10 s, and one second has no answers."""

    async def send(number: int, arrival: Arrival) -> AsyncGenerator[None, None]:
        if 5.0 <= arrival.at < 6.0:
            await asyncio.sleep(6.0 - arrival.at)
        await asyncio.sleep(0.001)
        yield

    found = measured(send, arrivals([index / 10 for index in range(100)], answer=1))

    assert milliseconds(1, 1, 901, 1001) == found.first_token_ms
    assert {} == found.between_tokens_ms


def test_what_was_not_answered_is_late_by_all_the_time_it_waited() -> None:
    """One request has no token, and another has no end; both waited 30 s at the cutoff."""

    async def send(number: int, arrival: Arrival) -> AsyncGenerator[None, None]:
        if number:
            yield
        await asyncio.Event().wait()
        yield

    found = measured(send, arrivals([0.0, 10.0]), wait=20.0)

    assert (2, 0, 2, 0) == (found.requests, found.answered, found.late, found.failed)
    assert milliseconds(0, 30_000, 30_000, 30_000) == found.first_token_ms
    assert milliseconds(20_000, 20_000, 20_000, 20_000) == found.between_tokens_ms
    assert milliseconds(20_000, 30_000, 30_000, 30_000) == found.answer_ms


def test_errors_are_counted_by_their_text_and_have_no_times() -> None:
    async def send(number: int, arrival: Arrival) -> AsyncGenerator[None, None]:
        if number % 4 == 0:
            raise ServerUnreachable("here", f"refused {min(number // 4, 20)}")
        yield
        if number % 4 == 1:
            raise ServerUnreachable("here", "broken")

    found = measured(send, arrivals([0.0] * 200, answer=1))

    assert (200, 100, 0, 100) == (found.requests, found.answered, found.late, found.failed)
    assert ["here: broken", "here: refused 20"] == list(found.errors)[:2]
    assert 17 == len(found.errors)
    assert 100 - 50 - 30 - 14 == found.errors["other errors"]
    assert milliseconds(0, 0, 0, 0) == found.first_token_ms


def test_requests_of_the_warm_up_are_sent_and_not_counted() -> None:
    """The first of them delays one that is counted."""
    found = measured(OneAtATime(3.0), arrivals([0.0, 2.0], warmup=1.0))

    assert (1, 11) == (found.requests, found.tokens)
    assert milliseconds(4100, 4100, 4100, 4100) == found.first_token_ms


def test_answers_that_are_shorter_than_asked_are_counted() -> None:
    async def send(number: int, arrival: Arrival) -> AsyncGenerator[None, None]:
        for _ in range(number):
            yield
            await asyncio.sleep(STEP)

    found = measured(send, arrivals([0.0] * 4, answer=3))

    assert (4, 3) == (found.answered, found.short)
    assert milliseconds(0, 0, 0, 0) == found.first_token_ms


def test_a_mistake_of_the_client_is_no_figure() -> None:
    async def send(number: int, arrival: Arrival) -> AsyncGenerator[None, None]:
        yield
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        measured(send, arrivals([0.0]))


def test_a_client_that_is_behind_says_so() -> None:
    """Each request keeps the client busy for 0.5 s, and the next is due after 0.1 s."""
    busy = 0.0

    async def send(number: int, arrival: Arrival) -> AsyncGenerator[None, None]:
        nonlocal busy
        busy += 0.5
        yield

    async def observed(clock: Callable[[], float]) -> open_loop.Observed:
        planned = arrivals([0.0, 0.1, 0.2], answer=1)
        return await open_loop.observe(planned, send, wait=1.0, clock=lambda: clock() + busy)

    found = figures(run_in_virtual_time(observed))

    assert 900 == pytest.approx(found.client_lag_ms)
    assert milliseconds(1000, 1400, 1400, 1400) == found.first_token_ms
