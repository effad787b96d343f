"""Lowering of a generator's programs; the target devices may be absent."""

# Some jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import Exported

from xlaserve.artifact.generator_record import CHUNK, DECODE, LENGTH, Record
from xlaserve.artifact.sizes import EXECUTABLE_BYTES
from xlaserve.errors import InvalidModel
from xlaserve.generation.in_place import Memory, check_aliasing, check_partial
from xlaserve.generation.partial_step import PartialStep
from xlaserve.generation.sampling import INTEGERS, REALS
from xlaserve.generation.step import Step
from xlaserve.runtime.devices.sites import Site
from xlaserve.runtime.generator.configured import cache_name
from xlaserve.runtime.generator.info import GenerationInfo, mask_words
from xlaserve.runtime.loaded import ModelMemory
from xlaserve.runtime.programs.kept_programs import KeptPrograms, ProgramKey

EMPTY = "the state without requests"
BEGIN = "the begin of a request"
COPY = "the copy of rows"
PARTIAL = "a step of fewer rows"
"""Programs created at load time, in addition to DECODE and CHUNK."""

RESULTS = len(Step._fields)
"""Number of a step's results, not counting the cache."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A program to be compiled, with the shapes of its arguments."""

    name: str
    function: Any
    """The jitted function."""
    arguments: tuple[Any, ...]
    window: int = 0
    """Number of visible positions; 0 if the program has no window."""
    size: int = 0
    """Rows of a PARTIAL step; 0 for other programs."""
    logits_bytes: int | None = None
    gathered_bytes: int = 0
    """Cache bytes gathered by a PARTIAL step."""

    @property
    def kept_bytes(self) -> int:
        """Return the bytes of arguments that stay on the device: parameters and state."""
        placed = (one for one in jax.tree.leaves(self.arguments) if one.sharding is not None)
        return sum(map(bytes_of, placed))

    @property
    def is_optional(self) -> bool:
        """Tell whether the model works without this program; only PARTIAL is optional."""
        return self.name == PARTIAL

    def lowered(self) -> jax.stages.Lowered:
        """Lower the program for XLA."""
        lowered: jax.stages.Lowered = self.function.lower(*self.arguments)
        return lowered

    def place(self, kept: KeptPrograms, site: Site, lowered: jax.stages.Lowered) -> ProgramKey:
        """Return the compilation cache key of the lowered program on a site."""
        # Hash the lowered text, because the exported program does not include donation.
        computation = sha256(lowered.as_text().encode()).hexdigest()
        return kept.described(site, computation, "", jax.tree.leaves(self.arguments), None)

    def check(self, memory: Memory, cache_bytes: int) -> None:
        """Raise InvalidModel if the program must update the cache in place but does not."""
        if self.name == PARTIAL:
            check_partial(memory, cache_bytes, self.gathered_bytes, self.logits_bytes or 0)
        elif self.window:
            check_aliasing(self.name, memory, cache_bytes, self.logits_bytes)


