"""Models whose configuration shows clients other shapes (`reshape`)."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from xlaserve.errors import InvalidModel
from xlaserve.model_config.config import ConfigTensor, ModelConfig
from xlaserve.runtime.handling import Handling
from xlaserve.runtime.loaded import (
    Dispatching,
    Executable,
    Generating,
    InFlight,
    LoadedModel,
    ModelInfo,
    OnDemand,
    Value,
)
from xlaserve.runtime.wrappers.around import AroundModel
from xlaserve.tensors import Shape, Tensor, TensorSpec


@dataclass(frozen=True, slots=True)
class Reshape:
    """Maps one tensor's shape between client and model."""

    lead: int
    """Number of leading dimensions to keep: 1 with a batch dimension, otherwise 0."""
    source: Shape
    target: Shape
    """Target shape without the batch. The nth -1 takes the size of the source's nth -1."""

    def __call__(self, value: Value) -> Tensor:
        """Return the tensor in the target shape, as a view if possible."""
        tensor = value if isinstance(value, np.ndarray) else value.numpy()
        lead = self.lead
        open_sizes = iter(
            [tensor.shape[lead + i] for i, size in enumerate(self.source) if size == -1]
        )
        sizes = [next(open_sizes) if size == -1 else size for size in self.target]
        return tensor.reshape((*tensor.shape[:lead], *sizes))


