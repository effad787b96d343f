"""Prefix caching in a batch with fake programs: kept rows are reused or copied."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import fake_programs
from support.fake_programs import CHUNK, LENGTH, VOCAB, WINDOWS, FakePrograms, alone
from support.generators import Asking

from xlaserve.generation import asking
from xlaserve.generation.batch import Batch
from xlaserve.generation.running import Running
from xlaserve.generation.step import Step
from xlaserve.generation.trial import rows_are_of_their_tokens
from xlaserve.runtime.generator.counts import GenerationCounts
from xlaserve.runtime.generator.info import GenerationInfo
from xlaserve.runtime.handling import Sender

SLOTS = 3
INFO = GenerationInfo(*(VOCAB, LENGTH, (), Path(), SLOTS, WINDOWS, CHUNK), keeps_prefixes=True)
PROMPT = list(range(20, 33))


class Copied(FakePrograms):
    """Fake programs that count their copies."""

    copies = 0

    def copy(self, window: int, source: int, target: int) -> None:
        self.copies += 1
        super().copy(window, source, target)


class Bed:
    """A batch, and requests that are stepped until they end."""

    def __init__(self, **changed: Any) -> None:
        self.programs = Copied(SLOTS)
        self.counts = GenerationCounts(SLOTS, SLOTS * LENGTH)
        info = replace(INFO, **changed)
        self.batch = Batch(info, self.programs, self.counts, lambda running: None)

    def begin(self, prompt: list[int], count: int = 2, owner: str = "", level: int = 0) -> Asking:
        request = Asking(prompt, {"max_tokens": count, "ignore_eos": True})
        request.sender = Sender(principal=owner)
        found = asking.read(request.parameters, INFO)
        tokens = np.array(prompt, np.int32)
        self.batch.admit(Running(request, lambda: None, tokens, found, level))
        return request

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            self.batch.leave_cancelled()
            self.batch.prefill()
            self.batch.step()

    def ask(self, prompt: list[int], count: int = 2, owner: str = "") -> int:
        """Return the number of cached tokens; check that the answer equals the uncached one."""
        return self.ended(self.begin(prompt, count, owner), count)

    def ended(self, request: Asking, count: int = 2) -> int:
        self.turn(40)
        prompt = np.asarray(request.inputs["tokens"]).tolist()
        assert alone(prompt, count) == request.tokens
        return int(request.told["cached_tokens"])


def test_a_prompt_takes_over_the_slot_that_has_its_beginning() -> None:
    """Rows of the answer are reused too, except its last token, whose row was never computed."""
    bed = Bed()
    first = bed.ask(PROMPT, 4)
    others = [bed.ask([90 + index] * 9) for index in range(2)]
    follow = [*PROMPT, *alone(PROMPT, 4), 1, 2]

    assert ([0, 0, 0], len(PROMPT) + 3) == ([first, *others], bed.ask(follow))
    assert 0 == bed.programs.copies
    assert (4, 1, len(PROMPT) + 3) == (
        *(bed.counts.prefix_lookups, bed.counts.prefix_hits),
        bed.counts.cached_tokens,
    )


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    bed = Bed()
    bed.ask(PROMPT)
    chunks = len(bed.programs.chunks)

    assert len(PROMPT) - 1 == bed.ask(PROMPT)
    assert chunks == len(bed.programs.chunks)


def test_fewer_tokens_than_the_least_take_the_oldest_slot() -> None:
    """The slot of a prompt worth keeping is not used for them."""
    bed = Bed()
    bed.ask(PROMPT)

    assert 0 == bed.ask([*PROMPT[: CHUNK - 1], 1, 1])
    assert 0 == bed.ask([7] * 9)
    assert len(PROMPT) - 1 == bed.ask(PROMPT)


def test_principals_do_not_have_rows_of_one_another() -> None:
    """Neither cached ones nor those of a slot in use."""
    bed = Bed()
    bed.ask(PROMPT, owner="one")
    running = bed.begin(PROMPT, 9, owner="one")
    bed.turn(3)

    assert 0 == bed.ask(PROMPT, owner="other")
    assert 9 == len(running.tokens)
    assert 0 == bed.programs.copies
    assert len(PROMPT) - 1 == bed.ask(PROMPT, owner="other")


def test_rows_of_a_slot_in_use_are_copied() -> None:
    """Also for prompts that arrived together: the first one computes the rows for all."""
    bed = Bed()
    requests = [bed.begin([*PROMPT, last], 6) for last in (1, 2, 3)]

    found = [bed.ended(request, 6) for request in requests]

    assert [0, len(PROMPT) - 1, len(PROMPT) - 1] == [min(one, len(PROMPT) - 1) for one in found]
    assert 2 == bed.programs.copies
    assert -(-len(PROMPT) // CHUNK) <= len(bed.programs.chunks) <= len(PROMPT) // CHUNK + 3


@pytest.mark.parametrize(
    ("level", "found"), [(0, len(PROMPT) - 1), (1, CHUNK)], ids=["as it came", "overtaken"]
)
def test_the_first_of_two_that_came_together_has_no_rows_of_the_other(
    level: int, found: int
) -> None:
    """Neither if the other has a lower slot, nor if it advanced further due to its priority.

    The reported number counts rows that existed before any of the request's choices.
    """
    bed = Bed()
    before = [bed.begin([90 + index] * 9) for index in range(2)]
    first = bed.begin(PROMPT, level=level)
    for one in before:
        one.is_cancelled = True
    bed.batch.leave_cancelled()
    bed.batch.prefill()
    other = bed.begin(PROMPT)

    assert [0, found] == [bed.ended(first), bed.ended(other)]


def test_rows_that_others_may_want_are_copied_out_of_a_kept_slot() -> None:
    """The longer kept prompt stays: its slot is not used for a prompt that shares a part."""
    bed = Bed()
    long = [*PROMPT, *range(40, 46)]
    bed.ask(long)

    assert 9 == bed.ask([*PROMPT[:9], 1, 1])
    assert 1 == bed.programs.copies
    assert len(long) - 1 == bed.ask(long)


def test_a_copy_that_saves_no_chunk_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would bring 16 of 18 rows, but the rest needs a chunk of 20 in any case."""
    monkeypatch.setattr(fake_programs, "CHUNK", 20)
    bed = Bed(chunk=20, windows=(LENGTH,))
    bed.begin(list(range(18)), 6)
    bed.turn()

    assert 0 == bed.ask([*range(16), 1, 1, 1])
    assert 0 == bed.programs.copies


