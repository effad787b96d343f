"""The process that compiles for loads: `python -P -m xlaserve.models.compilers.child`.

It reads jobs from stdin and writes programs to stdout until stdin ends, or its parent does. It is
niced: requests come first.
"""

# Much of jax is typed, but not all that is called here.
# mypy: disallow-untyped-calls=False

import ctypes
import hashlib
import os
import signal
import sys
from types import MappingProxyType
from typing import Any, BinaryIO

import jax
import jax.export
import jax.numpy as jnp
import msgspec
from jax.experimental import serialize_executable
from jax.sharding import SingleDeviceSharding

from xlaserve.models import cache_key, jax_runtime
from xlaserve.models.compilation import flags
from xlaserve.models.compilers.jobs import READY, Answer, Array, Job, Packed
from xlaserve.models.executables import function
from xlaserve.models.packing import Packing, Place
from xlaserve.models.sites import Site

_NICENESS = 10
_PR_SET_PDEATHSIG = 1


class Child:
    """Compiles the programs of one computation after another."""

    def __init__(self) -> None:
        jax_runtime.start("cpu")
        self._computation = ""
        self._exported: Any = None

    def take(self, computation: str, artifact: bytes) -> None:
        """Have the artifact of a computation, and no other any more."""
        if self._exported is not None:
            # The caches of JAX keep the artifacts that they saw, with their constants.
            object.__setattr__(self._exported, "mlir_module_serialized", b"")
        self._exported, self._computation = None, ""
        self._exported = jax.export.deserialize(bytearray(artifact))
        self._computation = computation

    def compiled(self, job: Job) -> tuple[Answer, bytes]:
        """Return a program, or why there is none."""
        if self._computation != job.computation:
            return Answer(refused="its artifact is not there"), b""
        present = jax.local_devices(backend="cpu")
        if job.device >= len(present):
            return Answer(refused=f"there are {len(present)} devices of {job.device + 1}"), b""
        site = Site([present[job.device]], platform="cpu")
        leaves, inputs = _abstract(job.leaves, site), _abstract(job.inputs, site)
        packing = _packing(job.packing)
        program = cache_key.program(
            site, job.computation, packing.text, [*leaves, *inputs], outputs=None
        )
        environment = cache_key.environment(site, {}, flags())
        found = {**program, **environment}
        if difference := cache_key.first_difference({**job.program, **job.environment}, found):
            return Answer(refused=difference), b""
        try:
            lowered = jax.jit(function(self._exported, packing)).lower(leaves, inputs)
            executable = lowered.compile()
        # What a compiler meets in a model has no class of its own.
        except Exception as error:
            return Answer(error=_text(error)), b""
        return _written(executable, program, environment)


def _written(
    executable: jax.stages.Compiled, program: dict[str, str], environment: dict[str, str]
) -> tuple[Answer, bytes]:
    try:
        data, _, _ = serialize_executable.serialize(executable)
    # Not every program can be written, and each kind fails with an error of its own.
    except Exception as error:
        return Answer(refused=f"it cannot be serialized: {_text(error)}"), b""
    sha256 = hashlib.sha256(data).hexdigest()
    return Answer(program, environment, len(data), sha256), data


def _abstract(arrays: tuple[Array, ...], site: Site) -> list[jax.ShapeDtypeStruct]:
    sharding = SingleDeviceSharding(site.devices[0])
    return [
        jax.ShapeDtypeStruct(array.shape, jnp.dtype(array.dtype), sharding=sharding)
        for array in arrays
    ]


def _packing(packed: Packed) -> Packing:
    return Packing(
        packed.count,
        tuple((jnp.dtype(name), elements) for name, elements in packed.buffers),
        MappingProxyType({index: Place(*place) for index, place in packed.places.items()}),
    )


def _text(error: Exception) -> str:
    return str(error).strip() or type(error).__name__


def main(child: Child, jobs: BinaryIO, answers: BinaryIO) -> None:
    """Do jobs until there is none."""
    answers.write(READY)
    answers.flush()
    for line in jobs:
        job = msgspec.json.decode(line, type=Job)
        answer, data = _done(child, job, jobs.read(job.artifact_bytes))
        answers.write(msgspec.json.encode(answer) + b"\n")
        answers.write(data)
        answers.flush()


def _done(child: Child, job: Job, artifact: bytes) -> tuple[Answer, bytes]:
    try:
        if artifact:
            child.take(job.computation, artifact)
        return child.compiled(job)
    # The server compiles what is not understood here.
    except Exception as error:
        return Answer(refused=_text(error)), b""


def _end_with_parent(parent: int) -> None:
    """Have the system kill this process when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os._exit(0)


def serve(parent: int) -> None:
    """Do the jobs that stdin has, and answer on stdout alone."""
    _end_with_parent(parent)
    # Of a terminal they are meant for the server, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICENESS)
    # What is printed is not for the one who reads the answers.
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        main(Child(), sys.stdin.buffer, answers)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
