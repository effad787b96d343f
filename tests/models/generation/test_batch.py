"""Scheduling of a generation batch: every request gets its tokens, and none waits long."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.fake_programs import CHUNK, LENGTH, VOCAB, WINDOWS, FakePrograms, alone
from support.generators import Asking

from xlaserve.generation import asking
from xlaserve.generation.batch import MOST_PASSED, MOST_PREEMPTED, Batch, choose
from xlaserve.generation.running import Running
from xlaserve.runtime.generator.counts import GenerationCounts
from xlaserve.runtime.generator.info import GenerationInfo

SLOTS = 3
INFO = GenerationInfo(
    *(VOCAB, LENGTH, (), Path(), SLOTS, WINDOWS, CHUNK), keeps_prefixes=True, step_sizes=(1, 2)
)


class Turns(RuleBasedStateMachine):
    """Random requests on a batch, stepped as its thread does it."""

    def __init__(self) -> None:
        super().__init__()
        self.programs = FakePrograms(SLOTS)
        self.counts = GenerationCounts(SLOTS, SLOTS * LENGTH)
        self.batch = Batch(INFO, self.programs, self.counts, self._pause)
        self.waiting: list[Running] = []
        self.asked: list[tuple[Asking, Running, int]] = []
        self.freed: list[Running] = []
        self.idle: dict[Running, int] = {}
        """For each prompt with a slot, the number of other prompts' chunks since its last one."""

    def _pause(self, running: Running) -> None:
        running.request.when_writable(lambda: setattr(running, "is_paused", False))

    def _add(self, length: int, count: int, level: int, kind: int) -> None:
        prompt = [(kind * index) % VOCAB for index in range(length)]
        request = Asking(prompt, {"max_tokens": count, "ignore_eos": True})
        tokens, found = np.array(prompt, np.int32), asking.read(request.parameters, INFO)

        def freed() -> None:
            self.freed.append(running)

        running = Running(request, freed, tokens, found, level)
        self.waiting.append(running)
        self.asked.append((request, running, count))

    @rule(
        length=st.integers(1, LENGTH),
        count=st.integers(1, 6),
        level=st.integers(0, 2),
        kind=st.integers(1, 3),
    )
    def add(self, length: int, count: int, level: int, kind: int) -> None:
        self._add(length, count, level, kind)

    @rule(count=st.integers(2, 8))
    def add_short_ones(self, count: int) -> None:
        """Add requests with less work left than any other, and a better priority."""
        for _ in range(count):
            self._add(2, 1, 0, 5)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        request, running, _ = data.draw(st.sampled_from(self.asked))
        request.is_cancelled = True
        if running in self.waiting:
            self.waiting.remove(running)
            running.freed()

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def stop_reading(self, data: Any) -> None:
        data.draw(st.sampled_from(self.asked))[0].is_writable = False

    @precondition(lambda self: any(running.is_paused for _, running, _ in self.asked))
    @rule()
    def read_on(self) -> None:
        next(request for request, running, _ in self.asked if running.is_paused).read_on()

    @rule(count=st.integers(1, 12))
    def turn(self, count: int) -> None:
        for _ in range(count):
            self._turn()

    def _turn(self) -> None:
        batch, computed = self.batch, len(self.programs.chunks)
        batch.leave_cancelled()
        while (running := batch.take_next(self.waiting)) is not None:
            batch.admit(running)
        before = {running: running.written for running in batch.running}
        batch.prefill()
        for running, written in before.items():
            is_same = running.written == written and not running.is_prefilled
            has_passed = is_same and len(self.programs.chunks) > computed
            self.idle[running] = self.idle.get(running, 0) + 1 if has_passed else 0
        batch.step()

    @invariant()
    def no_prompt_waits_for_more_than_the_bound(self) -> None:
        assert max(self.idle.values(), default=0) <= MOST_PASSED + SLOTS

    @invariant()
    def no_slot_is_lost(self) -> None:
        running = list(self.batch.running)
        assert len(running) == self.counts.running <= SLOTS
        assert self.counts.positions_used == sum(one.written for one in running)
        assert len(running) + len(self.waiting) + len(self.freed) == len(self.asked)
        assert len(set(self.freed)) == len(self.freed)
        assert self.counts.preemptions == sum(running.preempted for _, running, _ in self.asked)
        assert all(running.preempted <= MOST_PREEMPTED for _, running, _ in self.asked)

    @invariant()
    def nobody_waits_for_a_slot_that_is_free(self) -> None:
        has_waiting = any(not running.is_paused for running in self.waiting)
        assert self.batch.may_begin(self.waiting) or not (has_waiting and self.batch.has_free)

    def teardown(self) -> None:
        """Let all clients read: each gets the tokens that it gets alone, or fewer and the end."""
        for _ in range(40 * (len(self.asked) + 1)):
            for request, running, _ in self.asked:
                request.is_writable = True
                if running.is_paused:
                    request.read_on()
            self._turn()
        for request, running, count in self.asked:
            expected = alone([int(token) for token in running.prompt], count)
            found = [int(answer["token"][0]) for answer in request.answers]
            assert found == expected[: len(found)]
            assert request.is_cancelled or (found == expected and request.told)
        assert len(self.freed) == len(self.asked)


