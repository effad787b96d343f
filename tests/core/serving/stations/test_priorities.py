"""The queue of a model with priority levels and queue policies, driven by a fake clock."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.calls import ToldInfer

from xlaserve.errors import Overloaded
from xlaserve.model_config.config import DynamicBatching, QueuePolicy
from xlaserve.serving.infer_call import InferCall
from xlaserve.serving.stations.batching import BatchPolicy, BatchQueue
from xlaserve.serving.stations.priorities import LevelPolicy, PriorityQueue
from xlaserve.serving.stations.queue_policy import queue_for

MICROSECOND = 1000
PLAIN = LevelPolicy(100)


def request(submitted_ns: int = 0, rows: int = 1, key: int = 0, **parameters: Any) -> InferCall:
    made = ToldInfer(lambda told: None)
    made.rows, made.key, made.submitted_ns = rows, ((key,),), submitted_ns
    made.inputs = {"x": np.zeros((rows, 1), np.float32)}
    made.parameters = parameters
    return made


def queue(
    *levels: LevelPolicy, default: int = 1, max_rows: int = 1, **policy: Any
) -> PriorityQueue:
    return PriorityQueue(
        "m",
        BatchPolicy(100, timeouts_differ=True, **policy),
        levels or (PLAIN,),
        default,
        lambda: max_rows,
    )


def drained(waiting: PriorityQueue, now_ns: int = 0) -> list[InferCall]:
    found = []
    while batch := waiting.take(now_ns):
        found += batch
    return found


def test_levels_leave_in_order_and_each_in_the_order_it_came() -> None:
    """0 and no priority mean the default level; an ensemble step may inherit a higher number."""
    waiting = queue(PLAIN, PLAIN, PLAIN, default=2)
    sent = [request(priority=level) for level in (3, 1, 0, 2, 1, 3, 9)] + [request()]
    for one in sent:
        waiting.add(one)

    assert [sent[n] for n in (1, 4, 2, 3, 6, 7, 0, 5)] == drained(waiting)


def test_a_batch_goes_on_into_the_next_level() -> None:
    waiting = queue(PLAIN, PLAIN, max_rows=4)
    low, other, high = request(priority=2), request(priority=1, key=1), request(priority=1, rows=2)
    for one in (low, other, high):
        waiting.add(one)

    assert [[other], [high, low], []] == [waiting.take(0) for _ in range(3)]


def test_each_level_has_a_limit_of_its_own() -> None:
    waiting = queue(LevelPolicy(1, "max_queue_size"), LevelPolicy(2))
    for level in (1, 2, 2):
        waiting.add(request(priority=level))
    with pytest.raises(Overloaded, match=r"1 requests .* \(max_queue_size\)"):
        waiting.add(request(priority=1))
    with pytest.raises(Overloaded, match=r"2 requests .* \(max_requests_per_model\)"):
        waiting.add(request(priority=2))
    assert 3 == len(waiting)


def test_a_request_expires_by_the_policy_of_its_level() -> None:
    waiting = queue(LevelPolicy(9, timeout_ns=50), PLAIN)
    urgent, patient = request(priority=1), request(priority=2)
    waiting.add(patient)
    waiting.add(urgent)

    assert 50 == waiting.due_ns(could_leave=True)
    assert [] == waiting.expire(49)
    assert [urgent] == waiting.expire(50)
    assert waiting.due_ns(could_leave=True) is None
    assert [patient] == drained(waiting)


@pytest.mark.parametrize(
    ("default_us", "asked", "expected_us"),
    [(10, 3, 3), (10, 30, 10), (10, 0, 10), (0, 7, 7), (0, 0, 0), (10, None, 10)],
)
def test_a_request_may_shorten_its_timeout_and_not_lengthen_it(
    default_us: int, asked: int | None, expected_us: int
) -> None:
    parameters = {} if asked is None else {"timeout": asked}
    allowed = queue(LevelPolicy(9, timeout_ns=default_us * MICROSECOND, may_shorten=True))
    forbidden = queue(LevelPolicy(9, timeout_ns=default_us * MICROSECOND))

    assert expected_us * MICROSECOND == allowed.timeout_ns(request(**parameters))
    assert default_us * MICROSECOND == forbidden.timeout_ns(request(**parameters))


def test_a_later_request_may_expire_first() -> None:
    waiting = queue(LevelPolicy(9, may_shorten=True))
    long, never, short = request(timeout=9), request(), request(1000, timeout=2)
    for one in (long, never, short):
        waiting.add(one)

    waiting.add(gone := request(0, timeout=1))
    assert 1000 == waiting.due_ns(could_leave=False)
    waiting.remove(gone)
    assert 3000 == waiting.due_ns(could_leave=False)
    assert [short] == waiting.expire(3000)
    assert [long] == waiting.expire(9000)
    assert [never] == drained(waiting)


def test_a_delayed_request_goes_behind_its_level_and_does_not_expire_again() -> None:
    waiting = queue(LevelPolicy(9, timeout_ns=10, delays=True), PLAIN)
    late, low = request(0, priority=1), request(0, priority=2)
    waiting.add(late)
    waiting.add(low)
    assert [] == waiting.expire(10)
    in_time = request(10, priority=1)
    waiting.add(in_time)

    assert 20 == waiting.due_ns(could_leave=False)
    assert [in_time, late, low] == drained(waiting)
    again = request(20, priority=1)
    waiting.add(again)
    waiting.expire(10**9)
    waiting.expire(10**10)
    assert [again] == drained(waiting)


def test_a_delayed_request_still_waits_for_others_of_its_batch() -> None:
    waiting = queue(
        LevelPolicy(9, timeout_ns=10, delays=True), max_rows=8, delay_ns=100, preferred_rows=(2,)
    )
    waiting.add(request(0))
    waiting.expire(10)

    assert 100 == waiting.due_ns(could_leave=True)
    assert ([], 1) == (waiting.take(99), len(waiting.take(100)))


def test_delayed_requests_count_for_the_limit() -> None:
    waiting = queue(LevelPolicy(1, timeout_ns=10, delays=True))
    waiting.add(request())
    waiting.expire(10)
    with pytest.raises(Overloaded):
        waiting.add(request(10))


def test_the_delay_of_a_batch_is_that_of_the_oldest_of_all_levels() -> None:
    waiting = queue(PLAIN, PLAIN, max_rows=8, delay_ns=100, preferred_rows=(2,))
    old, new = request(0, priority=2), request(60, priority=1)
    waiting.add(old)
    assert (100, None) == (waiting.due_ns(could_leave=True), waiting.due_ns(could_leave=False))
    assert [] == waiting.take(60)
    waiting.add(new)
    assert [new, old] == waiting.take(60)
    waiting.add(request(60, priority=1))
    waiting.add(late := request(70, priority=2))
    waiting.remove(late)
    assert [] == waiting.take(159)
    assert 1 == len(waiting.take(160))


def test_deadlines_of_requests_that_left_are_not_kept() -> None:
    """Whatever timeout clients ask for, and however many requests they send."""
    waiting = queue(LevelPolicy(9, may_shorten=True))
    for number in range(1000):
        waiting.add(request(number, timeout=10**9))
        waiting.take(number)

    assert len(waiting._deadlines) <= 66
    assert waiting.due_ns(could_leave=True) is None


def test_only_what_needs_it_has_the_queue_of_priorities() -> None:
    default = QueuePolicy(5, 7)
    plain = queue_for("m", DynamicBatching(default_queue_policy=default), 9, lambda: 1)
    assert isinstance(plain, BatchQueue)
    assert (7, "max_queue_size", 5000, False) == (
        plain.policy.max_requests,
        plain.policy.setting,
        plain.policy.timeout_ns,
        plain.policy.timeouts_differ,
    )
    for wanted in (
        DynamicBatching(priority_levels=2, default_priority_level=2),
        DynamicBatching(default_queue_policy=QueuePolicy(allow_timeout_override=True)),
        DynamicBatching(default_queue_policy=QueuePolicy(delays_expired=True)),
    ):
        assert isinstance(queue_for("m", wanted, 9, lambda: 1), PriorityQueue)


def test_levels_without_a_policy_have_the_default_one() -> None:
    wanted = DynamicBatching(
        default_queue_policy=QueuePolicy(5),
        priority_levels=2,
        default_priority_level=2,
        priority_queue_policy={1: QueuePolicy(7, 1, allow_timeout_override=True)},
    )
    waiting = queue_for("m", wanted, 9, lambda: 1)
    waiting.add(request(priority=1, timeout=6))

    assert [6000, 5000] == [
        waiting.timeout_ns(request(priority=level, timeout=6)) for level in (1, 0)
    ]
    with pytest.raises(Overloaded, match="max_queue_size"):
        waiting.add(request(priority=1))


# # --- comparison with a naive queue ---


@dataclass
class Plainly:
    """A naive implementation of the queue's contract, which scans all requests each time."""

    levels: tuple[LevelPolicy, ...]
    max_rows: int
    in_time: list[list[InferCall]] = field(default_factory=list)
    delayed: list[list[InferCall]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.in_time = [[] for _ in self.levels]
        self.delayed = [[] for _ in self.levels]

    def order(self) -> list[InferCall]:
        pairs = zip(self.in_time, self.delayed, strict=True)
        return [one for in_time, delayed in pairs for one in (*in_time, *delayed)]

    def level(self, one: InferCall) -> int:
        asked: Any = one.parameters["priority"]
        return asked - 1 if asked else 0

    def add(self, one: InferCall) -> bool:
        level = self.level(one)
        waiting = len(self.in_time[level]) + len(self.delayed[level])
        if waiting >= self.levels[level].max_requests:
            return False
        self.in_time[level].append(one)
        return True

    def remove(self, one: InferCall) -> None:
        for part in (*self.in_time, *self.delayed):
            if one in part:
                part.remove(one)

    def timeout_ns(self, one: InferCall) -> int:
        policy = self.levels[self.level(one)]
        asked: Any = one.parameters["timeout"]
        timeouts = [policy.timeout_ns, asked * MICROSECOND if policy.may_shorten else 0]
        return min((timeout for timeout in timeouts if timeout), default=0)

    def expire(self, now: int) -> set[InferCall]:
        expired: set[InferCall] = set()
        late = [
            (one.submitted_ns + timeout, level, one)
            for level, part in enumerate(self.in_time)
            for one in part
            if (timeout := self.timeout_ns(one)) and one.submitted_ns + timeout <= now
        ]
        for _, level, one in sorted(late, key=lambda found: found[0]):
            self.remove(one)
            if self.levels[level].delays:
                self.delayed[level].append(one)
            else:
                expired.add(one)
        return expired

    def take(self) -> list[InferCall]:
        chosen: list[InferCall] = []
        for one in self.order():
            if chosen and one.key != chosen[0].key:
                continue
            if chosen and sum(c.rows for c in chosen) + one.rows > self.max_rows:
                break
            chosen.append(one)
        for one in chosen:
            self.remove(one)
        return chosen


POLICIES = st.builds(
    LevelPolicy,
    max_requests=st.integers(1, 4),
    timeout_ns=st.sampled_from([0, 2 * MICROSECOND, 5 * MICROSECOND]),
    may_shorten=st.booleans(),
    delays=st.booleans(),
)
STEPS = st.one_of(
    st.tuples(
        st.just("add"), st.integers(0, 3), st.integers(1, 3), st.integers(0, 1), st.integers(0, 6)
    ),
    st.tuples(st.just("take")),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("wait"), st.integers(1, 4)),
)