class Lowering:
    """The shapes of a generator's arrays on its devices, and its programs to compile."""

    def __init__(
        self,
        record: Record,
        info: GenerationInfo,
        exported: tuple[Exported, Exported],
        parameters: Sequence[Any],
        site: Site,
    ) -> None:
        """`parameters` are arrays or shapes; only their shapes are stored."""
        self._info = info
        self._exported = exported
        self._parameters = [
            jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=one.sharding) for one in parameters
        ]
        self._site = site
        self._is_split = site.launching is not None
        self._place = site.outputs
        self._places = [site.parameter(cache_name(index)) for index in range(len(record.cache))]
        self.cache = [
            jax.ShapeDtypeStruct(a.sized(info.slots, info.max_length), a.dtype, sharding=place)
            for a, place in zip(record.cache, self._places, strict=True)
        ]
        rows = (info.slots, info.vocab)
        self.tables = [
            jax.ShapeDtypeStruct(rows, dtype, sharding=self._place)
            for dtype in ("int32", "int8", "float32")
        ]
        """Token counts, prompts and biases of all slots."""
        words = jax.ShapeDtypeStruct(
            (info.slots, mask_words(info.vocab)), np.int32, sharding=self._place
        )
        self.cache_bytes = sum(map(bytes_of, self.cache))
        self.state_bytes = self.cache_bytes + sum(map(bytes_of, (*self.tables, words)))
        self._axes = tuple(
            a.shape.index(LENGTH) if LENGTH in a.shape else None for a in record.cache
        )
        """Axis of the positions in each cache array, or None."""

    @property
    def count(self) -> int:
        """Return the number of programs."""
        of_window = 2 + self._info.keeps_prefixes + len(self._info.step_sizes)
        return of_window * len(self._info.windows) + 2

    def memory(self, temporary_bytes: int, host: int) -> ModelMemory:
        """Return the memory of the generator, given the largest program's temporaries.

        `host` is additional memory, counted on the first device.
        """
        parts = (
            sum(map(bytes_of, self._parameters)),
            temporary_bytes,
            self.count * EXECUTABLE_BYTES,
            self.state_bytes,
        )
        names = list(self._site.device_names)
        per_device = dict.fromkeys(names, sum(parts)) if len(names) > 1 else {}
        if per_device:
            per_device[names[0]] += host
        parameters, temporaries, executables, states = (len(names) * part for part in parts)
        return ModelMemory(
            parameters_bytes=parameters,
            temporaries_bytes=temporaries,
            executables_bytes=executables + host,
            states_bytes=states,
            per_device=per_device,
        )

    @property
    def why_whole(self) -> str:
        """Return why partitioning prevents partial steps, or an empty string if it does not."""
        for place, axis in zip(self._places, self._axes, strict=True):
            spec = getattr(place, "spec", ())
            if any(part is not None for at, part in enumerate(spec) if at in (0, axis)):
                return "the cache is sharded along its slots or positions"
        return ""

    def programs(self) -> Iterator[Wanted]:
        """Yield all programs, grouped by window, including partial steps."""
        info = self._info
        states = [*self.cache, *self.tables]
        places = [state.sharding for state in states]
        yield Wanted(EMPTY, jax.jit(partial(_zeros, states), out_shardings=places), ())
        row = [jax.ShapeDtypeStruct(s.shape[1:], s.dtype) for s in self.tables]
        one = jax.ShapeDtypeStruct((), np.int32)
        yield Wanted(BEGIN, self._jitted(_begin, (0,), self._place), (self.tables, one, row))
        decode, chunk = self._exported
        tokens = jax.ShapeDtypeStruct((info.chunk,), np.int32)
        found = (self._place,) * RESULTS
        # Calling an exported program does not preserve donation, so it is specified again.
        steps = self._jitted(decode.call, (1, 2), (*found, self._places, self._place))
        chunks = self._jitted(chunk.call, (1,), self._places)
        logits = 4 * info.slots * info.vocab
        for window in info.windows:
            seen = jax.ShapeDtypeStruct((window,), np.int8)
            held = (self._parameters, self.cache)
            whole = (*held, *self.tables, *self._step_arguments(seen, info.slots))
            yield Wanted(DECODE, steps, whole, window, logits_bytes=logits)
            yield Wanted(CHUNK, chunks, (*held, seen, tokens, one, one, one), window)
            if info.keeps_prefixes:
                # Independent of the model's functions: only the axes matter.
                copying = self._jitted(partial(_copy, self._axes, window), (0,), self._places)
                yield Wanted(COPY, copying, (self.cache, one, one), window)
            for size in () if self.why_whole else info.step_sizes:
                yield self._partial(size, window)

    def _step_arguments(self, seen: Any, rows: int) -> list[Any]:
        """Return the argument shapes of a step, without parameters and state."""
        return [
            seen,
            jax.ShapeDtypeStruct((rows, len(INTEGERS)), np.int32),
            jax.ShapeDtypeStruct((rows, len(REALS)), np.float32),
            jax.ShapeDtypeStruct((rows, mask_words(self._info.vocab)), np.int32),
        ]

    def _partial(self, size: int, window: int) -> Wanted:
        info = self._info
        step = PartialStep(
            self._exported[0].call, self._axes, window, keeps_rows=info.keeps_prefixes
        )
        found = (self._place,) * RESULTS
        counts, *tables = self.tables
        slots = jax.ShapeDtypeStruct((size,), np.int32)
        others = self._step_arguments(jax.ShapeDtypeStruct((window,), np.int8), size)
        of_window = [1.0 if axis is None else window / info.max_length for axis in self._axes]
        gathered = sum(
            int(bytes_of(shape) * size / info.slots * part)
            for shape, part in zip(self.cache, of_window, strict=True)
        )
        return Wanted(
            PARTIAL,
            self._jitted(step, (1, 2), (*found, self._places, self._place)),
            (self._parameters, self.cache, counts, tables, slots, others),
            window,
            size,
            4 * size * info.vocab,
            gathered,
        )

    def _jitted(self, function: Any, donated: tuple[int, ...], places: Any) -> Any:
        """Jit a function with donated arguments, whose results keep their placement."""
        if not self._is_split:
            return jax.jit(function, donate_argnums=donated)
        return jax.jit(function, donate_argnums=donated, out_shardings=places)


def why_not(wanted: Wanted, memory: Memory, cache_bytes: int) -> str:
    """Return why an optional program cannot be used, or an empty string.

    Raises InvalidModel if a required program copies the cache.
    """
    try:
        wanted.check(memory, cache_bytes)
    except InvalidModel as error:
        if not wanted.is_optional:
            raise
        # XLA decided to copy, which the author cannot change.
        return str(error)
    return ""


def _zeros(shapes: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
    return [jnp.zeros(shape.shape, shape.dtype) for shape in shapes]


def _copy(
    axes: Sequence[int | None],
    window: int,
    cache: list[jax.Array],
    source: jax.Array,
    target: jax.Array,
) -> list[jax.Array]:
    """Copy the first `window` rows between slots; in place if the cache is donated."""

    def copied(array: jax.Array, axis: int | None) -> jax.Array:
        sizes = [window if at == axis else size for at, size in enumerate(array.shape)]
        zeros = [jnp.int32(0)] * (array.ndim - 1)
        rows = jax.lax.dynamic_slice(array, [source, *zeros], [1, *sizes[1:]])
        return jax.lax.dynamic_update_slice(array, rows, [target, *zeros])

    return [copied(array, axis) for array, axis in zip(cache, axes, strict=True)]


def _begin(tables: list[jax.Array], slot: jax.Array, rows: Sequence[jax.Array]) -> list[jax.Array]:
    """Set the counts, prompt and bias of one slot."""
    return [table.at[slot].set(row) for table, row in zip(tables, rows, strict=True)]


def bytes_of(shape: Any) -> int:
    """Return the bytes per device of an array."""
    return int(np.prod(shape.sharding.shard_shape(shape.shape))) * int(shape.dtype.itemsize)