TestTurns = Turns.TestCase
TestTurns.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_a_request_is_chosen_though_better_ones_keep_coming() -> None:
    """Within the bound, whatever its priority level and cost."""

    def made(level: int, length: int) -> Running:
        request = Asking([1] * length, {})
        tokens = np.ones(length, np.int32)
        return Running(request, lambda: None, tokens, asking.read({}, INFO), level)

    old, found = made(3, 20), 0
    waiting = [old, *(made(0, 2) for _ in range(4))]
    while (chosen := choose(waiting, lambda one: one.left)) is not old:
        waiting[waiting.index(chosen)] = made(0, 2)
        found += 1

    assert MOST_PASSED == found


def test_the_better_priority_has_the_first_slot() -> None:
    """Within a priority level, the first request comes first."""
    requests = [Asking([1, 2], {}) for _ in range(3)]
    levels = (2, 1, 1)
    waiting = [
        Running(one, lambda: None, np.ones(2, np.int32), asking.read({}, INFO), level)
        for one, level in zip(requests, levels, strict=True)
    ]

    assert waiting[1] is choose(waiting, lambda one: 0)


class Gathering(Asking):
    """A request that records how many answers are given before they are delivered."""

    handed: ClassVar[list[int]] = []
    given: ClassVar[list[Any]] = []

    def answer(self, outputs: Any, **told: Any) -> None:
        self.given.append(outputs)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        yield
        self.handed.append(len(self.given))
        self.given.clear()


@pytest.mark.parametrize(("active", "size"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 6), (6, 6)])
def test_a_step_has_the_smallest_size_that_holds_those_who_take_part(
    active: int, size: int
) -> None:
    """Cancelled requests and paused ones take no row."""
    info = replace(INFO, slots=6, step_sizes=(1, 2, 4))
    counts, programs = GenerationCounts(6, 6 * LENGTH), FakePrograms(6)
    batch = Batch(info, programs, counts, lambda running: None)
    asked = [Asking([1], {"max_tokens": 3, "ignore_eos": True}) for _ in range(6)]
    for request in asked:
        found = asking.read(request.parameters, info)
        batch.admit(Running(request, lambda: None, np.ones(1, np.int32), found))
    for request in asked[active:]:
        request.is_cancelled = True
    batch.leave_cancelled()
    batch.step()

    assert ({size}, size) == (programs.sizes, counts.step_rows)
    assert [1] * active + [0] * (6 - active) == [len(request.answers) for request in asked]


def test_answers_of_a_step_are_handed_over_together() -> None:
    """A client woken in between would take the GIL from the step."""
    counts = GenerationCounts(SLOTS, SLOTS * LENGTH)
    batch = Batch(INFO, FakePrograms(SLOTS), counts, print)
    for _ in range(SLOTS):
        request = Gathering([1], {"max_tokens": 2})
        found = asking.read(request.parameters, INFO)
        batch.admit(Running(request, lambda: None, np.ones(1, np.int32), found))
    batch.step()
    batch.step()

    assert Gathering.handed == [SLOTS, SLOTS]
    assert [SLOTS, SLOTS] == [sum(times.buckets) for times in (counts.first_token, counts.token)]
    assert not batch.running
