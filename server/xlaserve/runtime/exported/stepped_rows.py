"""Stepped models with a batch dimension: steps of several requests share a batch.

A waiting request's state is one row. While the same requests are stepped together in the same
order, their steps update the rows of the batch in place.
"""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from xlaserve.artifact.sizes import EXECUTABLE_BYTES
from xlaserve.artifact.steps import DONE, FIRST, Steps
from xlaserve.errors import TooManyAnswers
from xlaserve.runtime.devices.sites import Site
from xlaserve.runtime.exported.outputs import DeviceTensor
from xlaserve.runtime.exported.stepped import MAX_STEPS, AroundSteps
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.loaded import Answer, LoadedModel, ModelInfo, Stage, Value
from xlaserve.tensors import Parameter, Tensor, TensorSpec

_PROGRAMS = 2
"""Programs per batch size and replica: one joins rows into a batch, one extracts a row."""


class Sited(LoadedModel, Protocol):
    """A loaded model whose replicas have sites."""

    def site_of(self, replica: int) -> Site:
        """Return a replica's site."""
        ...


class Row:
    """The state of one request to a stepped model, and its answers (an Answers)."""

    def __init__(self, model: "SteppedRows", inputs: Mapping[str, Value], replica: int) -> None:
        self._model = model
        self.replica = replica
        self.inputs = {name: _on_host(value) for name, value in inputs.items()}
        self.steps = 0
        """Number of completed steps."""
        self.state: tuple[jax.Array, ...] = ()
        """The request's state; empty before the first step and while `batch` holds the state."""
        self.batch: _Batch | None = None
        """The batch of the last step, which holds the state."""

    @property
    def has_begun(self) -> bool:
        """Tell whether the first step is complete."""
        return self.steps > 0

    def __iter__(self) -> "Row":
        return self

    def __next__(self) -> Answer:
        (answer,) = self._model.advance([self])
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """Release the state."""
        self._model.leave(self)


class _Batch:
    """Rows of the last step, and the arguments of the next step."""

    def __init__(
        self, rows: Sequence[Row], inputs: Mapping[str, Tensor], states: Sequence[Value]
    ) -> None:
        self.rows = list(rows)
        self.inputs = inputs
        """Input arrays, with one row per row of the bucket."""
        self.states = states


