"""The batch queue of a model, driven by a fake clock."""

from asyncio import CancelledError
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.calls import NotingObserver, ToldInfer

from xlaserve.errors import Overloaded, QueueTimeout
from xlaserve.serving.infer_call import Executed, InferCall
from xlaserve.serving.stations.batching import (
    ALONE_IN_A_ROW,
    APART_NS,
    Batcher,
    BatchPolicy,
    BatchQueue,
    pack,
    split,
)
from xlaserve.tensors import ALIGNMENT

MILLISECOND = 1_000_000


@dataclass
class FakeClock:
    """A fake event loop clock; the test decides when due callbacks run."""

    time_ns: int = 0
    ready: list[Callable[[], None]] = field(default_factory=list)
    timers: list[tuple[int, Callable[[], None]]] = field(default_factory=list)

    def now_ns(self) -> int:
        return self.time_ns

    def soon(self, call: Callable[[], None]) -> None:
        self.ready.append(call)

    def at(self, time_ns: int, call: Callable[[], None]) -> Callable[[], None]:
        timer = (time_ns, call)
        self.timers.append(timer)
        return lambda: self.timers.remove(timer) if timer in self.timers else None

    def turn(self) -> None:
        """Run one iteration of the event loop."""
        ready, self.ready = self.ready, []
        for call in ready:
            call()

    def settle(self) -> None:
        """Run iterations until no callback is ready."""
        while self.ready:
            self.turn()

    def advance(self, nanoseconds: int) -> None:
        """Advance the clock, and run the timers that are due."""
        self.time_ns += nanoseconds
        due = [timer for timer in self.timers if timer[0] <= self.time_ns]
        for timer in due:
            if timer in self.timers:
                self.timers.remove(timer)
                timer[1]()
        self.settle()


@dataclass
class FakeRunner:
    """A runner that doubles its inputs when the test says so."""

    clock: FakeClock
    lanes: int = 1
    is_inline: bool = True
    started: list[Sequence[InferCall]] = field(default_factory=list)
    freed: list[Callable[[], None]] = field(default_factory=list)
    ends: list[Callable[[], None]] = field(default_factory=list)

    def run(
        self,
        requests: Sequence[InferCall],
        freed: Callable[[], None],
        ended: Callable[[Executed | BaseException], None],
    ) -> None:
        self.started.append(tuple(requests))
        self.freed.append(freed)
        begun = self.clock.time_ns

        def end(error: BaseException | None = None) -> None:
            rows = sum(request.rows for request in requests)
            outputs = {"y": pack(requests, rows)["x"] * 2}
            freed()
            ended(error or Executed(outputs, begun, self.clock.time_ns))

        self.ends.append(end)

    def end(self, error: BaseException | None = None) -> None:
        """Complete the oldest batch."""
        end: Any = self.ends.pop(0)
        end(error)
        self.clock.settle()

    @property
    def batches(self) -> list[list[int]]:
        """Return the rows of the requests of each batch."""
        return [[request.rows for request in requests] for requests in self.started]


def deliver(calls: Sequence[InferCall], result: Executed | BaseException) -> None:
    """Answer each call with its own rows of the batch result, or with the error."""
    rows = sum(call.rows for call in calls)
    outputs: list[Any] = [result] * len(calls)
    if isinstance(result, Executed):
        outputs = list(split(result.outputs["y"], calls, rows))
    for call, output in zip(calls, outputs, strict=True):
        if not call.has_ended:
            call.place = None
            call.end(result)
            call.write(output, last=True)


