"""Programs compiled on demand for new request shapes, limited in number."""

import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, cast

from xlaserve.artifact.shapes import OpenDimensions, Sizes
from xlaserve.model_config.buckets import FIXED
from xlaserve.runtime.loaded import Dispatching, InFlight, Value
from xlaserve.runtime.programs.program_table import Program
from xlaserve.tensors import TensorSpec

Wanted: TypeAlias = tuple[int, Sizes]
"""The bucket and the sizes of dynamic dimensions to compile for."""


class _Model(Protocol):
    """The model that owns the programs."""

    def rows(self, values: Sequence[Value]) -> int | None: ...

    def execute(
        self,
        inputs: Mapping[str, Value],
        *,
        resident: bool,
        replica: int,
        programs: Sequence[Program] | None,
    ) -> Mapping[str, Value]: ...

    @property
    def dispatching(self) -> Dispatching | None: ...

    @property
    def queues(self) -> Sequence[str]: ...

    def dispatch(
        self,
        inputs: Mapping[str, Value],
        *,
        resident: bool,
        replica: int,
        programs: Sequence[Program] | None,
    ) -> InFlight: ...


class _Stock(Protocol):
    """The compiled programs of that model."""

    def compile_one(self, bucket: int, sizes: Sizes) -> tuple[Program, ...]: ...

    def keep(self, programs: Sequence[tuple[Program, ...]]) -> None: ...


@dataclass(frozen=True, slots=True)
class Shaped:
    """A model compiled for one shape (an Executable). Any number of threads may execute it."""

    model: _Model
    programs: tuple[Program, ...]
    """One program per copy of the model."""

    def execute(
        self, inputs: Mapping[str, Value], *, resident: bool = False, replica: int = 0
    ) -> Mapping[str, Value]:
        """Execute on inputs of this shape. Raises OutOfMemory."""
        return self.model.execute(
            inputs, resident=resident, replica=replica, programs=self.programs
        )

    @property
    def dispatching(self) -> "Shaped | None":
        """Return this object on accelerators, otherwise None."""
        return None if self.model.dispatching is None else self

    @property
    def queues(self) -> Sequence[str]:
        """Return the dispatch queues of the model's replicas."""
        return self.model.queues

    def dispatch(
        self, inputs: Mapping[str, Value], *, resident: bool = False, replica: int = 0
    ) -> InFlight:
        """Start an execution without waiting for it. Raises OutOfMemory."""
        return self.model.dispatch(
            inputs, resident=resident, replica=replica, programs=self.programs
        )


class OnDemandShapes:
    """Shapes compiled on demand (an OnDemand)."""

    def __init__(
        self,
        name: str,
        model: _Model,
        stock: _Stock,
        inputs: Sequence[TensorSpec],
        *,
        buckets: Sequence[int],
        dimensions: OpenDimensions,
        limit: int,
    ) -> None:
        self._name = name
        self._model = model
        self._stock = stock
        self._inputs = inputs
        self._buckets = buckets
        self._dimensions = dimensions
        self._limit = limit
        self._kept: OrderedDict[Wanted, Shaped] = OrderedDict()
        """Compiled programs, least recently used first."""
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        """Held during a compilation, so that only one runs at a time. Look-ups do not wait for
        it."""

    def shape_of(self, inputs: Mapping[str, Value]) -> Wanted | None:
        """Return the shape to compile for these inputs, or None if it was compiled at load."""
        values = [inputs[spec.name] for spec in self._inputs]
        shapes = [value.shape for value in values]
        sizes = self._dimensions.asked(self._name, self._inputs, shapes)
        if sizes in self._dimensions.combinations:
            return None
        rows = self._model.rows(values)
        if rows is None:
            return FIXED, sizes
        return self._buckets[bisect_left(self._buckets, rows)], sizes

    def find(self, shape: Hashable) -> Shaped | None:
        """Return a compiled program and mark it as recently used, or None."""
        wanted = cast(Wanted, shape)
        with self._lock:
            found = self._kept.get(wanted)
            if found is not None:
                self._kept.move_to_end(wanted)
            return found

    def compile(self, shape: Hashable) -> Shaped:
        """Compile a shape; evicts the least recently used beyond the limit.

        Raises like OnDemand.
        """
        wanted = cast(Wanted, shape)
        with self._turn:
            # Another request may have compiled it while this one waited for the lock.
            if (found := self.find(wanted)) is not None:
                return found
            made = Shaped(self._model, self._stock.compile_one(*wanted))
            self._stock.keep(self._programs_with(wanted, made))
        return made

    def _programs_with(self, wanted: Wanted, made: Shaped) -> list[tuple[Program, ...]]:
        with self._lock:
            self._kept[wanted] = made
            if len(self._kept) > self._limit:
                self._kept.popitem(last=False)
            return [shaped.programs for shaped in self._kept.values()]

    def clear(self) -> None:
        """Drop all programs."""
        with self._lock:
            self._kept.clear()
