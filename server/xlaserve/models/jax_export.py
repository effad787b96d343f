"""Models exported by `jax.export`: compiled for every batch size before the first request."""

# Much of jax is typed, but not all that is called here.
# mypy: disallow-untyped-calls=False

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.errors import JaxRuntimeError
from jax.export import Exported
from jax.sharding import SingleDeviceSharding

from xlaserve.errors import InvalidModel, InvalidTensor, OutOfMemory, XlaserveError
from xlaserve.models import artifact, manifest, weights
from xlaserve.models.buckets import bucket_for
from xlaserve.models.loaded import LoadContext, ModelInfo, Value
from xlaserve.models.programs import (
    FIXED,
    Arrays,
    DeviceParameters,
    Program,
    bucket_shape,
    compile_programs,
)
from xlaserve.models.signature import Signature, agreed
from xlaserve.tensors import Tensor, TensorSpec

PLATFORM = "jax_export"

_LETTING_GO_SECONDS = 1.0
_LOOK_SECONDS = 0.001


@dataclass(frozen=True, slots=True)
class DeviceTensor:
    """An output that stayed on its device (a Resident), with the padding of its bucket."""

    array: jax.Array
    batch: int | None
    """How many of its rows are real; None where the first dimension is not a batch."""

    @property
    def rows(self) -> int:
        """Return how many of its rows are real."""
        if self.batch is not None:
            return self.batch
        return self.array.shape[0] if self.array.ndim else 1

    def numpy(self) -> Tensor:
        """Fetch the real rows to the host. Blocks until they are computed."""
        return to_host(self.array, self.batch)


def to_host(array: jax.Array, rows: int | None = None) -> Tensor:
    """Return the first rows, or all there is, as a read-only array; on the CPU a view. Blocks."""
    host = np.asarray(array)
    return host if rows is None else host[:rows]


class JaxExportModel:
    """An exported model in memory. Any number of threads may execute it."""

    def __init__(
        self,
        model: str,
        info: ModelInfo,
        programs: Mapping[int, Program],
        parameters: DeviceParameters,
        sharding: SingleDeviceSharding,
    ) -> None:
        self.info = info
        self._model = model
        self._programs = dict(programs)
        self._buckets = tuple(sorted(programs))
        self._leaves = list(parameters.leaves)
        self._host = parameters.host
        self._sharding = sharding
        self._input_names = tuple(spec.name for spec in info.inputs)
        self._output_names = tuple(spec.name for spec in info.outputs)

    def execute(
        self, inputs: Mapping[str, Value], *, resident: bool = False
    ) -> Mapping[str, Value]:
        """Run the smallest bucket that holds the rows, padded with zeros.

        With `resident` the outputs are DeviceTensors. Raises OutOfMemory.
        """
        rows, bucket = self._bucket([inputs[name] for name in self._input_names])
        arguments = [
            self._argument(spec, inputs[spec.name], rows, bucket) for spec in self.info.inputs
        ]
        try:
            outputs = self._programs[bucket].call(self._leaves, arguments)
            values = self._resident(outputs, arguments, rows) if resident else _host(outputs, rows)
        except (JaxRuntimeError, MemoryError) as error:
            raise_if_exhausted(self._model, error)
            raise
        return dict(zip(self._output_names, values, strict=True))

    def expected_seconds(self, rows: int) -> float:
        """Return what the warm-up measured for the bucket that holds so many rows."""
        largest = self._buckets[-1]
        return self._programs[bucket_for(self._buckets, min(rows, largest))].seconds

    def close(self) -> None:
        """Drop parameters and executables, and return once the parameters' memory is let go.

        XLA lets go of it in threads of its own, and JAX hands it back with the next collection.
        What an output still holds is not waited for longer than a second.
        """
        self._programs.clear()
        self._leaves.clear()
        deadline = time.monotonic() + _LETTING_GO_SECONDS
        while any(memory() is not None for memory in self._host) and time.monotonic() < deadline:
            gc.collect(0)
            time.sleep(_LOOK_SECONDS)

    def _bucket(self, values: Sequence[Value]) -> tuple[int | None, int]:
        """Return the rows of a request, None without a batch, and the bucket that holds them."""
        if not self.info.max_batch_size:
            return None, FIXED
        rows = _rows(values[0])
        for spec, value in zip(self.info.inputs, values, strict=True):
            if (found := _rows(value)) != rows or found > self.info.max_batch_size:
                raise InvalidTensor(
                    self._model,
                    "input",
                    spec.name,
                    f"a batch of {min(rows, self.info.max_batch_size)} rows",
                    f"{found} rows",
                )
        return rows, bucket_for(self._buckets, rows)

    def _argument(
        self, spec: TensorSpec, value: Value, rows: int | None, bucket: int
    ) -> "jax.Array | Tensor":
        if isinstance(value, DeviceTensor) and self._takes(spec, value.array, bucket):
            return value.array
        host = value if isinstance(value, np.ndarray) else value.numpy()
        return host if rows in (None, bucket) else _padded(host, bucket)

    def _resident(
        self, outputs: Sequence[jax.Array], arguments: Arrays, rows: int | None
    ) -> Sequence[Value]:
        if any(isinstance(argument, np.ndarray) for argument in arguments):
            # XLA may read host arrays in place, and they are the caller's to change again.
            jax.block_until_ready(outputs)
        return [DeviceTensor(output, rows) for output in outputs]

    def _takes(self, spec: TensorSpec, array: jax.Array, bucket: int) -> bool:
        return (
            array.shape == bucket_shape(spec, bucket)
            and array.dtype == spec.datatype.dtype
            and array.sharding == self._sharding
        )