@dataclass
class World:
    clock: FakeClock
    runner: FakeRunner
    batcher: Batcher
    observer: NotingObserver = field(default_factory=NotingObserver)
    sent: list[InferCall] = field(default_factory=list)

    @property
    def cancelled(self) -> list[Any]:
        """Return the calls that were cancelled before they were answered, in order."""
        ends = self.observer.ended_with
        return [call for calls, why in ends if isinstance(why, CancelledError) for call in calls]

    def send(self, *rows: int, key: int = 0) -> list[list[Any]]:
        """Submit requests in one loop iteration; return the list of answers of each."""
        told: list[list[Any]] = []
        for count in rows:
            heard: list[Any] = []
            data, now = np.full((count, 1), len(self.sent) + 1.0, np.float32), self.clock.time_ns
            request = ToldInfer(heard.append)
            request._observers = (self.observer,)
            request.rows, request.inputs, request.key = count, {"x": data}, ((key,),)
            request.submitted_ns = now
            self.batcher.submit(request)
            self.sent.append(request)
            told.append(heard)
        return told


def world(lanes: int = 1, *, is_inline: bool = True, **policy: Any) -> World:
    clock = FakeClock()
    runner = FakeRunner(clock, lanes, is_inline)
    max_rows = policy.pop("max_rows", 8)
    defaults: dict[str, Any] = {"max_requests": 100}
    queue = BatchQueue("m", BatchPolicy(**defaults | policy), lambda: max_rows)
    return World(clock, runner, Batcher(queue, runner, clock, deliver))


def lists(told: list[list[Any]]) -> list[Any]:
    return [[output.tolist() for output in heard] for heard in told]


async def test_what_comes_in_one_pass_is_one_batch() -> None:
    w = world()
    answers = w.send(1, 2, 1)
    assert [] == w.runner.started
    w.clock.settle()
    w.runner.end()

    assert [[1, 2, 1]] == w.runner.batches
    assert [[[[2]]], [[[4], [4]]], [[[6]]]] == lists(answers)


async def test_an_idle_model_waits_for_nobody() -> None:
    """Without a delay a lone request leaves in the iteration in which it arrived."""
    w = world()
    w.send(1)
    w.clock.turn()

    assert [[1]] == w.runner.batches


async def test_while_it_computes_the_queue_fills() -> None:
    w = world()
    w.send(1)
    w.clock.settle()
    for _ in range(5):
        w.send(1)
        w.clock.settle()
    assert [[1]] == w.runner.batches
    w.runner.end()

    assert [[1], [1] * 5] == w.runner.batches


async def test_a_batch_has_no_more_rows_than_the_limit() -> None:
    w = world(max_rows=4)
    w.send(3, 2, 2, 1)
    w.clock.settle()
    for _ in range(3):
        w.runner.end()

    assert [[3], [2, 2], [1]] == w.runner.batches


async def test_a_request_larger_than_a_batch_goes_alone() -> None:
    w = world(max_rows=4)
    w.send(6, 1)
    w.clock.settle()
    w.runner.end()

    assert [[6], [1]] == w.runner.batches


async def test_only_equal_shapes_are_put_together() -> None:
    """Requests of the same shape keep their order."""
    w = world()
    w.send(1, 1, key=1)
    w.send(2, key=2)
    w.send(1, key=1)
    w.clock.settle()
    w.runner.end()

    assert [[1, 1, 1], [2]] == w.runner.batches


def one_by_one(w: World, count: int) -> None:
    """Send requests one at a time, with time between them."""
    for _ in range(count):
        w.clock.time_ns += APART_NS + 1
        w.send(1)
        w.clock.settle()
        w.runner.end()


async def test_after_some_that_came_by_themselves_the_next_is_alone() -> None:
    """Unless it arrives so soon that it may belong to the same loop iteration."""
    w = world()
    one_by_one(w, ALONE_IN_A_ROW)
    now = w.clock.time_ns

    assert [False, True] == [w.batcher.is_alone(now + APART_NS + more) for more in (0, 1)]

    w.batcher.passed(now + 1)

    assert not w.batcher.is_alone(now + APART_NS + 1)


