"""A call begins, is answered any number of times, and ends exactly once."""

import asyncio
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.calls import NotedCall, NotingObserver

from xlaserve.errors import DeadlineExceeded, Unsupported
from xlaserve.serving.call import Call, end_together
from xlaserve.serving.gates import Gates
from xlaserve.serving.infer_call import AwaitedInfer

ERROR = Unsupported("this")

ENDS: dict[str, Callable[[Call], None]] = {
    "answer": lambda call: call.answer("a"),
    "fail": lambda call: call.fail(ERROR),
    "cancel": lambda call: call.cancel("gone"),
    "expire": lambda call: call.expire(),
    "end": lambda call: call.end(),
}
TOLD: dict[str, list[Any]] = {
    "answer": [("a", True)],
    "fail": [(ERROR, True)],
    "cancel": [],
    "expire": [(DeadlineExceeded, True)],
    "end": [],
}
OUTCOMES = {
    "answer": type(None),
    "fail": Unsupported,
    "cancel": asyncio.CancelledError,
    "expire": DeadlineExceeded,
    "end": type(None),
}


def admitted(*observers: NotingObserver, **attributes: Any) -> NotedCall:
    call = NotedCall(**attributes)
    Gates(observers=observers).admit(call)
    return call


def told(call: NotedCall) -> list[Any]:
    """Return what the client was sent, with deadline errors replaced by their class."""
    return [
        (type(told) if isinstance(told, DeadlineExceeded) else told, last)
        for told, last in call.told
    ]


@pytest.mark.parametrize("second", ENDS)
@pytest.mark.parametrize("first", ENDS)
def test_a_call_ends_once(first: str, second: str) -> None:
    """However it ends, and whatever follows."""
    observer = NotingObserver()
    call = admitted(observer)
    ENDS[first](call)
    ENDS[second](call)

    assert TOLD[first] == told(call)
    assert call.has_ended
    ((calls, outcome),) = observer.ended_with
    assert (call,) == tuple(calls)
    assert OUTCOMES[first] is type(outcome)
    assert (first == "cancel" or second == "cancel") is call.is_cancelled


@pytest.mark.parametrize("way", ENDS)
def test_an_end_releases_everything_before_anybody_is_told(way: str) -> None:
    """The client may send its next request immediately; observers learn whether it was answered."""
    observer = NotingObserver()
    call = admitted(observer)
    released: list[tuple[str, int]] = []
    for name in ("slot", "bytes"):
        call.hold(lambda name=name: released.append((name, len(call.told))))  # type: ignore[misc]
    ENDS[way](call)
    ENDS[way](call)

    assert [("slot", 0), ("bytes", 0)] == released
    assert [way == "answer"] == observer.told_before


def test_a_release_that_ends_its_call_ends_it_no_second_time() -> None:
    observer = NotingObserver()
    call = admitted(observer)
    call.hold(call.cancel)
    call.answer("a")

    assert 1 == len(observer.ended_with)


def test_what_is_held_behind_the_end_is_released_at_once() -> None:
    call, released = admitted(), list[str]()
    call.cancel()
    call.hold(lambda: released.append("late"))

    assert ["late"] == released


@pytest.mark.parametrize("way", ENDS)
def test_a_call_that_has_not_begun_may_end(way: str) -> None:
    """Its connection may be lost before its message arrives; observers never see it begin."""
    call = NotedCall()
    ENDS[way](call)

    assert call.has_ended
    assert TOLD[way] == told(call)


def test_a_call_is_answered_any_number_of_times() -> None:
    """The last answer is marked as such and ends the call."""
    observer = NotingObserver()
    call = admitted(observer)
    for number in range(3):
        call.answer(number, last=False)
    assert not call.has_ended
    assert [] == observer.ended_with
    call.answer(3)
    call.answer(4)

    assert [(0, False), (1, False), (2, False), (3, True)] == call.told
    assert 1 == len(observer.ended_with)


