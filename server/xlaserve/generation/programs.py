"""A generator's compiled programs, and the device arrays that they update in place."""

# Some jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import numpy as np
from jax.errors import JaxRuntimeError
from jax.export import Exported

from xlaserve.artifact.generator_record import CHUNK, DECODE, Record
from xlaserve.errors import InvalidModel
from xlaserve.generation.in_place import Memory
from xlaserve.generation.lowering import BEGIN, COPY, EMPTY, PARTIAL, Lowering, Wanted, why_not
from xlaserve.generation.sampling import INTEGERS, REALS
from xlaserve.generation.step import Step
from xlaserve.runtime.devices.sites import Site
from xlaserve.runtime.generator.info import GenerationInfo, mask_words
from xlaserve.runtime.loaded import ModelMemory
from xlaserve.runtime.programs import serialized
from xlaserve.runtime.programs.kept_programs import KeptPrograms, first_line
from xlaserve.tensors import Tensor


class Programs:
    """Runs the programs on one device or a mesh; owns the slots' state. Used by one thread."""

    def __init__(
        self,
        record: Record,
        info: GenerationInfo,
        exported: tuple[Exported, Exported],
        parameters: Sequence[jax.Array],
        site: Site,
        *,
        kept: KeptPrograms,
    ) -> None:
        self._site = site
        self._kept = kept
        self.cached = 0
        """Number of programs loaded from the compilation cache."""
        self._uses_kept = True
        self._info = info
        self._lowering = Lowering(record, info, exported, parameters, site)
        self.count = self._lowering.count
        """Number of programs of the generator."""
        self.cache_bytes = self._lowering.cache_bytes
        self.state_bytes = self._lowering.state_bytes
        self.why_whole = self._lowering.why_whole
        """Why partial steps are unavailable; empty if they are available."""
        self._parameters = list(parameters)
        self._launching = site.launching or nullcontext()
        self.temporary_bytes = 0
        """Maximum temporary memory of any program, in bytes."""
        self.busy_ns = 0
        """Total time in programs, from dispatch until the results are fetched."""
        self._compiled: dict[tuple[str, int, int], Any] = {}
        """Programs by name, window, and rows of a PARTIAL step (else 0)."""
        self._windows = {w: np.zeros(w, np.int8) for w in info.windows}
        # Created by numpy: with a full compilation cache, JAX must not compile anything here.
        self._free = {
            rows: jax.device_put(
                np.full((rows, mask_words(info.vocab)), -1, np.int32), site.outputs
            )
            for rows in (*info.step_sizes, info.slots)
        }
        """Masks that allow all tokens, by number of rows."""
        self._cache: list[jax.Array] = []
        self._tables: list[jax.Array] = []

    def memory(self, host: int) -> ModelMemory:
        """Return the memory of the generator; `host` is additional host memory."""
        return self._lowering.memory(self.temporary_bytes, host)

    def compile(self, before_each: Callable[[], None]) -> None:
        """Compile all programs, or load them from the compilation cache, and execute each once.

        If a cached program fails, all programs are recompiled. Raises InvalidModel.
        """
        try:
            self._compile_all(before_each)
        except (InvalidModel, JaxRuntimeError, TypeError, ValueError) as error:
            if not self.cached:
                raise
            self._kept.drop(f"one of them failed: {first_line(error)}")
            self._uses_kept, self.cached = False, 0
            self._compile_all(before_each)
        self._kept.log_dropped()

    def _compile_all(self, before_each: Callable[[], None]) -> None:
        for wanted in self._lowering.programs():
            before_each()
            if wanted.is_optional and self.why_whole:
                continue
            made = self._made(wanted)
            memory = Memory.of(made)
            if why := why_not(wanted, memory, self.cache_bytes):
                self.drop_partial(why)
                continue
            self.temporary_bytes = max(self.temporary_bytes, memory.booked)
            self._compiled[wanted.name, wanted.window, wanted.size] = made
        self._execute_all()

    def _execute_all(self) -> None:
        """Execute every program once, then reset the state."""
        info = self._info
        self.reset()
        self.begin(0, np.zeros(0, np.int32), {})
        idle = np.zeros((info.slots, len(INTEGERS)), np.int32)
        ones = np.ones((info.slots, len(REALS)), np.float32)
        for window in info.windows:
            self.prefill(window, np.zeros(info.chunk, np.int32), 0, 0, 1)
            self.step(window, idle, ones)
            for size in () if self.why_whole else info.step_sizes:
                padding = np.full(size, info.slots, np.int32)
                self.step(window, idle[:size], ones[:size], slots=padding)
            if info.keeps_prefixes:
                self.copy(window, 0, info.slots - 1)
        self.reset()

    def drop_partial(self, why: str) -> None:
        """Remove the partial steps; `why` is the reason."""
        self._compiled = {key: made for key, made in self._compiled.items() if key[0] != PARTIAL}
        self.why_whole = why

    def _made(self, wanted: Wanted) -> Any:
        """Load a program from the compilation cache, or compile it."""
        lowered = wanted.lowered()
        place = wanted.place(self._kept, self._site, lowered)

        def load(data: bytes) -> jax.stages.Compiled:
            return serialized.loaded(data, lowered.in_tree, lowered.out_tree, self._site.devices)

        found = self._kept.find(place, load) if self._uses_kept else None
        if found is not None:
            self.cached += 1
            return found
        made = self._kept.options.compiled(lowered, self._site)
        self._kept.keep(place, made)
        return made

    def reset(self) -> None:
        """Reset the cache to zeros; a failed step may have lost the donated arrays."""
        with self._launching:
            made = self._compiled[EMPTY, 0, 0]()
        caches = len(self._lowering.cache)
        self._cache, self._tables = made[:caches], made[caches:]

    def begin(
        self, slot: int, prompt: Tensor, bias: Mapping[int, float], output: Sequence[int] = ()
    ) -> None:
        """Set a slot's prompt, bias and generated tokens."""
        begun = time.perf_counter_ns()
        counts = np.zeros(self._info.vocab, np.int32)
        np.add.at(counts, np.array(output, np.int32), 1)
        seen = np.zeros(self._info.vocab, np.int8)
        seen[prompt] = 1
        added = np.zeros(self._info.vocab, np.float32)
        for token, value in bias.items():
            added[token] = value
        with self._launching:
            self._tables = self._compiled[BEGIN, 0, 0](
                self._tables, np.int32(slot), [counts, seen, added]
            )
        self.busy_ns += time.perf_counter_ns() - begun

    def prefill(self, window: int, tokens: Tensor, slot: int, start: int, count: int) -> None:
        """Compute a chunk of a prompt, of which `count` tokens are real."""
        begun = time.perf_counter_ns()
        numbers = [np.int32(number) for number in (slot, start, count)]
        with self._launching:
            self._cache = self._compiled[CHUNK, window, 0](
                self._parameters, self._cache, self._windows[window], tokens, *numbers
            )
        self.busy_ns += time.perf_counter_ns() - begun

    def copy(self, window: int, source: int, target: int) -> None:
        """Copy the first `window` rows of one slot to another."""
        begun = time.perf_counter_ns()
        with self._launching:
            self._cache = self._compiled[COPY, window, 0](
                self._cache, np.int32(source), np.int32(target)
            )
        self.busy_ns += time.perf_counter_ns() - begun

    def step(
        self,
        window: int,
        integers: Tensor,
        reals: Tensor,
        mask: Tensor | None = None,
        *,
        slots: Tensor | None = None,
    ) -> Step:
        """Compute and fetch the next token of each active slot.

        `mask` has the allowed tokens as in `sampling.sample`; None allows all. `slots`, INT32, has
        the slot of each row, for a partial step; its length must be one of the step sizes, and
        numbers beyond the last slot are padding. None means all slots in order.
        """
        begun = time.perf_counter_ns()
        given = self._free[len(integers)] if mask is None else mask
        others = [self._windows[window], integers, reals, given]
        with self._launching:
            if slots is None:
                *found, self._cache, self._tables[0] = self._compiled[DECODE, window, 0](
                    self._parameters, self._cache, *self._tables, *others
                )
            else:
                *found, self._cache, self._tables[0] = self._compiled[PARTIAL, window, len(slots)](
                    *(self._parameters, self._cache, self._tables[0], self._tables[1:]),
                    *(slots, others),
                )
        step = Step(*(np.asarray(array) for array in found))
        self.busy_ns += time.perf_counter_ns() - begun
        return step

    def close(self) -> None:
        """Release all arrays and programs."""
        self._cache, self._tables, self._parameters = [], [], []
        self._compiled = {}