class _Pool:
    """The programs of one replica, which runs one step at a time."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.lock = threading.Lock()
        self.programs: dict[int, tuple[Any, Any]] = {}
        """Batch size -> the programs that join rows and extract a row."""


class SteppedRows(AroundSteps):
    """A loaded stepped model with batched steps (a Stepping)."""

    def __init__(
        self,
        context: LoadContext,
        model: Sited,
        steps: Steps,
        max_steps: int,
        admit: Callable[[int], None] = lambda programs: None,
    ) -> None:
        """`admit` raises OutOfMappings if no further programs may be compiled."""
        super().__init__(context.model, model, steps, max_steps)
        self._admit = admit
        self._options = context.compilation.options
        self._steps = steps
        specs = {spec.name: spec for spec in model.info.inputs}
        self._states = [specs[name] for name in steps.state_names]
        self._row_bytes = sum(_row(spec, 1).nbytes for spec in self._states)
        self._pools = [_Pool(model.site_of(index)) for index in range(model.replicas)]
        self._prepare()

    @property
    def most_together(self) -> int:
        """Return the maximum number of requests per step."""
        return max(1, self._inner.batch_limit)

    def generate(
        self, inputs: Mapping[str, Value], parameters: Mapping[str, Parameter], *, replica: int = 0
    ) -> Row:
        """Return an iterator over a request's answers; `advance` may compute them, too."""
        return Row(self, inputs, replica)

    def execute(
        self, inputs: Mapping[str, Value], *, resident: bool = False, replica: int = 0
    ) -> Mapping[str, Value]:
        """Return the outputs of the first step."""
        row = self.generate(inputs, {}, replica=replica)
        outputs = next(row).outputs
        row.close()
        return outputs

    def expected_seconds(self, rows: int) -> float:
        """Return the warm-up's measurement of a step."""
        return self._inner.expected_seconds(1)

    def compile_rest(
        self,
        check_cancelled: Callable[[], None] = lambda: None,
        on_stage: Callable[[Stage], None] = lambda stage: None,
    ) -> None:
        """Compile and warm the remaining programs. Blocks."""
        super().compile_rest(check_cancelled, on_stage)
        self._prepare()
        # The step model's description is unchanged, but this class added programs.
        self._info = None

    # --- steps ---

    def advance(self, rows: Sequence[Row]) -> Sequence[Answer | Exception]:
        """Take the next step of several requests of one replica in one execution. Blocks.

        Either all of them have begun or none has. A request that exceeds the step limit gets
        TooManyAnswers. Other errors are raised, and apply to all requests.
        """
        going_on = [row for row in rows if row.steps < self._max_steps]
        found = dict(zip(going_on, self._advance(going_on), strict=True)) if going_on else {}
        too_many = TooManyAnswers(self._name, self._max_steps, MAX_STEPS)
        return [found.get(row, too_many) for row in rows]

    def _advance(self, rows: Sequence[Row]) -> list[Answer]:
        pool, replica = self._pools[rows[0].replica], rows[0].replica
        is_first = not rows[0].has_begun
        with pool.lock:
            batch = self._batch(pool, rows)
            size = len(next(iter(batch.inputs.values())))
            tensors: dict[str, Value] = {**batch.inputs, FIRST: np.full(size, is_first)}
            tensors.update(zip(self._steps.state_names, batch.states, strict=True))
            found = self._inner.execute(tensors, resident=True, replica=replica)
            done = _on_host(found[DONE])
            outputs = {spec.name: _on_host(found[spec.name]) for spec in self._outputs}
            batch.states = [found[name] for name in self._steps.state_names]
            for row in rows:
                row.steps += 1
                row.batch, row.state = batch, ()
        # Copy the rows: an unread answer must not keep the whole batch alive.
        return [
            Answer({name: np.array(value[i]) for name, value in outputs.items()}, bool(done[i]))
            for i in range(len(rows))
        ]

    def _batch(self, pool: _Pool, rows: Sequence[Row]) -> _Batch:
        """Return the last step's batch if it has exactly these rows, otherwise a new one."""
        before = rows[0].batch
        if before is not None and before.rows == rows:
            return before
        for row in rows:
            self._split(pool, row.batch)
        size = self._inner.padded_rows(len(rows))
        # Pad by repeating the last row: on other values a loop might never end.
        padded = [*rows, *[rows[-1]] * (size - len(rows))]
        inputs = {
            spec.name: np.stack([row.inputs[spec.name] for row in padded]) for spec in self._inputs
        }
        states: Sequence[Value]
        if not rows[0].has_begun:
            states = [_row(spec, size) for spec in self._states]
        else:
            put_together, _ = self._programs(pool, size)
            arrays = put_together([row.state for row in padded])
            states = [DeviceTensor(array, size, self._name) for array in arrays]
        return _Batch(rows, inputs, states)

    def leave(self, row: Row) -> None:
        """Release the state of a request; other requests of its batch keep theirs."""
        pool = self._pools[row.replica]
        with pool.lock:
            batch, row.batch, row.state = row.batch, None, ()
            self._split(pool, batch)

    def _split(self, pool: _Pool, batch: _Batch | None) -> None:
        """Copy each unfinished request's row out of the batch."""
        if batch is None:
            return
        left = [(index, row) for index, row in enumerate(batch.rows) if row.batch is batch]
        if left:
            arrays = [_on_device(state) for state in batch.states]
            _, take = self._programs(pool, arrays[0].shape[0])
            for index, row in left:
                row.batch, row.state = None, take(arrays, np.int32(index))
        batch.rows, batch.states = [], ()

    # --- programs ---

    def _prepare(self) -> None:
        """Compile the programs that join and extract rows, for every batch size."""
        for bucket in self._inner.info.buckets:
            for pool in self._pools:
                self._programs(pool, max(1, bucket.rows))

    def _programs(self, pool: _Pool, size: int) -> tuple[Any, Any]:
        if size not in pool.programs:
            self._admit(_PROGRAMS)
            pool.programs[size] = self._compiled(pool.site, size)
        return pool.programs[size]

    def _compiled(self, site: Site, size: int) -> tuple[Any, Any]:
        whole, apart = site.inputs(size), site.outputs

        def abstract(shape: Sequence[int], spec: TensorSpec, where: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, spec.datatype.dtype, sharding=where)

        def put_together(rows: list[tuple[jax.Array, ...]]) -> list[jax.Array]:
            return [jnp.stack(parts) for parts in zip(*rows, strict=True)]

        # One row per call: a program that returns all 32 rows takes a second to compile.
        def take(batch: list[jax.Array], index: jax.Array) -> tuple[jax.Array, ...]:
            return tuple(
                jax.lax.dynamic_index_in_dim(state, index, keepdims=False) for state in batch
            )

        row = tuple(abstract(spec.shape[1:], spec, apart) for spec in self._states)
        index = jax.ShapeDtypeStruct((), np.int32, sharding=apart)
        batch = [abstract((size, *spec.shape[1:]), spec, whole) for spec in self._states]
        lowered = (
            jax.jit(put_together, out_shardings=whole).lower([row] * size),
            jax.jit(take, out_shardings=apart).lower(batch, index),
        )
        joined, taken = (self._options.compiled(each, site) for each in lowered)
        return joined, taken

    def _known(self, info: ModelInfo) -> ModelInfo:
        memory, held = info.memory, dict(info.memory.per_device)
        programs = 0
        for pool in self._pools:
            added = len(pool.programs) * _PROGRAMS * EXECUTABLE_BYTES
            for name in pool.site.device_names:
                programs += added
                held[name] = held.get(name, 0) + added
        memory = replace(
            memory,
            executables_bytes=memory.executables_bytes + programs,
            per_device=MappingProxyType(held) if memory.per_device else memory.per_device,
        )
        return replace(
            info,
            inputs=self._inputs,
            outputs=self._outputs,
            max_batch_size=0,
            memory=memory,
            is_decoupled=True,
            # The request's own row, and its row in a batch.
            state_bytes=2 * self._row_bytes,
        )


def _row(spec: TensorSpec, size: int) -> Tensor:
    """Return the state of a padding row; the artifact ignores it."""
    return np.zeros((size, *spec.shape[1:]), spec.datatype.dtype)


def _on_host(value: Value) -> Tensor:
    return value if isinstance(value, np.ndarray) else value.numpy()


def _on_device(value: Value) -> jax.Array:
    assert isinstance(value, DeviceTensor)
    return value.array
