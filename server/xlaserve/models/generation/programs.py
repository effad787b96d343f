"""The compiled programs of a generator, and the arrays on the device that they change in place."""

# Much of jax is typed, but not all that is called here.
# mypy: disallow-untyped-calls=False

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from hashlib import sha256
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.errors import JaxRuntimeError
from jax.export import Exported

from xlaserve.errors import InvalidModel
from xlaserve.models import serialized
from xlaserve.models.generation.configured import cache_name
from xlaserve.models.generation.in_place import Memory, check_aliasing, check_partial
from xlaserve.models.generation.info import GenerationInfo, mask_words
from xlaserve.models.generation.partial_step import PartialStep
from xlaserve.models.generation.record import CHUNK, DECODE, LENGTH, Record
from xlaserve.models.generation.sampling import INTEGERS, REALS
from xlaserve.models.kept_programs import KeptPrograms, first_line
from xlaserve.models.sites import Site
from xlaserve.tensors import Tensor

COPY = "the copy of rows"
"""The name of that program, which is in no file."""


class Step(NamedTuple):
    """The tokens that one step gave, on the host: a row for each slot, or for each it was of."""

    tokens: Tensor
    logprobs: Tensor
    top_tokens: Tensor
    top_logprobs: Tensor


class Programs:
    """The state of all slots, on one device or split over several. One thread calls it."""

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
        """Programs that came out of the compilation cache."""
        self._uses_kept = True
        self._info = info
        self._parameters = list(parameters)
        self._place = site.outputs
        self._places = [site.parameter(cache_name(index)) for index in range(len(record.cache))]
        self._launching = site.launching or nullcontext()
        self._is_split = site.launching is not None
        self._exported = exported
        self._shapes = [
            jax.ShapeDtypeStruct(a.sized(info.slots, info.max_length), a.dtype, sharding=place)
            for a, place in zip(record.cache, self._places, strict=True)
        ]
        rows = (info.slots, info.vocab)
        self._rows = [
            jax.ShapeDtypeStruct(rows, dtype, sharding=self._place)
            for dtype in ("int32", "int8", "float32")
        ]
        words = jax.ShapeDtypeStruct(
            (info.slots, mask_words(info.vocab)), np.int32, sharding=self._place
        )
        self.cache_bytes = sum(bytes_of(shape) for shape in self._shapes)
        self.state_bytes = self.cache_bytes + sum(map(bytes_of, (*self._rows, words)))
        self.temporary_bytes = 0
        """The most that one of the programs takes."""
        self.busy_ns = 0
        """Time in calls of programs, from the dispatch until what they give was fetched."""
        self._decode: dict[int, Any] = {}
        self._chunk: dict[int, Any] = {}
        self._windows = {w: np.zeros(w, np.int8) for w in info.windows}
        self._copy: dict[int, Any] = {}
        self._axes = tuple(
            a.shape.index(LENGTH) if LENGTH in a.shape else None for a in record.cache
        )
        """The positions among the axes of each array of the cache; None for one without."""
        self._partial: dict[tuple[int, int], Any] = {}
        """Steps of fewer rows than slots, by the rows and the window."""
        self.why_whole = self._why_whole()
        """Why there is no step of fewer rows, where that was found out; empty otherwise."""
        self._begin: Any = None
        self._empty: Any = None
        # Nothing that JAX would compile for itself: a program out of the cache compiles nothing.
        self._free = {
            rows: jax.device_put(np.full((rows, words.shape[1]), -1, words.dtype), self._place)
            for rows in (*info.step_sizes, info.slots)
        }
        """The mask of a step in which every slot may be given any token, by its rows."""
        self._cache: list[jax.Array] = []
        self._tables: list[jax.Array] = []

    @property
    def count(self) -> int:
        """Return how many programs are compiled for a generator, with `begin` and `reset`."""
        of_window = 2 + self._info.keeps_prefixes + len(self._info.step_sizes)
        return of_window * len(self._info.windows) + 2

    def compile(self, before_each: Callable[[], None]) -> None:
        """Compile every program, or have it from the cache, and execute each once.

        Where one out of the cache fails, all are compiled anew. Raises InvalidModel.
        """
        try:
            self._compile(before_each)
        except (InvalidModel, JaxRuntimeError, TypeError, ValueError) as error:
            if not self.cached:
                raise
            self._kept.drop(f"one of them failed: {first_line(error)}")
            self._uses_kept, self.cached = False, 0
            self._compile(before_each)
        self._kept.log_dropped()

    def _compile(self, before_each: Callable[[], None]) -> None:
        info = self._info
        states = [*self._shapes, *self._rows]
        before_each()
        self._empty = self._made(
            jax.jit(partial(_zeros, states), out_shardings=[s.sharding for s in states]), ()
        )
        before_each()
        row = [jax.ShapeDtypeStruct(s.shape[1:], s.dtype) for s in self._rows]
        slot = jax.ShapeDtypeStruct((), np.int32)
        beginning = self._jitted(_begin, (0,), self._place)
        self._begin = self._made(beginning, (self._rows, slot, row))
        self.reset()
        integers = jax.ShapeDtypeStruct((info.slots, len(INTEGERS)), np.int32)
        reals = jax.ShapeDtypeStruct((info.slots, len(REALS)), np.float32)
        mask = jax.ShapeDtypeStruct(self._free[info.slots].shape, np.int32)
        one = jax.ShapeDtypeStruct((), np.int32)
        tokens = jax.ShapeDtypeStruct((info.chunk,), np.int32)
        decode, chunk = self._exported
        # Donation is no part of what an artifact says when it is called: it is stated again.
        found = (self._place,) * len(Step._fields)
        jitted = (
            self._jitted(decode.call, (1, 2), (*found, self._places, self._place)),
            self._jitted(chunk.call, (1,), self._places),
        )
        logits = 4 * info.slots * info.vocab
        for window in info.windows:
            seen = jax.ShapeDtypeStruct((window,), np.int8)
            before_each()
            self._decode[window] = self._compiled(
                DECODE, jitted[0], logits, (*self._rows, seen, integers, reals, mask)
            )
            before_each()
            of_chunk = (seen, tokens, one, one, one)
            self._chunk[window] = self._compiled(CHUNK, jitted[1], None, of_chunk)
            if info.keeps_prefixes:
                before_each()
                # No function of the model is in it: where slots and positions are is all it needs.
                copying = self._jitted(partial(_copy, self._axes, window), (0,), self._places)
                made = self._made(copying, (self._shapes, one, one))
                self._copy[window] = self._checked(COPY, made, None)
            for size in info.step_sizes:
                before_each()
                self._compile_partial(size, window)
        self.begin(0, np.zeros(0, np.int32), {})
        idle = np.zeros((info.slots, len(INTEGERS)), np.int32)
        for window in info.windows:
            self.prefill(window, np.zeros(info.chunk, np.int32), 0, 0, 1)
            ones = np.ones((info.slots, len(REALS)), np.float32)
            self.step(window, idle, ones)
            for size in () if self.why_whole else info.step_sizes:
                padding = np.full(size, info.slots, np.int32)
                self.step(window, idle[:size], ones[:size], slots=padding)
            if info.keeps_prefixes:
                self.copy(window, 0, info.slots - 1)
        self.reset()

    def _why_whole(self) -> str:
        """Return why steps of fewer rows cannot be, where the rules of partition say so."""
        for place, axis in zip(self._places, self._axes, strict=True):
            spec = getattr(place, "spec", ())
            if any(part is not None for at, part in enumerate(spec) if at in (0, axis)):
                return "the cache is split along its slots or its positions"
        return ""

    def _compile_partial(self, size: int, window: int) -> None:
        """Compile a step of fewer rows, unless it turns out that there are none."""
        if self.why_whole:
            return
        partial_step = PartialStep(
            self._exported[0].call, self._axes, window, keeps_rows=self._info.keeps_prefixes
        )
        found = (self._place,) * len(Step._fields)
        jitted = self._jitted(partial_step, (1, 2), (*found, self._places, self._place))
        slots = jax.ShapeDtypeStruct((size,), np.int32)
        others = [
            jax.ShapeDtypeStruct((window,), np.int8),
            jax.ShapeDtypeStruct((size, len(INTEGERS)), np.int32),
            jax.ShapeDtypeStruct((size, len(REALS)), np.float32),
            jax.ShapeDtypeStruct(self._free[size].shape, np.int32),
        ]
        counts, *tables = self._rows
        made = self._made(jitted, (self._parameters, self._shapes, counts, tables, slots, others))
        memory = Memory.of(made)
        of_window = [1.0 if axis is None else window / self._info.max_length for axis in self._axes]
        gathered = sum(
            int(bytes_of(shape) * size / self._info.slots * part)
            for shape, part in zip(self._shapes, of_window, strict=True)
        )
        try:
            check_partial(memory, self.cache_bytes, gathered, 4 * size * self._info.vocab)
        except InvalidModel as error:
            # The model can do without: XLA chose to copy here, and the author has no say in it.
            self.drop_partial(str(error))
            return
        self.temporary_bytes = max(self.temporary_bytes, memory.temporaries)
        self._partial[size, window] = made

    def drop_partial(self, why: str) -> None:
        """Have no step of fewer rows than slots."""
        self._partial, self.why_whole = {}, why

    def _jitted(self, function: Any, donated: tuple[int, ...], places: Any) -> Any:
        """Return a function whose results are where its donated arguments are."""
        if not self._is_split:
            return jax.jit(function, donate_argnums=donated)
        return jax.jit(function, donate_argnums=donated, out_shardings=places)

    def _compiled(
        self, name: str, jitted: Any, logits: int | None, arguments: tuple[Any, ...]
    ) -> Any:
        made = self._made(jitted, (self._parameters, self._shapes, *arguments))
        return self._checked(name, made, logits)

    def _made(self, jitted: Any, arguments: tuple[Any, ...]) -> Any:
        """Return a program for arguments, out of the cache if it is there."""
        lowered = jitted.lower(*arguments)
        # All that it follows from: donation is no part of what was exported.
        computation = sha256(lowered.as_text().encode()).hexdigest()
        flat = jax.tree.leaves(arguments)
        place = self._kept.described(self._site, computation, "", flat, None)

        def load(data: bytes) -> jax.stages.Compiled:
            return serialized.loaded(data, lowered.in_tree, lowered.out_tree, self._site.devices)

        found = self._kept.find(place, load) if self._uses_kept else None
        if found is not None:
            self.cached += 1
            return found
        made = self._kept.options.compiled(lowered, self._site)
        self._kept.keep(place, made)
        return made

    def _checked(self, name: str, made: Any, logits: int | None) -> Any:
        """Return a program that changes the cache in place."""
        memory = Memory.of(made)
        check_aliasing(name, memory, self.cache_bytes, logits)
        self.temporary_bytes = max(self.temporary_bytes, memory.temporaries)
        return made

    def reset(self) -> None:
        """Begin with a cache of zeros: that of before may be gone with a step that failed."""
        with self._launching:
            made = self._empty()
        self._cache, self._tables = made[: len(self._shapes)], made[len(self._shapes) :]

    def begin(
        self, slot: int, prompt: Tensor, bias: Mapping[int, float], output: Sequence[int] = ()
    ) -> None:
        """Have a slot go on with the prompt and bias of a request, and the tokens it was given."""
        begun = time.perf_counter_ns()
        counts = np.zeros(self._info.vocab, np.int32)
        np.add.at(counts, np.array(output, np.int32), 1)
        seen = np.zeros(self._info.vocab, np.int8)
        seen[prompt] = 1
        added = np.zeros(self._info.vocab, np.float32)
        for token, value in bias.items():
            added[token] = value
        with self._launching:
            self._tables = self._begin(self._tables, np.int32(slot), [counts, seen, added])
        self.busy_ns += time.perf_counter_ns() - begun

    def prefill(self, window: int, tokens: Tensor, slot: int, start: int, count: int) -> None:
        """Write the rows of a chunk of a prompt, of which `count` tokens are real."""
        begun = time.perf_counter_ns()
        numbers = [np.int32(number) for number in (slot, start, count)]
        with self._launching:
            self._cache = self._chunk[window](
                self._parameters, self._cache, self._windows[window], tokens, *numbers
            )
        self.busy_ns += time.perf_counter_ns() - begun

    def copy(self, window: int, source: int, target: int) -> None:
        """Write the first rows of a slot, as many as the window has, over those of another one."""
        begun = time.perf_counter_ns()
        with self._launching:
            self._cache = self._copy[window](self._cache, np.int32(source), np.int32(target))
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
        """Compute the next token of each active slot, and fetch them.

        `mask` says which tokens each slot may be given, as `sampling.sample` describes it; None for
        any. `slots` are those that the rows are of, INT32, as many as one of the step sizes has; a
        number that no slot has is padding. None for all slots, in order.
        """
        begun = time.perf_counter_ns()
        given = self._free[len(integers)] if mask is None else mask
        others = [self._windows[window], integers, reals, given]
        with self._launching:
            if slots is None:
                *found, self._cache, self._tables[0] = self._decode[window](
                    self._parameters, self._cache, *self._tables, *others
                )
            else:
                *found, self._cache, self._tables[0] = self._partial[len(slots), window](
                    *(self._parameters, self._cache, self._tables[0], self._tables[1:]),
                    *(slots, others),
                )
        step = Step(*(np.asarray(array) for array in found))
        self.busy_ns += time.perf_counter_ns() - begun
        return step

    def close(self) -> None:
        """Drop all arrays and programs."""
        self._cache, self._tables, self._parameters = [], [], []
        self._decode, self._chunk, self._copy, self._partial = {}, {}, {}, {}
        self._begin = self._empty = None


