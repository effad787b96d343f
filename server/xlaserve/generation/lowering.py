"""Programs of a generator for XLA. The devices may be absent."""

# Much of jax is typed, but not all that is called here.
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
from xlaserve.runtime.programs.kept_programs import KeptPrograms, Place

EMPTY = "the state without requests"
BEGIN = "the begin of a request"
COPY = "the copy of rows"
PARTIAL = "a step of fewer rows"
"""Names of programs derived at a load, besides DECODE and CHUNK."""

RESULTS = len(Step._fields)
"""Results of a step besides the cache."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """One program of a generator, with its shapes."""

    name: str
    function: Any
    """Jitted."""
    arguments: tuple[Any, ...]
    window: int = 0
    """Its visible positions; 0 for none."""
    size: int = 0
    """The rows of a PARTIAL step; else 0."""
    logits_bytes: int | None = None
    gathered_bytes: int = 0
    """Bytes of the cache that a PARTIAL step gathers."""

    @property
    def kept_bytes(self) -> int:
        """Return the bytes among the arguments that stay on the device: parameters and state."""
        placed = (one for one in jax.tree.leaves(self.arguments) if one.sharding is not None)
        return sum(map(bytes_of, placed))

    @property
    def is_optional(self) -> bool:
        """Tell whether the model can do without: steps of fewer rows."""
        return self.name == PARTIAL

    def lowered(self) -> jax.stages.Lowered:
        """Return it as XLA takes it."""
        lowered: jax.stages.Lowered = self.function.lower(*self.arguments)
        return lowered

    def place(self, kept: KeptPrograms, site: Site, lowered: jax.stages.Lowered) -> Place:
        """Return its key in the cache, lowered for a site."""
        # All that it follows from: donation is no part of what was exported.
        computation = sha256(lowered.as_text().encode()).hexdigest()
        return kept.described(site, computation, "", jax.tree.leaves(self.arguments), None)

    def check(self, memory: Memory, cache_bytes: int) -> None:
        """Raise InvalidModel if it must change the cache in place, and does not."""
        if self.name == PARTIAL:
            check_partial(memory, cache_bytes, self.gathered_bytes, self.logits_bytes or 0)
        elif self.window:
            check_aliasing(self.name, memory, cache_bytes, self.logits_bytes)


class Lowering:
    """The arrays of a generator on its devices, and the compiler of its programs."""

    def __init__(
        self,
        record: Record,
        info: GenerationInfo,
        exported: tuple[Exported, Exported],
        parameters: Sequence[Any],
        site: Site,
    ) -> None:
        """`parameters` are arrays, which are not kept, or shapes."""
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
        """Counts, prompts and biases of the tokens of each slot."""
        words = jax.ShapeDtypeStruct(
            (info.slots, mask_words(info.vocab)), np.int32, sharding=self._place
        )
        self.cache_bytes = sum(map(bytes_of, self.cache))
        self.state_bytes = self.cache_bytes + sum(map(bytes_of, (*self.tables, words)))
        self._axes = tuple(
            a.shape.index(LENGTH) if LENGTH in a.shape else None for a in record.cache
        )
        """The positions among the axes of each array of the cache; None for one without."""

    @property
    def count(self) -> int:
        """Return the number of programs."""
        of_window = 2 + self._info.keeps_prefixes + len(self._info.step_sizes)
        return of_window * len(self._info.windows) + 2

    def memory(self, temporary_bytes: int, host: int) -> ModelMemory:
        """Return what the generator holds, of whose programs one takes so many temporaries.

        `host` are bytes beside its device, or the first of them.
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
        """Return why steps of fewer rows cannot be, where the rules of partition say so."""
        for place, axis in zip(self._places, self._axes, strict=True):
            spec = getattr(place, "spec", ())
            if any(part is not None for at, part in enumerate(spec) if at in (0, axis)):
                return "the cache is sharded along its slots or positions"
        return ""

    def programs(self) -> Iterator[Wanted]:
        """Yield every program, those of a window together; steps of fewer rows among them."""
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
        # Donation is no part of what an artifact says when it is called: it is stated again.
        steps = self._jitted(decode.call, (1, 2), (*found, self._places, self._place))
        chunks = self._jitted(chunk.call, (1,), self._places)
        logits = 4 * info.slots * info.vocab
        for window in info.windows:
            seen = jax.ShapeDtypeStruct((window,), np.int8)
            held = (self._parameters, self.cache)
            whole = (*held, *self.tables, *self._asked(seen, info.slots))
            yield Wanted(DECODE, steps, whole, window, logits_bytes=logits)
            yield Wanted(CHUNK, chunks, (*held, seen, tokens, one, one, one), window)
            if info.keeps_prefixes:
                # No function of the model is in it: where slots and positions are is all it needs.
                copying = self._jitted(partial(_copy, self._axes, window), (0,), self._places)
                yield Wanted(COPY, copying, (self.cache, one, one), window)
            for size in () if self.why_whole else info.step_sizes:
                yield self._partial(size, window)

    def _asked(self, seen: Any, rows: int) -> list[Any]:
        """Return the arguments of a step besides the state."""
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
        others = self._asked(jax.ShapeDtypeStruct((window,), np.int8), size)
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
        """Return a function whose results are where its donated arguments are."""
        if not self._is_split:
            return jax.jit(function, donate_argnums=donated)
        return jax.jit(function, donate_argnums=donated, out_shardings=places)


def why_not(wanted: Wanted, memory: Memory, cache_bytes: int) -> str:
    """Return why the model does without a program; empty where it does not.

    Raises InvalidModel for one that the model needs and that copies the cache.
    """
    try:
        wanted.check(memory, cache_bytes)
    except InvalidModel as error:
        if not wanted.is_optional:
            raise
        # XLA chose to copy here, and the author has no say in it.
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
    """Return the cache with a prefix copied between slots, in place if donated."""

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
    """Return the bytes of an array per device."""
    return int(np.prod(shape.sharding.shard_shape(shape.shape))) * int(shape.dtype.itemsize)