def load(directory: Path, context: LoadContext) -> JaxExportModel:
    """Load, compile and warm a version directory; `jax_runtime.start` comes before the first.

    Raises InvalidModel, OutOfMemory, or what `context.check_cancelled` raises.
    """
    described = manifest.read(directory)
    signature = agreed(
        Signature(described.inputs, described.outputs, described.max_batch_size), context.config
    )
    exported = artifact.read(directory, described)
    entries = weights.read_entries(directory, manifest.WEIGHTS)
    artifact.check(exported, described, entries, context.device)
    sharding = sharding_on(context.device)
    with invalid_model(context.model, manifest.ARTIFACT):
        parameters = DeviceParameters.read(directory, described, sharding, context)
        return compiled(exported, parameters, signature, sharding, context)


def sharding_on(device: str) -> SingleDeviceSharding:
    """Return where all that a model has will lie: the first device of a platform."""
    return SingleDeviceSharding(jax.local_devices(backend=device)[0])


def compiled(
    exported: Exported,
    parameters: DeviceParameters,
    signature: Signature,
    sharding: SingleDeviceSharding,
    context: LoadContext,
) -> JaxExportModel:
    """Compile and warm an artifact whose arguments are its parameters, then its inputs."""
    try:
        programs = compile_programs(exported, parameters, signature, sharding, context)
    finally:
        artifact.release(exported)
    info = ModelInfo(
        PLATFORM,
        signature.inputs,
        signature.outputs,
        signature.max_batch_size,
        programs.memory,
        programs.compile_seconds,
    )
    return JaxExportModel(context.model, info, programs.by_bucket, parameters, sharding)


def _rows(value: Value) -> int:
    return len(value) if isinstance(value, np.ndarray) else value.rows


def _host(outputs: Sequence[jax.Array], rows: int | None) -> Sequence[Value]:
    return [to_host(output, rows) for output in outputs]


def _padded(tensor: Tensor, bucket: int) -> Tensor:
    # Always fresh memory: XLA may read it in place until the outputs are there.
    padded = np.empty((bucket, *tensor.shape[1:]), tensor.dtype)
    padded[: len(tensor)] = tensor
    padded[len(tensor) :] = 0
    return padded


@contextmanager
def invalid_model(model: str, name: str) -> Iterator[None]:
    """Turn what JAX raises while it compiles an artifact into OutOfMemory or InvalidModel."""
    try:
        yield
    except XlaserveError:
        raise
    # What a changed artifact meets on its way through JAX and XLA has no class of its own.
    except Exception as error:
        raise_if_exhausted(model, error)
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise InvalidModel(f"{name} cannot be compiled or run: {lines[0][:300]}") from error


def raise_if_exhausted(model: str, error: Exception) -> None:
    """Raise OutOfMemory if that is what an error of JAX or Python means."""
    if isinstance(error, MemoryError):
        raise OutOfMemory(model, "the host has no memory left") from error
    text = str(error)
    if "RESOURCE_EXHAUSTED" in text:
        raise OutOfMemory(model, text.splitlines()[0][:300]) from error
