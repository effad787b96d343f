"""Models exported by `jax.export`: compiled for every batch size before the first request."""

# Much of jax is typed, but not all that is called here.
# mypy: disallow-untyped-calls=False

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import jax
import numpy as np
from jax.errors import JaxRuntimeError
from jax.export import Exported
from jax.sharding import SingleDeviceSharding

from xlaserve.errors import InvalidModel, InvalidTensor, OutOfMemory, XlaserveError
from xlaserve.models import artifact, manifest, weights
from xlaserve.models.buckets import bucket_for, buckets_up_to
from xlaserve.models.loaded import LoadContext, ModelInfo, ModelMemory, Stage, Value
from xlaserve.models.manifest import Manifest
from xlaserve.models.signature import Signature, agreed
from xlaserve.models.sizes import EXECUTABLE_BYTES
from xlaserve.tensors import Tensor, TensorSpec

PLATFORM = "jax_export"

CONSTANT_BYTES = 1024
"""Parameters up to this size become part of the executables: each argument of a call costs about
half a microsecond, and a bias or a scale is not worth it."""

FIXED = 0
"""The only bucket of a model without a batch dimension."""

_WARM_RUNS = 2
_MEASURED_RUNS = 8
_MEASURED_SECONDS = 0.005

Arrays: TypeAlias = "list[jax.Array | Tensor]"
"""Arguments of an executable: numpy arrays go in as they are, which is quicker than putting them
on the device first."""


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


@dataclass(frozen=True, slots=True)
class Program:
    """One bucket: an executable and how long it takes."""

    call: Callable[[Sequence[jax.Array], Arrays], list[jax.Array]]
    seconds: float
    """The quickest run: loads side by side disturb one another while they measure."""


class JaxExportModel:
    """An exported model in memory. Any number of threads may execute it."""

    def __init__(
        self,
        model: str,
        info: ModelInfo,
        programs: Mapping[int, Program],
        leaves: Sequence[jax.Array],
        sharding: SingleDeviceSharding,
    ) -> None:
        self.info = info
        self._model = model
        self._programs = dict(programs)
        self._buckets = tuple(sorted(programs))
        self._leaves = list(leaves)
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
            _raise_if_exhausted(self._model, error)
            raise
        return dict(zip(self._output_names, values, strict=True))

    def expected_seconds(self, rows: int) -> float:
        """Return what the warm-up measured for the bucket that holds so many rows."""
        largest = self._buckets[-1]
        return self._programs[bucket_for(self._buckets, min(rows, largest))].seconds

    def close(self) -> None:
        """Drop parameters and executables; their memory is free once no output is held."""
        self._programs.clear()
        self._leaves.clear()

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
            array.shape == _bucket_shape(spec, bucket)
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
    sharding = SingleDeviceSharding(jax.local_devices(backend=context.device)[0])
    with out_of_memory(context.model), _invalid("compiled or run"):
        parameters = _Parameters.read(directory, described, sharding, context)
        return _compiled(exported, parameters, signature, sharding, context)


@dataclass(frozen=True, slots=True)
class _Parameters:
    """The parameters in the artifact's order: on the device, or as constants."""

    leaves: list[jax.Array]
    constants: dict[int, Tensor]
    """By position among all parameters."""

    @staticmethod
    def read(
        directory: Path, described: Manifest, sharding: SingleDeviceSharding, context: LoadContext
    ) -> "_Parameters":
        positions = {name: index for index, name in enumerate(described.parameters)}
        leaves: dict[int, jax.Array] = {}
        constants: dict[int, Tensor] = {}
        record = described.files[manifest.WEIGHTS]
        for name, tensor in weights.read(directory, manifest.WEIGHTS, record):
            context.check_cancelled()
            if tensor.nbytes <= CONSTANT_BYTES:
                constants[positions[name]] = tensor
            else:
                # Waiting keeps no more than one tensor twice. On the CPU it is used in place.
                leaves[positions[name]] = jax.device_put(tensor, sharding).block_until_ready()
        return _Parameters([leaves[index] for index in sorted(leaves)], constants)

    @property
    def leaves_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def constants_bytes(self) -> int:
        return sum(constant.nbytes for constant in self.constants.values())


