"""Continuous batching: requests in slots, and their scheduling."""

import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Protocol

import numpy as np

from xlaserve.errors.panics import answerable
from xlaserve.generation.prefixes import Prefixes
from xlaserve.generation.running import Running, StepResults
from xlaserve.generation.sampling import INTEGERS, REALS
from xlaserve.generation.step import Step
from xlaserve.runtime.generator.counts import GenerationCounts
from xlaserve.runtime.generator.info import GenerationInfo, mask_words
from xlaserve.tensors import Tensor

MOST_PREEMPTED = 3
"""Maximum number of preemptions per request."""


class Computes(Protocol):
    """The compiled programs and the cache (`Programs`)."""

    def reset(self) -> None:
        """Reset the cache to zeros."""
        ...

    def begin(
        self, slot: int, prompt: Tensor, bias: Mapping[int, float], output: Sequence[int] = ()
    ) -> None:
        """Set a slot's prompt, bias and generated tokens."""
        ...

    def prefill(self, window: int, tokens: Tensor, slot: int, start: int, count: int) -> None:
        """Compute a chunk of a prompt, of which `count` tokens are real."""
        ...

    def copy(self, window: int, source: int, target: int) -> None:
        """Copy the first `window` rows of one slot to another."""
        ...

    def step(
        self,
        window: int,
        integers: Tensor,
        reals: Tensor,
        mask: Tensor | None = None,
        *,
        slots: Tensor | None = None,
    ) -> Step:
        """Compute and fetch the next token of each active slot: of `slots`, or of all if None."""
        ...