def _zeros(shapes: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
    """Return arrays of zeros."""
    return [jnp.zeros(shape.shape, shape.dtype) for shape in shapes]


def _copy(
    axes: Sequence[int | None],
    window: int,
    cache: list[jax.Array],
    source: jax.Array,
    target: jax.Array,
) -> list[jax.Array]:
    """Return the cache with the first rows of one slot in another, in place where it is donated."""

    def copied(array: jax.Array, axis: int | None) -> jax.Array:
        sizes = [window if at == axis else size for at, size in enumerate(array.shape)]
        zeros = [jnp.int32(0)] * (array.ndim - 1)
        rows = jax.lax.dynamic_slice(array, [source, *zeros], [1, *sizes[1:]])
        return jax.lax.dynamic_update_slice(array, rows, [target, *zeros])

    return [copied(array, axis) for array, axis in zip(cache, axes, strict=True)]


def _begin(tables: list[jax.Array], slot: jax.Array, rows: Sequence[jax.Array]) -> list[jax.Array]:
    """Return the counts, prompts and biases of all slots with those of one request."""
    return [table.at[slot].set(row) for table, row in zip(tables, rows, strict=True)]


def bytes_of(shape: Any) -> int:
    """Return the bytes of an array on each of its devices."""
    return int(np.prod(shape.sharding.shard_shape(shape.shape))) * int(shape.dtype.itemsize)