@pytest.mark.parametrize("way", ["fail", "cancel", "expire"])
def test_a_call_may_end_between_its_answers(way: str) -> None:
    call = admitted()
    call.answer(0, last=False)
    ENDS[way](call)
    call.answer(1, last=False)
    call.answer(2)

    assert [(0, False), *TOLD[way]] == told(call)


# --- backpressure ------------------------------------------------------------------------------


async def test_who_answers_waits_for_a_stream_that_takes_no_more() -> None:
    call = admitted(takes_more=False)
    waiting = asyncio.ensure_future(call.writable())
    await asyncio.sleep(0)
    call.resume()  # woken for another reason: the stream is not writable yet
    await asyncio.sleep(0)
    early = waiting.done()
    call.takes_more = True
    call.resume()
    await waiting

    assert not early
    await call.writable()


@pytest.mark.parametrize("way", ENDS)
async def test_the_end_wakes_whoever_waits_for_the_stream(way: str) -> None:
    call = admitted(takes_more=False)
    waiting = asyncio.ensure_future(call.writable())
    await asyncio.sleep(0)
    ENDS[way](call)
    await waiting

    assert call.has_ended


async def test_who_stops_waiting_for_the_stream_is_not_woken() -> None:
    call = admitted(takes_more=False)
    waiting = asyncio.ensure_future(call.writable())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    call.resume()
    call.cancel()

    assert waiting.cancelled()


# --- deadlines ---------------------------------------------------------------------------------


async def test_a_call_expires_at_its_deadline() -> None:
    now = asyncio.get_running_loop().time()
    call = admitted()
    call.deadline = now + 0.001  # must not have passed when the call is admitted
    call.expire_in_time()
    while not call.has_ended:
        await asyncio.sleep(0)

    assert [(DeadlineExceeded, True)] == told(call)
    assert asyncio.get_running_loop().time() >= now + 0.001


@pytest.mark.parametrize("way", ENDS)
async def test_a_call_that_has_ended_does_not_expire(way: str) -> None:
    loop = asyncio.get_running_loop()
    before = len(loop._scheduled)  # type: ignore[attr-defined]
    call = admitted(deadline=loop.time() + 1000)
    call.expire_in_time()
    (timer,) = (timer for timer in (call._timer,) if timer is not None)
    ENDS[way](call)
    call.expire_in_time()

    assert timer.cancelled()
    assert before == sum(not timer.cancelled() for timer in loop._scheduled)  # type: ignore[attr-defined]


async def test_a_call_without_a_deadline_has_no_timer() -> None:
    call = admitted()
    call.expire_in_time()

    assert call._timer is None


# # --- batches -----------------------------------------------------------------------------------


def test_calls_of_one_batch_end_before_any_of_them_is_told() -> None:
    """Answering one call may cancel another, which then gets no answer."""
    observer, gates = NotingObserver(), list[bool]()
    calls = [admitted(observer) for _ in range(2)]
    for call in calls:
        call.hold(lambda: gates.append(all(not other.told for other in calls)))
    end_together(calls, "executed")
    calls[1].cancel()

    assert [True, True] == gates
    assert [(tuple(calls), "executed")] == observer.ended_with
    assert [False, True] == [call.is_cancelled for call in calls]


async def test_a_call_that_is_cancelled_keeps_its_inputs_for_the_thread_that_has_its_batch() -> (
    None
):
    """The thread may assemble the batch only later, and a missing input would fail all of it."""
    call, inputs = AwaitedInfer(), {"x": np.zeros(1, np.float32)}
    call.inputs = inputs
    waiting = asyncio.ensure_future(call.answered())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])

    assert call.has_ended
    assert call.inputs is inputs


async def test_a_deadline_keeps_no_call_that_has_ended() -> None:
    """A cancelled timer keeps its context until it is due; the context must not hold the call."""
    call = Call()
    call.deadline = asyncio.get_running_loop().time() + 60
    reference = weakref.ref(call)
    with Gates().passing(call):
        call.expire_in_time()
    del call

    assert reference() is None