@pytest.mark.parametrize(
    ("count", "then", "options"),
    [
        (ALONE_IN_A_ROW - 1, (), {}),
        (ALONE_IN_A_ROW, (1, 1), {}),
        (ALONE_IN_A_ROW, (), {"is_inline": False}),
        (ALONE_IN_A_ROW, (), {"delay_ns": 1, "preferred_rows": (1,)}),
    ],
    ids=["too few", "some came together", "not where the event loop is", "to wait for others"],
)
async def test_a_request_is_not_alone(
    count: int, then: tuple[int, ...], options: dict[str, Any]
) -> None:
    w = world(**options)
    one_by_one(w, count)
    w.clock.time_ns += APART_NS + 1
    w.send(*then)
    w.clock.settle()
    if then:
        w.runner.end()

    assert not w.batcher.is_alone(w.clock.time_ns + APART_NS + 1)


async def test_no_request_is_alone_while_another_waits_or_is_executed() -> None:
    w = world()
    one_by_one(w, ALONE_IN_A_ROW)
    later = w.clock.time_ns + 10 * APART_NS
    w.send(1)
    waits = w.batcher.is_alone(later)
    w.clock.settle()

    assert (False, False) == (waits, w.batcher.is_alone(later))


async def test_every_lane_has_its_own_batch() -> None:
    w = world(lanes=2)
    for _ in range(3):
        w.send(1)
        w.clock.settle()
    before = len(w.runner.started)
    w.runner.end()

    assert (2, 3) == (before, len(w.runner.started))


async def test_a_lane_is_free_when_the_runner_says_so() -> None:
    """On a device that may be long before the batch completes: dispatching is enough."""
    w = world()
    for _ in range(2):
        w.send(1)
        w.clock.settle()
    before = len(w.runner.started)
    w.runner.freed[0]()
    w.clock.settle()

    assert (1, 2) == (before, len(w.runner.started))
    assert not any(request.has_ended for request in w.sent)


async def test_a_full_queue_refuses_at_once() -> None:
    w = world(max_requests=2, setting="max_queue_size")
    w.send(1, 1)

    with pytest.raises(Overloaded, match=r"2 requests .* \(max_queue_size\)"):
        w.send(1)


async def test_a_request_given_up_never_leaves() -> None:
    w = world()
    w.send(1)
    w.clock.settle()
    told = w.send(1, 2, 1)
    w.sent[2].cancel()
    w.runner.end()
    w.sent[1].cancel()
    w.runner.end()

    assert [[1], [1, 1]] == w.runner.batches
    assert [[], [], [[[8]]]] == lists(told)
    assert [w.sent[2], w.sent[1]] == w.cancelled


async def test_an_answered_request_cannot_be_given_up() -> None:
    w = world()
    w.send(1)
    w.clock.settle()
    w.runner.end()
    w.sent[0].cancel()

    assert [] == w.cancelled


async def test_whoever_is_gone_when_the_batch_ends_is_left_out() -> None:
    w = world()
    answers = w.send(1, 1)
    w.clock.settle()
    w.sent[0].cancel()
    w.runner.end()

    assert [[], [[[4]]]] == lists(answers)


async def test_a_batch_that_fails_is_executed_again_one_by_one() -> None:
    w = world()
    answers = w.send(1, 2, 3)
    w.clock.settle()
    w.runner.end(ZeroDivisionError("no"))
    w.clock.settle()
    w.runner.end()
    w.clock.settle()
    w.runner.end(ZeroDivisionError("of its own"))
    w.clock.settle()
    w.runner.end()

    assert [[1, 2, 3], [1], [2], [3]] == w.runner.batches
    assert [[[2]], ["of its own"], [[6]]] == [
        [str(one) if isinstance(one, Exception) else one[0].tolist() for one in heard]
        for heard in answers
    ]


