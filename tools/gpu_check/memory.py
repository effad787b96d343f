"""Exhausted device memory: during a load, and during a request."""

# jax is only partly typed.
# mypy: disallow-untyped-calls=False

import math
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from jax.errors import JaxRuntimeError

from gpu_check.device import Device, Options, inputs_of, let_go
from gpu_check.findings import Finding, judged, unknown
from xlaserve.errors import OutOfMemory

_PIECE_BYTES = 256 << 20
_LEFT_BYTES = 64 << 20
"""Bytes left free, too few for the request."""


def check_memory(device: Device, options: Options) -> Iterator[Finding]:
    """Ask for more memory than there is; the refusal must leave the server unaffected."""
    if not device.limit_bytes:
        yield unknown("out of memory", "load", "the device shares the memory of the host")
        yield unknown("out of memory", "request", "the device shares the memory of the host")
        return
    used = device.bytes_in_use()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "greedy.jaxexp"
        path.write_bytes(_greedy(device, math.isqrt(device.limit_bytes // 4) + 1))
        yield _refused("load", lambda: let_go(device.load(path, "greedy")), device, used)
        # Needs a quarter of the memory: it loads, but cannot run once the rest is taken.
        path.write_bytes(_greedy(device, math.isqrt(device.limit_bytes // 16)))
        yield _request(device, path, used)
    model = device.load(options.directories[0], "after")
    model.execute(inputs_of(model, 1))
    let_go(model)
    yield judged("out of memory", "afterwards", True, "a model loads and answers")


def _request(device: Device, path: Path, used: int) -> Finding:
    model = device.load(path, "greedy")
    inputs, held = inputs_of(model, 1), _filled(device)
    finding = _refused("request", lambda: model.execute(inputs), device, device.bytes_in_use())
    held.clear()
    model.execute(inputs)
    let_go(model)
    return finding


def _refused(subject: str, call: "object", device: Device, used: int) -> Finding:
    assert callable(call)
    try:
        call()
    except OutOfMemory as error:
        left = device.bytes_in_use() - used
        return judged(
            "out of memory", subject, left <= 0, f"{error} ({left} bytes left)", left_bytes=left
        )
    return judged("out of memory", subject, False, "not refused")


def _filled(device: Device) -> list[jax.Array]:
    """Allocate the device's memory, except for a small rest."""
    there = jax.local_devices(backend=device.platform)[0]
    held: list[jax.Array] = []
    while device.limit_bytes - device.bytes_in_use() > _PIECE_BYTES + _LEFT_BYTES:
        try:
            held.append(jax.device_put(np.zeros(_PIECE_BYTES, np.uint8), there))
            held[-1].block_until_ready()
        except JaxRuntimeError:
            break
    return held


def _greedy(device: Device, size: int) -> bytes:
    # XLA has to materialise the operand of a sort; it would fuse products and sums.
    function = jax.jit(lambda x: jax.numpy.sort(x[:, None] * x[None, :], axis=0).sum())
    argument = jax.ShapeDtypeStruct((size,), np.float32)
    exported = jax.export.export(function, platforms=[device.platform])(argument)
    return bytes(exported.serialize())
