"""Executes a computation on the concatenated inputs of a ragged batch.

As in Triton, the model gets one dimension with the elements of all requests, and batch inputs that
say which elements belong to which request. A computation has fixed shapes, which define its
capacity. Unused capacity is filled with one further request of zeros, whose answer is dropped. If
requests are independent, as the operator declares, each gets the same answer as alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np

from xlaserve.errors import InvalidModel, InvalidTensor
from xlaserve.model_config.buckets import BATCH_INDEPENDENT, declared
from xlaserve.model_config.config import ConfigTensor, ModelConfig
from xlaserve.model_config.ragged import BatchInput, BatchKind
from xlaserve.runtime.handling import Handling
from xlaserve.runtime.loaded import Generating, LoadedModel, ModelInfo, Value
from xlaserve.runtime.wrappers.around import AroundModel
from xlaserve.tensors import BYTES, Tensor, TensorSpec

_SOME = -1


@dataclass(frozen=True, slots=True)
class Parts:
    """An output of a batch, split by request."""

    parts: Sequence[Tensor]


@runtime_checkable
class Ragged(Protocol):
    """A model that executes requests of different shapes in one batch."""

    def check(self, inputs: Mapping[str, Value]) -> None:
        """Raise InvalidTensor for a request that exceeds the model's capacity."""
        ...

    def fitting(self, requests: Sequence[Mapping[str, Value]]) -> int:
        """Return how many of these requests, in order, fit into one execution."""
        ...

    def together(
        self, requests: Sequence[Mapping[str, Value]], *, replica: int = 0
    ) -> Mapping[str, Parts]:
        """Execute several requests in one batch. Blocks; raises OutOfMemory."""
        ...


def asks(config: ModelConfig) -> bool:
    """Tell whether a configuration uses ragged batches."""
    has_ragged = any(one.is_ragged for one in config.inputs)
    return has_ragged or bool(config.batch_inputs or config.batch_outputs)


def inner(config: ModelConfig) -> ModelConfig:
    """Return the configuration of the wrapped computation; raises InvalidModel."""
    _check(config)
    listed = {one.name for one in config.batch_inputs}
    inputs = [replace(one, dims=(_SOME,), is_ragged=False) for one in config.inputs]
    made = {one.name: _as_tensor(one) for one in config.batch_inputs}
    scattered = {one.name for one in config.batch_outputs}
    outputs = tuple(
        replace(one, dims=(_SOME,) if one.name in scattered else (_SOME, *one.dims))
        for one in config.outputs
    )
    parameters = {k: v for k, v in config.parameters.items() if k != BATCH_INDEPENDENT}
    return replace(
        config,
        max_batch_size=0,
        is_unbatched=True,
        inputs=(*(one for one in inputs if one.name not in listed), *made.values()),
        outputs=outputs,
        parameters=parameters,
        batch_inputs=(),
        batch_outputs=(),
        warmup=(),
    )


def wrap(name: str, model: LoadedModel, config: ModelConfig) -> "RaggedModel":
    """Wrap a model loaded with `inner` for its clients; raises InvalidModel."""
    if isinstance(model, Handling | Generating):
        raise InvalidModel("allow_ragged_batch needs a model with one answer per request")
    return RaggedModel(name, model, config)


def _check_input(tensor: ConfigTensor) -> None:
    if not tensor.is_ragged:
        raise InvalidModel(
            f"input '{tensor.name}': expected allow_ragged_batch on all inputs or on none"
        )
    if tensor.datatype is BYTES:
        raise InvalidModel(f"input '{tensor.name}': BYTES cannot be ragged")
    if tensor.is_optional or tensor.reshape is not None:
        what = "optional" if tensor.is_optional else "reshape"
        raise InvalidModel(f"input '{tensor.name}': {what} is not possible with allow_ragged_batch")


def _check(config: ModelConfig) -> None:
    for tensor in config.inputs:
        _check_input(tensor)
    if not config.inputs or not config.outputs:
        raise InvalidModel("ragged batches: expected the inputs and outputs in the configuration")
    if not config.max_batch_size:
        raise InvalidModel("ragged batches: expected a max_batch_size above 0, got 0")
    if config.sequence_batching is not None or config.is_reshaped:
        raise InvalidModel("ragged batches: expected neither sequence_batching nor reshape")
    if declared(config) is not True:
        raise InvalidModel(
            f"ragged batches: expected the parameter '{BATCH_INDEPENDENT}' to be true: it"
            " declares that an answer depends only on its request's elements, which is not proved"
            " for ragged batches"
        )
    outputs = {one.name for one in config.outputs}
    for scattered in config.batch_outputs:
        if scattered.name not in outputs:
            raise InvalidModel(
                f"batch_output '{scattered.name}' is not an output of the configuration"
            )