@dataclass(frozen=True, slots=True)
class _Shapes:
    inputs: Mapping[str, Reshape]
    outputs: Mapping[str, Reshape]

    def given(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        return _reshaped(self.inputs, inputs)

    def returned(self, outputs: Mapping[str, Value]) -> dict[str, Value]:
        return _reshaped(self.outputs, outputs)


def _reshaped(shapes: Mapping[str, Reshape], values: Mapping[str, Value]) -> dict[str, Value]:
    return {
        name: shapes[name](value) if name in shapes else value for name, value in values.items()
    }


def wrap(model: LoadedModel, config: ModelConfig) -> LoadedModel:
    """Wrap a model to show the shapes in its configuration to clients.

    Raises InvalidModel for kinds of models that do not support `reshape`.
    """
    if isinstance(model, Handling | Generating):
        raise InvalidModel(
            f"reshape is not implemented for models of the kind '{model.info.platform}', which"
            " can reshape in their code"
        )
    return ReshapedModel(model, config)


class _ReshapedExecutable:
    """A program with reshaped tensors, compiled for one shape (an Executable)."""

    def __init__(self, inner: Executable, shapes: _Shapes) -> None:
        self._of = inner
        self._shapes = shapes

    @property
    def dispatching(self) -> Dispatching | None:
        """Return the interface for asynchronous dispatch, or None."""
        inner = self._of.dispatching
        return None if inner is None else _ReshapedDispatching(inner, self._shapes)

    def execute(
        self, inputs: Mapping[str, Value], *, resident: bool = False, replica: int = 0
    ) -> Mapping[str, Value]:
        """Execute on the reshaped inputs; the outputs are always host arrays."""
        outputs = self._of.execute(self._shapes.given(inputs), replica=replica)
        return self._shapes.returned(outputs)


class ReshapedModel(AroundModel, _ReshapedExecutable):
    """A model whose inputs and outputs are reshaped (a LoadedModel)."""

    def __init__(self, inner: LoadedModel, config: ModelConfig) -> None:
        info = inner.info
        inputs, self._input_specs = _of_side("input", config.inputs, info.inputs, info)
        outputs, self._output_specs = _of_side("output", config.outputs, info.outputs, info)
        back = {name: Reshape(one.lead, one.target, one.source) for name, one in outputs.items()}
        super().__init__(inner, _Shapes(inputs, back))
        self._inner = inner

    @property
    def info(self) -> ModelInfo:
        """Return the description that clients see."""
        return replace(self._inner.info, inputs=self._input_specs, outputs=self._output_specs)

    @property
    def on_demand(self) -> OnDemand | None:
        """Return the on-demand compiler, or None."""
        inner = self._inner.on_demand
        return None if inner is None else _ReshapedOnDemand(inner, self._shapes)

    @property
    def replicas(self) -> int:
        """Return the number of replicas."""
        return self._inner.replicas

    @property
    def batch_limit(self) -> int:
        """Return the largest useful batch."""
        return self._inner.batch_limit

    def expected_seconds(self, rows: int) -> float:
        """Return the warm-up's measurement."""
        return self._inner.expected_seconds(rows)

    def padded_rows(self, rows: int) -> int:
        """Return the bucket size for this many rows."""
        return self._inner.padded_rows(rows)


class _ReshapedOnDemand:
    """Compiles shapes of a reshaped model on demand (an OnDemand)."""

    def __init__(self, inner: OnDemand, shapes: _Shapes) -> None:
        self._inner = inner
        self._shapes = shapes

    def shape_of(self, inputs: Mapping[str, Value]) -> Hashable:
        """Return the shape to compile for these inputs, or None if it was compiled at load."""
        return self._inner.shape_of(self._shapes.given(inputs))

    def find(self, shape: Hashable) -> Executable | None:
        """Return the executable of a shape, or None if it is not compiled."""
        found = self._inner.find(shape)
        return None if found is None else _ReshapedExecutable(found, self._shapes)

    def compile(self, shape: Hashable) -> Executable:
        """Compile and warm a shape. Blocks."""
        return _ReshapedExecutable(self._inner.compile(shape), self._shapes)


class _ReshapedDispatching:
    """Starts executions of a reshaped model on accelerators (a Dispatching)."""

    def __init__(self, inner: Dispatching, shapes: _Shapes) -> None:
        self._inner = inner
        self._shapes = shapes

    @property
    def queues(self) -> Sequence[str]:
        """Return the queue of each replica."""
        return self._inner.queues

    def dispatch(
        self, inputs: Mapping[str, Value], *, resident: bool = False, replica: int = 0
    ) -> InFlight:
        """Start an execution; its outputs will be host arrays."""
        given = self._shapes.given(inputs)
        return _ReshapedInFlight(self._inner.dispatch(given, replica=replica), self._shapes)


@dataclass(frozen=True, slots=True)
class _ReshapedInFlight:
    """A dispatched execution with reshaped outputs (an InFlight)."""

    inner: InFlight
    shapes: _Shapes

    def fetch(self) -> Mapping[str, Value]:
        """Wait for completion, and return the outputs."""
        return self.shapes.returned(self.inner.fetch())


# --- shapes that clients see ---


def _of_side(
    kind: str, tensors: Sequence[ConfigTensor], specs: Sequence[TensorSpec], info: ModelInfo
) -> tuple[dict[str, Reshape], tuple[TensorSpec, ...]]:
    """Return the reshapes of the inputs or outputs, and the specifications that clients see."""
    wanted = {one.name: one for one in tensors if one.reshape is not None}
    shapes, shown = {}, []
    for spec in specs:
        tensor = wanted.get(spec.name)
        if tensor is None or tensor.reshape is None:
            shown.append(spec)
            continue
        lead = len(spec.shape) - len(tensor.reshape)
        if info.max_batch_size and not lead:
            raise InvalidModel(
                f"{kind} '{spec.name}': reshape is not possible without a max_batch_size in the"
                " configuration, which identifies the batch dimension"
            )
        inner = spec.shape[lead:]
        # A dynamic size in the configuration takes the artifact's size.
        sizes = iter([inner[i] for i, size in enumerate(tensor.reshape) if size == -1])
        dims = tuple(next(sizes) if size == -1 else size for size in tensor.dims)
        shapes[spec.name] = Reshape(lead, tensor.dims, tensor.reshape)
        shown.append(TensorSpec(spec.name, spec.datatype, (*spec.shape[:lead], *dims)))
    return shapes, tuple(shown)