def _compiled(
    exported: Exported,
    parameters: _Parameters,
    signature: Signature,
    sharding: SingleDeviceSharding,
    context: LoadContext,
) -> JaxExportModel:
    started = time.perf_counter()
    buckets = buckets_up_to(signature.max_batch_size) if signature.max_batch_size else (FIXED,)
    lowerable = jax.jit(_function(exported, parameters.constants))
    compiled: dict[int, jax.stages.Compiled] = {}
    for step, bucket in enumerate(buckets, start=1):
        context.check_cancelled()
        context.on_stage(Stage("compiling", step, len(buckets)))
        arguments = _abstract(signature.inputs, bucket, sharding)
        compiled[bucket] = lowerable.lower(parameters.leaves, arguments).compile()
    compile_seconds = time.perf_counter() - started
    programs: dict[int, Program] = {}
    for step, (bucket, executable) in enumerate(compiled.items(), start=1):
        context.check_cancelled()
        context.on_stage(Stage("warming", step, len(buckets)))
        programs[bucket] = _warmed(executable, parameters.leaves, signature.inputs, bucket)
    info = ModelInfo(
        PLATFORM,
        signature.inputs,
        signature.outputs,
        signature.max_batch_size,
        _memory(list(compiled.values()), parameters),
        compile_seconds,
    )
    return JaxExportModel(context.model, info, programs, parameters.leaves, sharding)


def _function(
    exported: Exported, constants: Mapping[int, Tensor]
) -> Callable[[Sequence[jax.Array], Sequence[jax.Array]], list[jax.Array]]:
    """Return the artifact as a function of the parameters that are no constants, and inputs."""
    count = len(exported.in_avals)

    def model(leaves: Sequence[jax.Array], inputs: Sequence[jax.Array]) -> list[jax.Array]:
        rest = iter(leaves)
        parameters: list[jax.Array | Tensor] = [
            constants[index] if index in constants else next(rest)
            for index in range(count - len(inputs))
        ]
        # Only ever called inside jit: outside, each call leaks some megabytes.
        return list(exported.call(parameters, list(inputs)))

    return model


def _abstract(
    specs: Sequence[TensorSpec], bucket: int, sharding: SingleDeviceSharding
) -> list[jax.ShapeDtypeStruct]:
    return [
        jax.ShapeDtypeStruct(
            _bucket_shape(spec, bucket),
            spec.datatype.dtype,
            sharding=sharding,
        )
        for spec in specs
    ]


def _bucket_shape(spec: TensorSpec, bucket: int) -> tuple[int, ...]:
    return (bucket, *spec.shape[1:]) if bucket != FIXED else spec.shape


def _warmed(
    executable: jax.stages.Compiled,
    leaves: Sequence[jax.Array],
    specs: Sequence[TensorSpec],
    bucket: int,
) -> Program:
    """Execute until the first runs, which are slow, are over; then measure while that is quick."""
    arguments: Arrays = [
        np.zeros(_bucket_shape(spec, bucket), spec.datatype.dtype) for spec in specs
    ]
    runs = [_seconds(executable, leaves, arguments) for _ in range(_WARM_RUNS)]
    while len(runs) < _WARM_RUNS + _MEASURED_RUNS and sum(runs[1:]) < _MEASURED_SECONDS:
        runs.append(_seconds(executable, leaves, arguments))
    return Program(executable, min(runs))


def _seconds(
    executable: jax.stages.Compiled, leaves: Sequence[jax.Array], arguments: Arrays
) -> float:
    started = time.perf_counter()
    for output in executable(leaves, arguments):
        to_host(output)
    return time.perf_counter() - started


def _memory(compiled: Sequence[jax.stages.Compiled], parameters: _Parameters) -> ModelMemory:
    temporaries, executables = 0, 0
    for executable in compiled:
        analysis = executable.memory_analysis()
        if analysis is None:
            executables += EXECUTABLE_BYTES
            continue
        scratch = (
            analysis.temp_size_in_bytes
            + analysis.output_size_in_bytes
            + analysis.argument_size_in_bytes
            - parameters.leaves_bytes
        )
        temporaries = max(temporaries, scratch)
        executables += analysis.generated_code_size_in_bytes or EXECUTABLE_BYTES
    return ModelMemory(
        parameters_bytes=parameters.leaves_bytes,
        constants_bytes=parameters.constants_bytes * len(compiled),
        temporaries_bytes=temporaries,
        executables_bytes=executables,
    )


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
def out_of_memory(model: str) -> Iterator[None]:
    """Turn XLA's RESOURCE_EXHAUSTED into OutOfMemory."""
    try:
        yield
    except (JaxRuntimeError, MemoryError) as error:
        _raise_if_exhausted(model, error)
        raise


def _raise_if_exhausted(model: str, error: Exception) -> None:
    if isinstance(error, MemoryError):
        raise OutOfMemory(model, "the host has no memory left") from error
    text = str(error)
    if "RESOURCE_EXHAUSTED" in text:
        raise OutOfMemory(model, text.splitlines()[0][:300]) from error


@contextmanager
def _invalid(what: str) -> Iterator[None]:
    """Turn what JAX raises while it compiles into InvalidModel."""
    try:
        yield
    except (XlaserveError, MemoryError):
        raise
    # What a changed artifact meets on its way through JAX and XLA has no class of its own.
    except Exception as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise InvalidModel(f"{manifest.ARTIFACT} cannot be {what}: {lines[0][:300]}") from error
