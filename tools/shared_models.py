"""Serve many small models that share a few computations, and print their cost.

The models are fine-tunes: all have different parameters. Prints the CPU time of this process and
its compile processes until all models are ready, and, per further model of a computation, the CPU
time and the memory in addition to its parameters.
"""

import argparse
import asyncio
import gc
import itertools
import os
import resource
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from xlaserve.app.server import Application
from xlaserve.artifact import manifest, weights
from xlaserve.authoring.export import export_model
from xlaserve.process import allocator, log
from xlaserve.settings import Settings
from xlaserve.settings.choices import Device, ModelControlMode
from xlaserve.tensors import Tensor

COMPUTATIONS = 4
_WIDTH = 128


def _sizes(kind: int) -> tuple[int, ...]:
    return (64, _WIDTH, _WIDTH, 10 + kind)


def _export(path: Path, kind: int) -> None:
    """Write a perceptron of 105 KB with one of four output layers."""
    params: list[Tensor] = []
    params += [np.zeros(shape, np.float32) for shape in itertools.pairwise(_sizes(kind))]
    params += [np.zeros(size, np.float32) for size in _sizes(kind)[1:]]

    def perceptron(params: list[jax.Array], x: jax.Array) -> jax.Array:
        for weight, bias in zip(params[:3], params[3:], strict=True):
            x = jax.numpy.tanh(x @ weight + bias[None, :])
        return x

    inputs = {"x": ("FP32", [-1, 64])}
    export_model(perceptron, params, inputs, path, outputs=["y"], max_batch_size=32)


def tune(exported: Path, path: Path, number: int) -> None:
    """Copy an exported model with different parameters."""
    shutil.copytree(exported, path)
    random = np.random.default_rng(number)
    described = manifest.read(path)
    tensors: dict[str, Tensor] = {
        name: np.asarray(random.standard_normal(tensor.shape, np.float32))
        for name, tensor in parameters_of(path).items()
    }
    record = weights.write(path / manifest.WEIGHTS, tensors)
    files = {**described.files, manifest.WEIGHTS: record}
    manifest.write(path, replace(described, files=files))


def parameters_of(path: Path) -> dict[str, Tensor]:
    """Return the parameters of a version directory, by name."""
    return {name: np.asarray(tensor) for name, tensor in weights.read(path, manifest.WEIGHTS)}


def _resident() -> int:
    gc.collect()
    allocator.trim()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def _measure(root: Path, scratch: Path, count: int) -> None:
    settings = Settings(
        repository=root,
        scratch_directory=scratch,
        model_control_mode=ModelControlMode.EXPLICIT,
        grpc_endpoint="port:0",
        http_endpoint="none",
        compilation_cache_directory="none",
        background_compile=False,
        device=Device.CPU,
    )
    application = Application(settings)
    async with application.running():
        await application.load()
        started = time.process_time()
        for number in range(COMPUTATIONS):
            await application.control.load(f"model-{number}")
        first, before = time.process_time() - started, _resident()
        again = time.process_time()
        for number in range(COMPUTATIONS, count):
            await application.control.load(f"model-{number}")
        further = time.process_time() - again
        grown = (_resident() - before) / (count - COMPUTATIONS)
        _, instance = application.registry.resolve(f"model-{count - 1}")
        memory = instance.info.memory
    compiled = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    whole = first + further + compiled
    print(f"{count} models of {COMPUTATIONS} computations: {whole:.1f} CPU-seconds")
    print(f"  the first {COMPUTATIONS}: {first:.2f} s, with all their batch sizes")
    print(f"  besides, by processes that compile, with their start: {compiled:.2f} s")
    print(f"  each further one: {1e3 * further / (count - COMPUTATIONS):.2f} ms of CPU")
    beyond = (grown - memory.parameters_bytes) / 1024
    print(f"  {beyond:.1f} KB beyond its {memory.parameters_bytes / 1024:.0f} KB of parameters")


def main() -> int:
    """Write the models, start the server, and print its cost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=1000)
    arguments = parser.parse_args()
    log.configure("error")
    with tempfile.TemporaryDirectory() as folder:
        root, scratch = Path(folder, "models"), Path(folder, "scratch")
        scratch.mkdir()
        for kind in range(COMPUTATIONS):
            _export(Path(folder, "exported", str(kind), "1"), kind)
        for number in range(arguments.models):
            exported = Path(folder, "exported", str(number % COMPUTATIONS), "1")
            tune(exported, root / f"model-{number}" / "1", number)
        asyncio.run(_measure(root, scratch, arguments.models))
    return 0


if __name__ == "__main__":
    sys.exit(main())