def _as_tensor(given: BatchInput) -> ConfigTensor:
    is_item = given.kind is BatchKind.ITEM_SHAPE
    return ConfigTensor(given.name, given.datatype, (_SOME, _SOME) if is_item else (_SOME,))


class RaggedModel(AroundModel):
    """A computation that executes requests of different shapes in one batch (a LoadedModel)."""

    on_demand = None
    dispatching = None
    """Not dispatched: a worker thread splits the outputs, and waits for the device too."""

    def __init__(self, name: str, model: LoadedModel, config: ModelConfig) -> None:
        self._model = name
        self._inner = model
        self.replicas = model.replicas
        info = model.info
        self._specs = {spec.name: spec for spec in info.inputs}
        for spec in (*info.inputs, *info.outputs):
            if _SOME in spec.shape:
                raise InvalidModel(
                    "ragged batches: expected fixed shapes (the computation's capacity),"
                    f" '{spec.name}' is {spec}"
                )
        self._clients = tuple(_shown(one) for one in config.inputs)
        self._outputs = tuple(_shown(one) for one in config.outputs)
        self._batch_inputs = config.batch_inputs
        self._scattered = {one.name: one.source for one in config.batch_outputs}
        self._ranks = {one.name: len(one.dims) for one in config.inputs}
        self._requests = self._most_requests()
        if config.max_batch_size > self._requests:
            raise InvalidModel(
                f"max_batch_size: expected at most {self._requests}, the computation's capacity,"
                f" got {config.max_batch_size}"
            )
        self._most = config.max_batch_size
        self._names = frozenset(one.name for one in config.inputs)

    def _most_requests(self) -> int:
        """Return the capacity in requests, including the request of zeros; raises InvalidModel."""
        counts = {one.name: self._count_of(one) for one in self._batch_inputs}
        counts |= {
            spec.name: spec.shape[0]
            for spec in self._inner.info.outputs
            if spec.name not in self._scattered
        }
        sizes = {count for count in counts.values() if count is not None}
        if len(sizes) > 1:
            listed = ", ".join(f"'{name}' {count}" for name, count in counts.items())
            raise InvalidModel(
                f"ragged batches: expected the same number of requests in all tensors, got {listed}"
            )
        for name, source in self._scattered.items():
            found = next(spec for spec in self._inner.info.outputs if spec.name == name)
            if found.shape != self._specs[source].shape:
                raise InvalidModel(
                    f"batch_output '{name}': expected the shape of input '{source}', "
                    f"{self._specs[source]}, got {found}"
                )
        if not sizes:
            raise InvalidModel(
                "ragged batches: no batch_input or batch_output determines the number of requests"
            )
        return sizes.pop()

    def _count_of(self, given: BatchInput) -> int | None:
        size = self._specs[given.name].shape[0]
        match given.kind:
            case BatchKind.ACCUMULATED_WITH_ZERO:
                return size - 1
            case BatchKind.MAX_AS_SHAPE:
                return None
            case BatchKind.ITEM_SHAPE_FLATTEN:
                return size // max(1, self._ranks[given.source])
        return size

    @property
    def info(self) -> ModelInfo:
        """Return the description that clients see."""
        return replace(
            self._inner.info,
            inputs=self._clients,
            outputs=self._outputs,
            max_batch_size=self._most,
            ragged=self._names,
        )

    @property
    def batch_limit(self) -> int:
        """Return the maximum number of requests per batch."""
        return self._most

    def expected_seconds(self, rows: int) -> float:
        """Return the warm-up's measurement."""
        return self._inner.expected_seconds(rows)

    def padded_rows(self, rows: int) -> int:
        """Return the rows unchanged."""
        return rows

    def check(self, inputs: Mapping[str, Value]) -> None:
        """Raise InvalidTensor for a request that exceeds the computation's capacity."""
        for spec in self._clients:
            shape = inputs[spec.name].shape
            if shape[0] != 1:
                self._refuse(spec, "one row, since requests have different shapes", shape)
            if np.prod(shape) > self._room(spec.name):
                self._refuse(spec, f"at most {self._room(spec.name)} elements", shape)
        if not self.fitting([inputs]):
            spec = self._clients[0]
            expected = f"{self._room(spec.name)} elements, the capacity for one request"
            self._refuse(spec, expected, inputs[spec.name].shape)

    def _refuse(self, spec: TensorSpec, expected: str, shape: Sequence[int]) -> None:
        raise InvalidTensor(self._model, "input", spec.name, expected, str(list(shape)))

    def _room(self, name: str) -> int:
        """Return the maximum number of elements that one request may have in an input."""
        most = self._specs[name].shape[0]
        for one in self._batch_inputs:
            if one.kind is BatchKind.MAX_AS_SHAPE and one.source == name:
                most = min(most, self._specs[one.name].shape[0])
        return most

    def fitting(self, requests: Sequence[Mapping[str, Value]]) -> int:
        """Return how many of these requests, in order, fit into one execution."""
        used = dict.fromkeys(self._names, 0)
        count = 0
        for index, inputs in enumerate(requests, 1):
            for name in used:
                used[name] += int(np.prod(inputs[name].shape))
            if index > self._most or any(n > self._specs[x].shape[0] for x, n in used.items()):
                break
            is_whole = all(n == self._specs[x].shape[0] for x, n in used.items())
            if index < self._requests or is_whole:
                count = index
        return count

    def execute(
        self, inputs: Mapping[str, Value], *, resident: bool = False, replica: int = 0
    ) -> Mapping[str, Value]:
        """Execute a single request; the outputs are always host arrays."""
        found = self.together([inputs], replica=replica)
        return {name: output.parts[0] for name, output in found.items()}

    def together(
        self, requests: Sequence[Mapping[str, Value]], *, replica: int = 0
    ) -> Mapping[str, Parts]:
        """Execute several requests in one batch. Blocks; raises OutOfMemory."""
        hosts = [{name: _on_host(one[name]) for name in self._names} for one in requests]
        counts = {name: [one[name].size for one in hosts] for name in self._names}
        inputs = {name: self._joined(name, hosts) for name in self._names}
        for given in self._batch_inputs:
            inputs[given.name] = self._made(given, hosts, counts[given.source])
        outputs = self._inner.execute(inputs, replica=replica)
        return {
            spec.name: Parts(self._parts(spec, _on_host(outputs[spec.name]), hosts))
            for spec in self._outputs
        }

    def _joined(self, name: str, hosts: Sequence[Mapping[str, Tensor]]) -> Tensor:
        spec = self._specs[name]
        whole = np.zeros(spec.shape, spec.datatype.dtype)
        np.concatenate(
            [one[name].ravel() for one in hosts], out=whole[: sum(h[name].size for h in hosts)]
        )
        return whole

    def _made(
        self, given: BatchInput, hosts: Sequence[Mapping[str, Tensor]], counts: Sequence[int]
    ) -> Tensor:
        """Build a batch input for the requests, the request of zeros, and empty ones."""
        spec = self._specs[given.name]
        rest = self._specs[given.source].shape[0] - sum(counts)
        missing = self._requests - len(counts)
        all_counts = [*counts, *([rest] if missing else []), *([0] * (missing - 1))]
        shapes = [list(one[given.source].shape[1:]) for one in hosts]
        rank = self._ranks[given.source]
        shapes += [[count, *([1] * (rank - 1))] for count in all_counts[len(counts) :]]
        made: object = _MADE[given.kind](all_counts, shapes, spec)
        return np.asarray(made, spec.datatype.dtype).reshape(spec.shape)

    def _parts(
        self, spec: TensorSpec, output: Tensor, hosts: Sequence[Mapping[str, Tensor]]
    ) -> list[Tensor]:
        source = self._scattered.get(spec.name)
        if source is None:
            return [output[index : index + 1] for index in range(len(hosts))]
        parts, start = [], 0
        for one in hosts:
            shape, size = one[source].shape, one[source].size
            parts.append(output[start : start + size].reshape(shape))
            start += size
        return parts


_Made = Callable[[Sequence[int], Sequence[Sequence[int]], TensorSpec], object]

_MADE: Mapping[BatchKind, _Made] = {
    BatchKind.ELEMENT_COUNT: lambda counts, shapes, spec: counts,
    BatchKind.ACCUMULATED: lambda counts, shapes, spec: np.cumsum(counts),
    BatchKind.ACCUMULATED_WITH_ZERO: lambda counts, shapes, spec: np.cumsum([0, *counts]),
    # Only its shape matters: the maximum size of a request, which is fixed.
    BatchKind.MAX_AS_SHAPE: lambda counts, shapes, spec: np.zeros(spec.shape),
    BatchKind.ITEM_SHAPE: lambda counts, shapes, spec: shapes,
    BatchKind.ITEM_SHAPE_FLATTEN: lambda counts, shapes, spec: shapes,
}


def _shown(tensor: ConfigTensor) -> TensorSpec:
    return TensorSpec(tensor.name, tensor.datatype, (-1, *tensor.dims))


def _on_host(value: Value) -> Tensor:
    return value if isinstance(value, np.ndarray) else value.numpy()