@given(st.tuples(POLICIES, POLICIES, POLICIES), st.integers(1, 5), st.lists(STEPS, max_size=40))
def test_it_does_what_it_promises(
    levels: tuple[LevelPolicy, ...], max_rows: int, steps: list[Any]
) -> None:
    waiting, plainly = queue(*levels, max_rows=max_rows), Plainly(levels, max_rows)
    sent: list[InferCall] = []
    now = 0
    for kind, *arguments in steps:
        if kind == "add":
            priority, rows, key, timeout = arguments
            now += 1  # avoids equal deadlines
            one = request(now, rows, key, priority=priority, timeout=timeout)
            sent.append(one)
            if plainly.add(one):
                waiting.add(one)
            else:
                with pytest.raises(Overloaded):
                    waiting.add(one)
        elif kind == "take":
            assert plainly.take() == waiting.take(now)
        elif kind == "cancel" and sent:
            one = sent[arguments[0] % len(sent)]
            plainly.remove(one)
            waiting.remove(one)
        elif kind == "wait":
            now += arguments[0] * MICROSECOND
            due = waiting.due_ns(could_leave=True)
            expected = plainly.expire(now)
            assert expected == set(waiting.expire(now))
            if expected:
                assert due is not None
                assert due <= now
        assert len(plainly.order()) == len(waiting)
    assert plainly.order() == waiting.clear()
    assert 0 == len(waiting)