async def test_the_delay_lets_a_batch_fill() -> None:
    """max_queue_delay_microseconds: the oldest request waits at most this long."""
    w = world(delay_ns=5 * MILLISECOND)
    w.send(1)
    w.clock.settle()
    w.clock.advance(4 * MILLISECOND)
    w.send(2)
    w.clock.settle()
    assert [] == w.runner.batches
    w.clock.advance(1 * MILLISECOND)

    assert [[1, 2]] == w.runner.batches


async def test_a_full_batch_does_not_wait_for_the_delay() -> None:
    w = world(delay_ns=5 * MILLISECOND)
    w.send(4, 4)
    w.clock.settle()

    assert [[4, 4]] == w.runner.batches


async def test_a_preferred_size_does_not_wait_for_the_delay() -> None:
    """preferred_batch_size: the largest size reached leaves, and the rest waits."""
    w = world(delay_ns=5 * MILLISECOND, preferred_rows=(2, 4))
    w.send(1, 1, 1, 1, 1)
    w.clock.settle()
    assert [[1, 1, 1, 1]] == w.runner.batches
    w.runner.end()
    assert 1 == len(list(w.batcher.pending_since()))
    w.clock.advance(5 * MILLISECOND)

    assert [[1] * 4, [1]] == w.runner.batches


async def test_a_delay_that_ends_while_the_model_computes_costs_nothing() -> None:
    w = world(delay_ns=5 * MILLISECOND)
    w.send(8)
    w.clock.settle()
    w.send(1)
    w.clock.advance(50 * MILLISECOND)
    assert [] == w.clock.timers
    w.runner.end()

    assert [[8], [1]] == w.runner.batches


async def test_whoever_waits_too_long_is_told() -> None:
    """default_timeout_microseconds of the queue policy."""
    w = world(timeout_ns=5 * MILLISECOND)
    w.send(1)
    w.clock.settle()
    (answer,) = w.send(1)
    w.clock.advance(5 * MILLISECOND)
    assert [QueueTimeout] == [type(error) for error in answer]
    w.runner.end()

    assert [[1]] == w.runner.batches


async def test_all_that_have_waited_too_long_are_told_and_none_runs_after_all() -> None:
    """Their lane becomes free immediately; later requests run."""
    w = world(timeout_ns=5 * MILLISECOND)
    w.send(1)
    w.clock.settle()
    answers = w.send(1, 1, 1)
    w.clock.time_ns += 3 * MILLISECOND
    (later,) = w.send(2)
    w.clock.time_ns += 2 * MILLISECOND
    w.runner.end()

    assert [[QueueTimeout]] * 3 == [[type(error) for error in answer] for answer in answers]
    assert [] == later
    assert [[1], [2]] == w.runner.batches


@pytest.mark.parametrize(("delay", "expected"), [(2, [[1]]), (9, [])])
async def test_whichever_of_delay_and_timeout_ends_first_counts(
    delay: int, expected: list[list[int]]
) -> None:
    w = world(timeout_ns=5 * MILLISECOND, delay_ns=delay * MILLISECOND)
    (answer,) = w.send(1)
    w.clock.settle()
    for _ in range(5):
        w.clock.advance(MILLISECOND)

    assert expected == w.runner.batches
    assert [QueueTimeout] * (not expected) == [type(error) for error in answer]


async def test_every_request_knows_what_it_ran_in() -> None:
    w = world()
    w.send(1, 3)
    w.clock.settle()
    w.clock.advance(7)
    w.runner.end()
    first, second = (outcome for _, outcome in w.observer.ended_with)

    assert isinstance(first, Executed)
    assert first is second
    assert (0, 7) == (first.begun_ns, first.ended_ns)


def waiting(*arrays: Any) -> InferCall:
    call = InferCall()
    call.rows, call.inputs = len(arrays[0]), dict(zip("ab", arrays, strict=False))
    return call


