"""Preempted requests: they lose their slot to better ones, and later continue unchanged."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import tiny_language
from support.fake_programs import CHUNK, LENGTH, VOCAB, WINDOWS, FakePrograms, alone
from support.generators import CONFIG, SLOTS, Asking, Loaded, load_configured, prompt_of

from xlaserve.generation import asking
from xlaserve.generation.batch import MOST_PREEMPTED, Batch
from xlaserve.generation.loading import GeneratorModel
from xlaserve.generation.running import Running
from xlaserve.model_config.config import DynamicBatching, ModelConfig
from xlaserve.runtime.generator.counts import GenerationCounts
from xlaserve.runtime.generator.info import GenerationInfo

INFO = GenerationInfo(VOCAB, LENGTH, (), Path(), 2, WINDOWS, CHUNK, keeps_prefixes=True)


class Bed:
    """A batch of two slots, and the requests that wait for one."""

    def __init__(self) -> None:
        self.counts = GenerationCounts(2, 2 * LENGTH)
        self.batch = Batch(INFO, FakePrograms(2), self.counts, self._pause)
        self.waiting: list[Running] = []

    def _pause(self, running: Running) -> None:
        running.request.when_writable(lambda: setattr(running, "is_paused", False))

    def add(self, level: int, first: int = 1, count: int = 6) -> Running:
        prompt = [first, *range(7)]
        request = Asking(prompt, {"max_tokens": count, "ignore_eos": True})
        asked, tokens = asking.read(request.parameters, INFO), np.array(prompt, np.int32)
        running = Running(request, lambda: None, tokens, asked, level)
        self.waiting.append(running)
        return running

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            self.batch.leave_cancelled()
            while (running := self.batch.take_next(self.waiting)) is not None:
                self.batch.admit(running)
            self.batch.prefill()
            self.batch.step()

    def ended(self, *asked: Running) -> bool:
        """Tell whether each request got exactly the tokens that it gets alone, once."""
        self.turn(60)
        return all(
            alone(one.prompt.tolist(), one.parameters.max_tokens) == one.request.tokens  # type: ignore[attr-defined]
            for one in asked
        )


def test_the_worst_request_that_came_last_gives_up_its_slot() -> None:
    """It is also the first of its level to get a slot again."""
    bed = Bed()
    bad, worst = bed.add(2, 1), bed.add(3, 2)
    bed.turn(5)
    behind, better = bed.add(3, 3), bed.add(1, 4)
    bed.turn()
    running, waiting = list(bed.batch.running), list(bed.waiting)

    assert ([bad, better], [worst, behind]) == (sorted(running, key=lambda r: -r.level), waiting)
    assert worst.output
    assert bed.ended(bad, worst, behind, better)
    assert (0, 1, 0, 0) == tuple(one.preempted for one in (bad, worst, behind, better))
    assert 1 == bed.counts.preemptions
    assert 4 * 8 == bed.counts.prompt_tokens


def test_of_two_that_are_as_bad_the_later_one_gives_up_its_slot() -> None:
    bed = Bed()
    first, second = bed.add(2, 1), bed.add(2, 2)
    bed.turn(5)
    bed.add(1, 3)
    bed.turn()

    assert (0, 1) == (first.preempted, second.preempted)


def test_the_same_priority_takes_no_slot() -> None:
    bed = Bed()
    first = [bed.add(1), bed.add(1)]
    bed.turn(3)
    last = bed.add(1)
    bed.turn()

    assert (first, [last]) == (bed.batch.running, bed.waiting)


def test_a_request_loses_its_slot_no_more_often_than_the_bound() -> None:
    """The last request has priority 1 too, but `worst` can no longer be preempted."""
    bed = Bed()
    held, worst = bed.add(0, count=16), bed.add(9, 2)
    bed.turn(4)
    for number in range(MOST_PREEMPTED):
        better = bed.add(1, 3 + number, 1)
        bed.turn()
        assert better in bed.batch.running
        while better in bed.batch.running:
            bed.turn()
        bed.turn()
        assert worst in bed.batch.running
    last = bed.add(1, 40)
    bed.turn()

    assert MOST_PREEMPTED == worst.preempted
    assert (worst in bed.batch.running, [last]) == (True, bed.waiting)
    assert bed.ended(held, worst, last)


def test_one_that_does_not_read_has_no_slot_again_until_it_does() -> None:
    """It would block a slot without using it."""
    bed = Bed()
    slow, other = bed.add(2, 1), bed.add(2, 2)
    slow.request.is_writable = False  # type: ignore[misc]
    bed.turn(5)
    better = bed.add(1, 3)
    bed.turn(40)

    assert slow.is_paused
    assert (1, [slow]) == (slow.preempted, bed.waiting)
    slow.request.read_on()  # type: ignore[attr-defined]
    assert bed.ended(slow, other, better)


def test_a_cancelled_request_does_not_give_up_its_slot() -> None:
    """It releases the slot anyway, and must not be queued again."""
    bed = Bed()
    requests = [bed.add(2, 1), bed.add(2, 2)]
    bed.turn(5)
    for one in requests:
        one.request.is_cancelled = True  # type: ignore[misc]
    better = bed.add(1, 3)

    assert bed.batch.take_next(bed.waiting) is None
    assert bed.ended(better)
    assert (0, []) == (bed.counts.preemptions, bed.waiting)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GeneratorModel]:
    """A model with two priorities."""
    path = tiny_language.export(tmp_path_factory.mktemp("models") / "story" / "1")
    levels = DynamicBatching(priority_levels=2, default_priority_level=2)
    config = ModelConfig(parameters=CONFIG, dynamic_batching=levels)
    loaded = load_configured(path, config)
    yield loaded
    loaded.close()


def test_a_preempted_request_is_given_what_it_is_given_alone(model: GeneratorModel) -> None:
    """Its seed and penalty counts continue; a cancelled request leaves nothing behind."""
    loaded, counts = Loaded(model), model.counts
    sampled: dict[str, Any] = {"temperature": 1.5, "ignore_eos": True, "max_tokens": 12}
    sampled |= {"repetition_penalty": 1.4, "frequency_penalty": 2.0}
    prompts = [prompt_of(9 + 2 * index, index) for index in range(SLOTS)]
    whole = [loaded.ask(p, seed=i, **sampled).tokens for i, p in enumerate(prompts)]
    loaded.wait_until_idle()

    def begun(index: int) -> Asking:
        slow = Asking(prompts[index], {"seed": index, **sampled})
        slow.is_writable = False
        model.handle(0, [slow], lambda: None)
        assert slow.paused.wait(60)
        return slow

    asked = [begun(index) for index in range(SLOTS)]
    better = [loaded.ask(prompt_of(20, 50 + i), priority=1, max_tokens=2) for i in range(SLOTS)]
    assert all(request.tokens for request in better)
    loaded.wait_until_idle()
    asked[0].cancel()
    for request in asked[1:]:
        request.read_on()

    assert whole[1:] == [request.tokens for request in asked[1:]]
    assert asked[0].has_ended
    assert 2 <= counts.preemptions
    loaded.ask(prompt_of(3), max_tokens=1)
    loaded.wait_until_idle()
    assert (0, 0) == (counts.running, counts.positions_used)
