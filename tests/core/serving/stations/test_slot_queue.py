"""Batches of sequences that keep their row: how many ready slots they wait for, and how long."""

import pytest

from xlaserve.serving.infer_call import InferCall
from xlaserve.serving.stations.batching import BatchPolicy
from xlaserve.serving.stations.sequences.slot_queue import SlotQueue

DELAY_NS = 100


def call(submitted_ns: int = 0, key: int = 1) -> InferCall:
    made = InferCall()
    made.submitted_ns, made.key = submitted_ns, ((key,),)
    return made


def queue(utilization: float, *calls: InferCall, delay_ns: int = DELAY_NS) -> SlotQueue:
    made = SlotQueue(BatchPolicy(8, delay_ns=delay_ns), 8, utilization)
    for one in calls:
        made.add(one)
    return made


@pytest.mark.parametrize(("utilization", "delay_ns"), [(0.0, DELAY_NS), (0.5, 0), (0.25, DELAY_NS)])
def test_a_batch_leaves_once_enough_slots_are_ready(utilization: float, delay_ns: int) -> None:
    """It leaves immediately without a utilization or without a delay."""
    calls = [call(), call()]
    waiting = queue(utilization, *calls, delay_ns=delay_ns)

    assert list(waiting.take(0)) == calls
    assert len(waiting) == 0
    assert waiting.due_ns(could_leave=True) is None


def test_a_batch_waits_for_the_slots_up_to_the_delay() -> None:
    calls = [call(10), call(50)]
    waiting = queue(0.5, *calls)

    assert waiting.take(9 + DELAY_NS) == []
    assert waiting.due_ns(could_leave=False) is None
    assert waiting.due_ns(could_leave=True) == 10 + DELAY_NS
    assert list(waiting.take(10 + DELAY_NS)) == calls


def test_turns_of_other_shapes_wait_for_a_batch_of_their_own() -> None:
    first, other, second = call(), call(key=2), call()
    waiting = queue(0, first, other, second)

    assert list(waiting.take(0)) == [first, second]
    assert waiting.clear() == [other]
    assert waiting.take(0) == []


def test_a_turn_that_is_cancelled_leaves_the_queue() -> None:
    first, second = call(), call()
    waiting = queue(0, first, second)
    waiting.remove(first)
    waiting.remove(first)

    assert list(waiting.take(0)) == [second]
    assert waiting.expire(10**9) == ()
