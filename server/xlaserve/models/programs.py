"""The executables of one model: compiled for every bucket, warmed and measured."""

# Much of jax is typed, but not all that is called here.
# mypy: disallow-untyped-calls=False

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import jax
import numpy as np
from jax.export import Exported
from jax.sharding import SingleDeviceSharding

from xlaserve.models import manifest, weights
from xlaserve.models.buckets import buckets_up_to
from xlaserve.models.loaded import LoadContext, ModelMemory, Stage
from xlaserve.models.manifest import Manifest
from xlaserve.models.signature import Signature
from xlaserve.models.sizes import EXECUTABLE_BYTES
from xlaserve.tensors import Tensor, TensorSpec

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
class DeviceParameters:
    """The parameters in the artifact's order: on the device, or as constants."""

    leaves: list[jax.Array]
    constants: dict[int, Tensor]
    """By position among all parameters."""
    host: "tuple[weakref.ref[object], ...]" = ()
    """The memory that the leaves were put on the device from; on the CPU it is theirs. Where
    parameters are mapped, it is the mapping."""

    @staticmethod
    def read(
        directory: Path, described: Manifest, sharding: SingleDeviceSharding, context: LoadContext
    ) -> "DeviceParameters":
        """Read the weights tensor by tensor; raises InvalidModel."""
        positions = {name: index for index, name in enumerate(described.parameters)}
        leaves: dict[int, jax.Array] = {}
        constants: dict[int, Tensor] = {}
        host: list[weakref.ref[object]] = []
        record = described.files[manifest.WEIGHTS]
        read = weights.read_mapped if context.mmap_parameters else weights.read
        for name, tensor in read(directory, manifest.WEIGHTS, record):
            context.check_cancelled()
            if tensor.nbytes <= CONSTANT_BYTES:
                # A copy, since JAX keeps constants, and a mapping would stay with them.
                constants[positions[name]] = tensor.copy()
            else:
                # Waiting keeps no more than one tensor twice. On the CPU it is used in place.
                leaves[positions[name]] = jax.device_put(tensor, sharding).block_until_ready()
                host.append(weakref.ref[object](tensor.base))
        ordered = [leaves[index] for index in sorted(leaves)]
        return DeviceParameters(ordered, constants, tuple(host))

    @property
    def leaves_bytes(self) -> int:
        """Return the size of those on the device."""
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def constants_bytes(self) -> int:
        """Return the size of those that each executable has a copy of."""
        return sum(constant.nbytes for constant in self.constants.values())


@dataclass(frozen=True, slots=True)
class Program:
    """The executable of one bucket, and how long it takes."""

    call: Callable[[Sequence[jax.Array], Arrays], list[jax.Array]]
    seconds: float
    """The quickest run: loads side by side disturb one another while they measure."""


@dataclass(frozen=True, slots=True)
class Programs:
    """The executables of a model by bucket."""

    by_bucket: Mapping[int, Program]
    memory: ModelMemory
    compile_seconds: float


def compile_programs(
    exported: Exported,
    parameters: DeviceParameters,
    signature: Signature,
    sharding: SingleDeviceSharding,
    context: LoadContext,
) -> Programs:
    """Compile and execute every bucket, so that no request has to wait for either."""
    started = time.perf_counter()
    buckets = buckets_up_to(signature.max_batch_size) if signature.max_batch_size else (FIXED,)
    compiled: dict[int, jax.stages.Compiled] = {}
    for step, bucket in enumerate(buckets, start=1):
        context.check_cancelled()
        context.on_stage(Stage("compiling", step, len(buckets)))
        arguments = _abstract(signature.inputs, bucket, sharding)
        # A jitted function keeps what it lowered, constants and all: one for each bucket.
        function = jax.jit(_function(exported, parameters.constants))
        compiled[bucket] = function.lower(parameters.leaves, arguments).compile()
    compile_seconds = time.perf_counter() - started
    programs: dict[int, Program] = {}
    for step, (bucket, executable) in enumerate(compiled.items(), start=1):
        context.check_cancelled()
        context.on_stage(Stage("warming", step, len(buckets)))
        programs[bucket] = warmed(executable, parameters.leaves, signature.inputs, bucket)
    memory = _memory(list(compiled.values()), parameters, len(exported.mlir_module_serialized))
    return Programs(programs, memory, compile_seconds)


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
        args, kwargs = jax.tree.unflatten(exported.in_tree, [*parameters, *inputs])
        # Only ever called inside jit: outside, each call leaks some megabytes.
        return jax.tree.leaves(exported.call(*args, **kwargs))

    return model


def _abstract(
    specs: Sequence[TensorSpec], bucket: int, sharding: SingleDeviceSharding
) -> list[jax.ShapeDtypeStruct]:
    return [
        jax.ShapeDtypeStruct(
            bucket_shape(spec, bucket),
            spec.datatype.dtype,
            sharding=sharding,
        )
        for spec in specs
    ]


def bucket_shape(spec: TensorSpec, bucket: int) -> tuple[int, ...]:
    """Return the shape that the executable of a bucket takes."""
    return (bucket, *spec.shape[1:]) if bucket != FIXED else spec.shape


def warmed(
    executable: jax.stages.Compiled,
    leaves: Sequence[jax.Array],
    specs: Sequence[TensorSpec],
    bucket: int,
) -> Program:
    """Execute until the first runs, which are slow, are over; then measure while that is quick."""
    arguments: Arrays = [
        np.zeros(bucket_shape(spec, bucket), spec.datatype.dtype) for spec in specs
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
        np.asarray(output)
    return time.perf_counter() - started


def _memory(
    compiled: Sequence[jax.stages.Compiled], parameters: DeviceParameters, module_bytes: int
) -> ModelMemory:
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
        # What makes a module large is its constants, which XLA keeps once for all executables.
        executables_bytes=executables + module_bytes,
    )
