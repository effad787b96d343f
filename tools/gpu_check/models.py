"""Checks every model of a repository: answers, memory, speed, gain of batches."""

# jax is only partly typed.
# mypy: disallow-untyped-calls=False

import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import jax
import numpy as np

from gpu_check.device import Device, Options, calls_per_second, inputs_of, let_go
from gpu_check.findings import Finding, judged, measured, unknown
from gpu_check.tolerances import off
from xlaserve.artifact import artifact, manifest
from xlaserve.runtime.devices import sites
from xlaserve.runtime.devices.device_parameters import DeviceParameters
from xlaserve.runtime.devices.placement import Placement
from xlaserve.runtime.loaded import LoadedModel, ModelMemory
from xlaserve.tensors import Tensor

_DEPTH = 16
"""Successive matrix products of a model: examples have two, networks more."""
_LEAST_OF_BARE = 0.5
"""Minimum speed relative to a bare loop: the server also checks, pads and names tensors."""


def check_models(device: Device, options: Options) -> Iterator[Finding]:
    """Load each model on the device and on the CPU, compare and measure both, then unload."""
    for directory in options.directories:
        yield from _check(device, options, directory, directory.parent.name)


def _check(device: Device, options: Options, directory: Path, name: str) -> Iterator[Finding]:
    used = device.bytes_in_use()
    started = time.perf_counter()
    model = device.load(directory, name)
    seconds = time.perf_counter() - started
    grown = device.bytes_in_use() - used
    reference = device.load(directory, name, on="cpu")
    sizes = [bucket.rows for bucket in model.info.buckets]
    worst = max(_difference(model, reference, rows) for rows in sizes)
    let_go(reference)
    info = model.info
    yield judged(
        "answers", name, worst <= 1, f"off by {worst:.2g} of what their datatype explains at most",
        of_allowed=worst, load_seconds=seconds, compile_seconds=info.compile_seconds,
    )  # fmt: skip
    speeds = {
        rows: calls_per_second(partial(model.execute, inputs_of(model, rows)), options.seconds)
        for rows in sizes
    }
    yield from _speed(model, name, speeds)
    bare = _bare_calls_per_second(directory, device, inputs_of(model, sizes[0]), options.seconds)
    part = speeds[sizes[0]] / bare
    said = f"{speeds[sizes[0]]:.0f} calls/s, {part:.2f} of a jitted function's"
    values = {"calls_per_second": speeds[sizes[0]], "bare_calls_per_second": bare}
    if device.limit_bytes:
        yield judged("beside a bare loop", name, part > _LEAST_OF_BARE, said, **values)
    else:
        # No verdict: on a machine with shared cores the speed is not reliable.
        yield measured("beside a bare loop", name, said, **values)
    let_go(model)
    left = device.bytes_in_use() - used
    yield _reserved(device, name, info.memory, grown, left)


def _reserved(device: Device, name: str, memory: ModelMemory, grown: int, left: int) -> Finding:
    parameters, booked = memory.parameters_bytes, memory.total_bytes
    said = (
        f"{booked} bytes reserved, {parameters} of them parameters; the device grew by {grown}, "
        f"{left} left after the unload"
    )
    if not device.limit_bytes:
        return unknown("reserved memory", name, said)
    return judged(
        "reserved memory", name, parameters <= grown <= booked and left == 0, said,
        parameters_bytes=parameters, reserved_bytes=booked, grown_bytes=grown, left_bytes=left,
    )  # fmt: skip


def _speed(model: LoadedModel, name: str, speeds: Mapping[int, float]) -> Iterator[Finding]:
    rows_per_second = {rows: speed * max(1, rows) for rows, speed in speeds.items()}
    alone, best = next(iter(rows_per_second.values())), max(rows_per_second.values())
    yield measured(
        "batching", name, f"{best:.0f} rows/s at best, {best / alone:.1f} times as many as alone; "
        f"batches up to {model.batch_limit}",
        rows_per_second=rows_per_second, batch_limit=model.batch_limit,
    )  # fmt: skip


def _difference(model: LoadedModel, reference: LoadedModel, rows: int) -> float:
    """Return the error of outputs, relative to what their datatype explains (tolerances)."""
    inputs = inputs_of(model, rows)
    found, expected = model.execute(inputs), reference.execute(inputs)
    return max(off(found[name], expected[name], _DEPTH) for name in expected)


def _bare_calls_per_second(
    directory: Path, device: Device, inputs: Mapping[str, Tensor], seconds: float
) -> float:
    """Return the calls per second of a jitted function in a loop."""
    described = manifest.read(directory)
    exported = artifact.read(directory, described)
    (site,) = sites.layout(Placement(device.platform)).sites
    parameters = DeviceParameters.read(directory, described, [site], lambda: None)
    leaves = list(parameters.packing.unpack(parameters.leaves[0]))
    leaves = jax.device_put(leaves, site.outputs)
    values = [inputs[spec.name] for spec in described.inputs]

    @jax.jit
    def bare(*arrays: jax.Array) -> list[jax.Array]:
        args, kwargs = jax.tree.unflatten(exported.in_tree, arrays)
        return jax.tree.leaves(exported.call(*args, **kwargs))

    def call() -> None:
        for output in bare(*leaves, *values):
            np.asarray(output)

    call()
    return calls_per_second(call, seconds)