class Batch:
    """Computes the requests of all slots together. Called by one thread; contains no locking.

    A turn is `leave_cancelled`, `admit` for each free slot, `prefill` and `step`. Between two steps
    only one chunk of one prompt is computed, so that a long prompt delays the others by one chunk
    at a time.
    """

    def __init__(
        self,
        info: GenerationInfo,
        programs: Computes,
        counts: GenerationCounts,
        pause: Callable[[Running], None],
    ) -> None:
        """`pause` is called with requests whose clients must read, or grammars grow, first."""
        self._info = info
        self._programs = programs
        self._counts = counts
        self._pause = pause
        self._prefixes = Prefixes(info.slots, info.chunk) if info.keeps_prefixes else None
        self._slots: list[Running | None] = [None] * info.slots
        self._admitted = 0
        """Number of admissions so far."""
        self._admissions = [0] * info.slots
        """Sequence number of the latest admission to each slot."""
        # A position beyond the end: rows written by inactive slots are dropped.
        self._idle = (0, info.max_length, *(0,) * (len(INTEGERS) - 2))
        self._reals = np.zeros((info.slots, len(REALS)), np.float32)
        self._mask = np.full((info.slots, mask_words(info.vocab)), -1, np.int32)

    @property
    def has_free(self) -> bool:
        """Tell whether a slot is free."""
        return self._counts.running < len(self._slots)

    @property
    def has_work(self) -> bool:
        """Tell whether another turn would make progress."""
        return any(
            running is not None and (not running.is_paused or running.request.is_cancelled)
            for running in self._slots
        )

    @property
    def running(self) -> list[Running]:
        """Return the requests with a slot."""
        return [running for running in self._slots if running is not None]

    def take_all(self) -> list[Running]:
        """Remove all requests and cached prefixes, since the cache may be lost."""
        found = self.running
        self._slots = [None] * len(self._slots)
        if self._prefixes is not None:
            self._prefixes.clear()
        self._counts.running = self._counts.positions_used = 0
        return found

    def leave_cancelled(self) -> None:
        """Free the slots of abandoned requests."""
        for slot, running in enumerate(self._slots):
            if running is not None and running.request.is_cancelled:
                self._leave(slot, running)
                running.request.end()
                running.freed()

    def admit(self, running: Running) -> None:
        """Give a request the free slot with its longest cached prefix, else the oldest one."""
        slot = self._chosen(running)
        self._slots[slot] = running
        running.passed = 0
        self._admitted += 1
        running.admitted = self._admissions[slot] = self._admitted
        self._counts.running += 1
        if not running.preempted:
            self._counts.prompt_tokens += len(running.prompt)
            running.request.begin()
        self._mask[slot] = -1
        self._programs.begin(slot, running.prompt, running.parameters.bias, running.output)
        self._reals[slot] = running.parameters.reals
        # Copied now: before the first chunk, the source slot may be given to another request.
        self._copy(slot, running)

    def yielding(self, level: int) -> Iterator[Running]:
        """Yield the requests that a priority level may preempt. Callable from any thread."""
        for running in self.running:
            is_worse = running.level > level and running.preempted < MOST_PREEMPTED
            if is_worse and not running.request.is_cancelled:
                yield running

    def may_begin(self, waiting: Sequence[Running]) -> bool:
        """Tell whether one of the waiting requests would get a slot."""
        ready = _ready(waiting)
        return bool(ready) and (self.has_free or any(self.yielding(ready[0].level)))

    def take_next(self, waiting: list[Running]) -> Running | None:
        """Dequeue and return the next request to get a slot, or None.

        If no slot is free, a request of lower priority may be preempted; it is put at the front of
        the queue of its priority level.
        """
        ready = _ready(waiting)
        if not ready:
            return None
        if self.has_free:
            # Equal costs: requests are chosen by priority, then in arrival order.
            running = choose(ready, lambda one: 0)
        else:
            running = ready[0]
            worse = self._preempt(running.level)
            if worse is None:
                return None
            waiting.insert(0, worse)
        waiting.remove(running)
        return running

    def _preempt(self, level: int) -> Running | None:
        """Preempt and return the request with the lowest priority below a level, or return None.

        Among equals, prefers requests whose clients do not read, then the most recently admitted.
        """
        worst = max(
            self.yielding(level),
            key=lambda one: (one.level, one.is_paused, one.admitted),
            default=None,
        )
        if worst is not None:
            self._leave(self._slots.index(worst), worst)
            worst.give_up()
            self._counts.preemptions += 1
        return worst

    def _chosen(self, running: Running) -> int:
        """Choose a free slot, preferring the one with the longest matching prefix."""
        prefixes = self._prefixes
        if prefixes is None:
            return self._slots.index(None)
        free = [slot for slot, one in enumerate(self._slots) if one is None]
        slot = prefixes.oldest(free)
        found = prefixes.find(running.context, running.sender.principal, free)
        # Choose the slot with the match, unless its rows beyond the match are worth keeping.
        if found is not None and (found.slot == slot or prefixes.beyond(found) < prefixes.least):
            slot = found.slot
            self._has(running, found.rows)
        prefixes.hold(slot, running.tokens, running.sender.principal)
        self._counts.prefix_lookups += not running.preempted
        return slot

    def _copy(self, slot: int, running: Running) -> None:
        """Copy a longer prefix from another slot, if that saves at least one chunk."""
        prefixes, owner = self._prefixes, running.sender.principal
        if prefixes is None or running.is_prefilled:
            return
        # Only from slots admitted earlier: if several requests are admitted together (the choices
        # of one prompt), the first one computes its rows and counts no cached tokens.
        others = [
            other for other in range(len(self._slots)) if self._admissions[other] < running.admitted
        ]
        found = prefixes.find(running.context, owner, others)
        if found is not None and self._chunks(running, found.rows) < self._chunks(running):
            self._programs.copy(self._window(found.rows), found.slot, slot)
            prefixes.touch(found.slot)
            self._has(running, found.rows - running.written)
            prefixes.hold(slot, running.tokens, owner)

    def _chunks(self, running: Running, written: int | None = None) -> int:
        """Return how many prompt chunks are left after `written` rows (default: the current)."""
        written = running.written if written is None else written
        return -(-(len(running.context) - 1 - written) // self._info.chunk)

    def _has(self, running: Running, count: int) -> None:
        """Record that more rows of a request are in the cache."""
        self._counts.positions_used += count
        running.written += count
        # After a preemption, these rows were already counted.
        if not running.preempted:
            self._counts.prefix_hits += not running.cached
            self._counts.cached_tokens += count
            running.cached += count

    def prefill(self) -> None:
        """Compute one chunk of the prompt with the least left, or of one passed over too often."""
        found = [running for running in self.running if not running.is_prefilled]
        if not found:
            return
        running = choose(sorted(found, key=_by_admission), lambda one: one.left)
        slot = self._slots.index(running)
        self._copy(slot, running)
        if running.is_prefilled:
            return
        chunk, start = self._info.chunk, running.written
        part = running.context[start : min(start + chunk, len(running.context) - 1)]
        tokens = np.zeros(chunk, np.int32)
        tokens[: len(part)] = part
        window = self._window(start + len(part))
        self._programs.prefill(window, tokens, slot, start, len(part))
        running.written += len(part)
        self._counts.chunks += 1
        self._counts.positions_used += len(part)
        if self._prefixes is not None:
            self._prefixes.hold(slot, running.tokens, running.sender.principal)

    def step(self) -> None:
        """Compute a token for each prefilled request that is not paused."""
        active = [
            (slot, running)
            for slot, running in enumerate(self._slots)
            if running is not None
            and running.is_prefilled
            and not running.is_paused
            and (running.constraint is None or self._is_constrained(slot, running))
        ]
        if not active:
            return
        window = self._window(max(running.written for _, running in active) + 1)
        size = self._info.step_size(len(active))
        has_constraint = any(running.constraint is not None for _, running in active)
        if size == self._info.slots:
            rows = [slot for slot, _ in active]
            mask = self._mask if has_constraint else None
            step = self._programs.step(window, self._integers(active, rows), self._reals, mask)
        else:
            rows = list(range(len(active)))
            slots = np.full(size, self._info.slots, np.int32)
            slots[: len(active)] = [slot for slot, _ in active]
            # Padding rows use the values of an arbitrary slot; their tokens are discarded.
            taken = np.minimum(slots, self._info.slots - 1)
            mask = self._mask[taken] if has_constraint else None
            integers = self._integers(active, rows, size)
            step = self._programs.step(window, integers, self._reals[taken], mask, slots=slots)
        now, counts = time.perf_counter_ns(), self._counts
        counts.steps += 1
        counts.step_rows += size
        counts.output_tokens += len(active)
        counts.positions_used += len(active)
        self._count_times([running for _, running in active], now)
        given = StepResults.of(step)
        with active[0][1].request.gathered():
            for row, (slot, running) in zip(rows, active, strict=True):
                self._give(slot, running, row, given)

    def _integers(
        self, active: Sequence[tuple[int, Running]], rows: Sequence[int], size: int = 0
    ) -> Tensor:
        """Return the integers of a step, INT32 [rows, INTEGERS]; `size` of 0 means all slots."""
        found: list[tuple[int, ...]] = [self._idle] * (size or self._info.slots)
        for row, (_, running) in zip(rows, active, strict=True):
            parameters = running.parameters
            may_stop = len(running.output) >= parameters.min_tokens
            found[row] = (
                *(running.last, running.written, 1, parameters.top_k, may_stop),
                *running.seed_words,
            )
        # Three times faster than assigning the rows of an array one by one.
        flat = array("i", chain.from_iterable(found))
        return np.frombuffer(flat, np.int32).reshape(len(found), len(INTEGERS))

    def _count_times(self, active: Sequence[Running], now: int) -> None:
        """Record the time since each request's last token, grouped by equal times."""
        counts: dict[int, int] = {}
        for running in active:
            if running.output:
                counts[running.last_token_ns] = counts.get(running.last_token_ns, 0) + 1
            else:
                self._counts.first_token.add(now - running.last_token_ns)
            running.last_token_ns = now
        for last_token_ns, count in counts.items():
            self._counts.token.add(now - last_token_ns, count)

    def _is_constrained(self, slot: int, running: Running) -> bool:
        """Fill the mask of allowed tokens of a slot.

        Return False if the grammar has to grow first, or if that or the mask failed the request.
        """
        constraint, growth = running.constraint, running.growth
        assert constraint is not None
        running.growth = None
        try:
            if growth is not None:
                growth.result()
            if constraint.fill(self._mask[slot]):
                return True
            assert running.grow is not None
            running.growth = running.grow()
        except BaseException as error:  # the error concerns only this request
            self._refuse(slot, running, answerable(error))
            return False
        running.is_paused = True
        self._pause(running)
        return False

    def _refuse(self, slot: int, running: Running, error: Exception) -> None:
        self._leave(slot, running)
        running.request.fail(error)
        running.freed()

    def _give(self, slot: int, running: Running, row: int, given: StepResults) -> None:
        try:
            is_last = running.take(row, given, self._info.max_length)
        except BaseException as error:  # the error concerns only this request
            self._refuse(slot, running, answerable(error))
            return
        if is_last:
            self._leave(slot, running)
            running.freed()
        elif not running.request.is_writable:
            running.is_paused = True
            self._pause(running)

    def _leave(self, slot: int, running: Running) -> None:
        self._slots[slot] = None
        if self._prefixes is not None:
            self._prefixes.hold(slot, running.tokens, running.sender.principal)
        self._counts.running -= 1
        self._counts.positions_used -= running.written

    def _window(self, positions: int) -> int:
        """Return the smallest compiled window that covers a number of positions."""
        return next(window for window in self._info.windows if window >= positions)


def _by_admission(running: Running) -> int:
    return running.admitted


def _ready(waiting: Sequence[Running]) -> list[Running]:
    """Return the waiting requests that could start, by priority.

    Excludes preempted requests whose clients must read, or grammars grow, first.
    """
    return sorted((one for one in waiting if not one.is_paused), key=lambda one: one.level)


MOST_PASSED = 8
"""Number of times that a request may be passed over before it takes precedence."""


def choose(found: Sequence[Running], cost: Callable[[Running], int]) -> Running:
    """Choose a request by priority, then least cost, unless one was passed over too often.

    Starvation-free: each of n requests is chosen within MOST_PASSED + n choices. Among those passed
    over too often, the one passed over most often is chosen, which is never a newcomer.
    """
    late = [running for running in found if running.passed >= MOST_PASSED]
    if late:
        chosen = max(late, key=lambda running: running.passed)
    else:
        chosen = min(found, key=lambda running: (running.level, cost(running)))
    for running in found:
        running.passed += 1
    chosen.passed = 0
    return chosen
