"""Histories of several workers, merged and compared with that of a single worker."""

from collections.abc import Iterable
from itertools import pairwise

import pytest
from support.calls import NotedCall
from support.executions import succeed

from xlaserve.errors import ModelNotFound
from xlaserve.residence.capacity import Capacity, Reservation
from xlaserve.residence.registry import Registry
from xlaserve.residence.reports.fold_history import fold_histories
from xlaserve.residence.reports.history import (
    HOUR_SECONDS,
    RECENT_SAMPLES,
    History,
    HistorySnapshot,
    Sample,
)
from xlaserve.serving.observability.failures import KEPT, Failures

MS = 1_000_000


class Worker:
    """A worker that started at a given time."""

    def __init__(self, started: float = 0.0, held: int = 0) -> None:
        self.now = started
        self.registry = Registry(10)
        self.failures = Failures()
        capacity = Capacity({"cpu:0": 100})
        Reservation(capacity, "m").set({"cpu:0": held})
        self.history = History(self.registry, capacity, self.failures, clock=lambda: self.now)

    def ask(self, model: str, count: int, ended: int = MS) -> None:
        statistics = self.registry.version(model, "1").statistics
        for _ in range(count):
            succeed(statistics, 1, (0, 0, 0, 0, ended))

    def take(self, at: float) -> None:
        self.now = at
        self.history.take()

    def snapshot(self, now: float) -> HistorySnapshot:
        self.now = now
        return self.history.snapshot()


def shown(samples: Iterable[Sample]) -> list[tuple[object, ...]]:
    """Return the samples as a client sees them, ignoring the order of models."""
    return [
        (one.at, one.success, one.buckets, one.failures, sorted(m[:5] for m in one.models), one.lag)
        for one in samples
    ]


def test_requests_of_two_workers_are_those_that_one_would_have_had() -> None:
    """The workers are sampled at different times; requests in between belong to the next sample."""
    whole, first, second = Worker(), Worker(), Worker()
    for second_of_hour in range(300):
        model = f"m{second_of_hour % 3}"
        for worker in (whole, second):
            worker.ask(model, second_of_hour % 7, 5 * MS)
            worker.failures.note(NotedCall(model="n"), ModelNotFound("n"), second_of_hour)
        second.take(second_of_hour + 0.25)
        for worker in (whole, first):
            worker.ask(model, second_of_hour % 5)
            worker.take(second_of_hour + 0.5)
    folded = fold_histories([each.snapshot(300.0) for each in (first, second)])
    expected = whole.snapshot(300.0)

    assert shown(expected.recent) == shown(folded.recent)
    assert shown(expected.hour) == shown(folded.hour)
    assert list(expected.failures) == folded.failures


def test_memory_adds_up_by_device() -> None:
    workers = [Worker(held=3), Worker(held=4)]
    for worker in workers:
        worker.take(1.0)
    (sample,) = fold_histories([worker.snapshot(1.0) for worker in workers]).recent

    assert (7, {"cpu:0": 7}) == (sample.used_bytes, sample.devices)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_worker_that_started_later_adds_its_requests_from_then_on(reverse: bool) -> None:
    """Times are relative to the start of the oldest worker, whichever worker was asked."""
    first, replaced = Worker(), Worker(started=100.0)
    for second in range(200):
        first.ask("m", 1)
        first.take(second)
        if second >= 100:
            replaced.ask("m", 2)
            replaced.take(second)
    answers = [each.snapshot(200.0) for each in (first, replaced)]
    folded = fold_histories(answers[::-1] if reverse else answers)
    counts = [sample.success for sample in folded.recent]

    assert 200.0 == folded.seconds
    assert 81 == counts[0]
    # The first sample of a worker counts all that it has answered since it started.
    assert [1] * 19 + [3] * 100 == [b - a for a, b in pairwise(counts)]
    assert 3 * 100 + 100 == counts[-1]


def test_samples_from_before_those_that_are_kept_make_no_rate() -> None:
    """When an old worker answered the requests in its first kept sample is unknown."""
    first, second = Worker(), Worker()
    second.ask("m", 1000)
    for moment in range(RECENT_SAMPLES + 1):
        first.take(moment)
        second.take(moment + 0.5)
    folded = fold_histories([first.snapshot(121.0), second.snapshot(121.0)])

    assert {1000} == {sample.success for sample in folded.recent}
    assert {1000} == {model.success for sample in folded.recent for model in sample.models}


def test_a_model_that_a_worker_left_out_of_a_sample_keeps_its_count() -> None:
    """Each sample holds only the busiest models, which differ between workers."""
    first, second = Worker(), Worker()
    for worker, others in ((first, "f"), (second, "s")):
        worker.ask("shared", 500)
        worker.take(0.0)
        for round_ in (1, 2, 3):
            if round_ == 2:
                worker.ask("shared", 1)
            for number in range(20):
                worker.ask(f"{others}{number:02}", 2)
            if worker is first:
                worker.ask("shared", 5)
            worker.take(round_ * HOUR_SECONDS)
    folded = fold_histories([first.snapshot(40.0), second.snapshot(40.0)])
    counts = [
        model.success for sample in folded.hour for model in sample.models if model.name == "shared"
    ]

    assert [1000, 1005, 1011, 1016] == counts


def test_the_last_failures_are_those_of_all_the_newest_first() -> None:
    workers = [Worker(), Worker()]
    for at in range(2 * KEPT):
        workers[at % 2].failures.note(NotedCall(model="n"), ModelNotFound("n"), at)
    folded = fold_histories([worker.snapshot(1.0) for worker in workers])

    assert list(range(2 * KEPT - 1, KEPT - 1, -1)) == [one.at_ns for one in folded.failures]


def test_a_model_that_a_worker_samples_for_the_first_time_is_not_all_new() -> None:
    """Earlier requests appear in its first sample, which does not say when they came."""
    first, second = Worker(), Worker()
    for number in range(20):
        second.ask(f"m{number:02}", 2000)
    second.ask("late", 1000)
    for moment in (0.0, HOUR_SECONDS, 2 * HOUR_SECONDS):
        first.ask("late", 1)
        if moment:
            second.ask("late", 1)
        first.take(moment)
        second.take(moment)
    second.ask("late", 1)
    first.take(3 * HOUR_SECONDS)
    second.take(3 * HOUR_SECONDS)
    folded = fold_histories([first.snapshot(40.0), second.snapshot(40.0)])
    counts = [
        model.success for sample in folded.hour for model in sample.models if model.name == "late"
    ]

    assert 4 == len(counts)
    assert all(0 <= after - before <= 2 for before, after in pairwise(counts))