def test_one_request_is_not_copied() -> None:
    x = np.ones((2, 3), np.float32)

    assert x is pack([waiting(x)], 8)["a"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_large_batch_lies_where_it_is_not_copied_again(dtype: str) -> None:
    wide = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    rows = [np.full((1, 3, 5001), index, wide) for index in range(4)]

    packed = pack([waiting(row) for row in rows], 6)["a"]

    assert 0 == packed.ctypes.data % ALIGNMENT
    assert np.concatenate([*rows, rows[-1], rows[-1]]).tobytes() == packed.tobytes()


def test_large_batches_of_objects_are_put_together() -> None:
    rows = np.full((1, 5000), b"one", object)

    packed = pack([waiting(rows), waiting(rows)], 2)["a"]

    assert np.concatenate([rows, rows]).tolist() == packed.tolist()


def test_rows_behind_a_batch_are_its_last_one() -> None:
    """A loop that runs until every row has converged might never end on rows of zeros."""
    x = np.ones((2, 3), np.float32)
    packed = pack([waiting(x), waiting(x * 2)], 6)["a"]

    assert [1, 1, 2, 2, 2, 2] == packed[:, 0].tolist()
    assert packed.dtype == x.dtype


@pytest.mark.parametrize("rows", [(1, 3), (1, 1), (2,), (2, 2)])
def test_outputs_are_views_of_the_batch(rows: tuple[int, ...]) -> None:
    """No request gets a padding row."""
    y = np.arange(12).reshape(6, 2)
    parts = split(y, [waiting(np.zeros((n, 1))) for n in rows], sum(rows))
    ends = np.cumsum(rows)

    assert [y[end - n : end].tolist() for n, end in zip(rows, ends, strict=True)] == [
        part[:n].tolist() for n, part in zip(rows, parts, strict=True)
    ]
    assert all(np.shares_memory(part, y) for part in parts)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("send"), st.integers(1, 9), st.integers(0, 2)),
            st.tuples(st.just("end"), st.just(0), st.just(0)),
            st.tuples(st.just("cancel"), st.integers(0, 30), st.just(0)),
            st.tuples(st.just("advance"), st.integers(0, 10), st.just(0)),
        ),
        max_size=60,
    ),
    st.integers(1, 3),
    st.sampled_from([0, 3]),
)
def test_every_request_is_answered_once_with_its_own_rows(
    steps: list[tuple[str, int, int]], lanes: int, delay: int
) -> None:
    """For any order of arrivals, completions, cancellations and waits."""
    play(world(lanes=lanes, delay_ns=delay, preferred_rows=(2, 5)), steps)


def play(w: World, steps: list[tuple[str, int, int]]) -> None:
    answers: list[list[Any]] = []
    given_up: set[int] = set()
    for what, number, key in steps:
        if what == "send":
            answers += w.send(number, key=key)
            w.clock.settle()
        elif what == "end" and w.runner.ends:
            w.runner.end()
        elif what == "cancel" and number < len(answers) and not answers[number]:
            w.sent[number].cancel()
            given_up.add(number)
        elif what == "advance":
            w.clock.advance(number)
    finish(w)
    check(w, {n: answer for n, answer in enumerate(answers) if n not in given_up})
    assert given_up == {w.sent.index(request) for request in w.cancelled}
    assert not any(answers[n] for n in given_up)


def finish(w: World) -> None:
    while w.runner.ends or any(True for _ in w.batcher.pending_since()):
        w.clock.advance(10)
        if w.runner.ends:
            w.runner.end()


def check(w: World, answers: dict[int, list[Any]]) -> None:
    for number, answer in answers.items():
        rows = w.sent[number].rows
        assert [[[2.0 * (number + 1)]] * rows] == [output.tolist() for output in answer]
    ran = [request for requests in w.runner.started for request in requests]
    assert len(ran) == len(set(map(id, ran)))
    assert all(sum(batch) <= 8 or len(batch) == 1 for batch in w.runner.batches)
    for key in range(3):
        order = [w.sent.index(request) for request in ran if request.key == ((key,),)]
        assert sorted(order) == order