def test_nothing_is_kept_of_a_cache_that_is_gone() -> None:
    bed = Bed()
    bed.ask(PROMPT)
    bed.begin(PROMPT)
    bed.batch.take_all()
    bed.programs.reset()

    assert 0 == bed.ask(PROMPT)


def test_a_prompt_that_was_cancelled_leaves_the_rows_that_it_had() -> None:
    bed = Bed()
    request = bed.begin(PROMPT)
    bed.turn(2)
    request.is_cancelled = True
    bed.turn()

    assert 2 * CHUNK == bed.ask(PROMPT)


def test_a_trial_tells_rows_that_are_of_more_than_their_tokens() -> None:
    """A model may store the length of its prompt, and answer wrongly after reused rows."""

    class Counting(FakePrograms):
        end = 0

        def prefill(self, window: int, tokens: Any, slot: int, start: int, count: int) -> None:
            super().prefill(window, tokens, slot, start, count)
            self.end = start + count

        def step(self, *given: Any, **slots: Any) -> Step:
            step = super().step(*given, **slots)
            return step._replace(top_logprobs=step.top_logprobs - self.end)

    assert rows_are_of_their_tokens(FakePrograms(SLOTS), INFO)
    assert not rows_are_of_their_tokens(Counting(SLOTS), INFO)


def test_nothing_is_kept_where_it_is_turned_off() -> None:
    bed = Bed(keeps_prefixes=False)
    bed.ask(PROMPT)

    assert 0 == bed.ask(PROMPT)
    assert 0 == bed.counts.prefix_lookups
