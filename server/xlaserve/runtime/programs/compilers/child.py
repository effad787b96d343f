"""A compiler process: `python -P -m xlaserve.runtime.programs.compilers.child`.

It reads jobs from stdin and writes programs to stdout until stdin is closed or its parent exits.
The first job that requests it lowers the process's priority: requests take precedence.
"""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import hashlib
import os
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import jax
import jax.export
import jax.numpy as jnp
import msgspec
from jax.sharding import SingleDeviceSharding

from xlaserve.process.confinement import confine, limit_processor
from xlaserve.process.endings import end_with_parent
from xlaserve.runtime.devices import jax_runtime
from xlaserve.runtime.devices.packing import Packing, Place
from xlaserve.runtime.devices.sites import Site
from xlaserve.runtime.programs import cache_key, serialized, trying
from xlaserve.runtime.programs.compilation import flags
from xlaserve.runtime.programs.compilers.jobs import READY, Answer, Array, Job, Packed, Proof, Trial
from xlaserve.runtime.programs.compilers.limits import FILE_BYTES, OPEN_FILES
from xlaserve.runtime.programs.executables import function
from xlaserve.runtime.programs.proving import answered, digest_of

_NICENESS = 10
_THREADS = Path("/proc/self/task")


class Child:
    """Runs jobs; holds the artifact of one computation at a time."""

    def __init__(self) -> None:
        jax_runtime.start("cpu")
        self._computation = ""
        self._module = ""
        """Digest of the artifact's module."""
        self._exported: Any = None

    def take(self, computation: str, artifact: bytes) -> None:
        """Replace the current artifact with the artifact of another computation."""
        if self._exported is not None:
            # JAX's caches keep a reference to the previous artifact and its constants: free its
            # bytes.
            object.__setattr__(self._exported, "mlir_module_serialized", b"")
        self._exported, self._computation = None, ""
        self._exported = jax.export.deserialize(bytearray(artifact))
        self._module = digest_of(self._exported)
        self._computation = computation

    def done(self, job: Job) -> tuple[Answer, bytes]:
        """Run a job; return a program, a verdict or an error."""
        if self._computation != job.computation:
            return Answer(refused="its artifact is missing"), b""
        return self.compiled(job) if job.proof is None else self._proved(job, job.proof)

    def tried(self, job: Job, parameters: bytes) -> tuple[Answer, bytes]:
        """Execute the artifact for a row trial; this may crash the process."""
        if self._computation != job.computation or job.trial is None:
            return Answer(refused="its artifact is missing"), b""
        return self._tried(job, job.trial, parameters)

    def _tried(self, job: Job, trial: Trial, parameters: bytes) -> tuple[Answer, bytes]:
        model = function(self._exported, _packing(job.packing))
        leaves = trying.leaves_of(job.leaves, parameters)
        try:
            found = trying.tried(model, leaves, trial, limit_processor, trying.say)
        # JAX and XLA raise errors of many classes for an invalid model.
        except Exception as error:
            return Answer(error=_text(error)), b""
        finally:
            limit_processor(0)
        return _whole(msgspec.msgpack.encode(found), dict(job.program), dict(job.environment))

    def _proved(self, job: Job, proof: Proof) -> tuple[Answer, bytes]:
        if self._module != proof.module:
            return Answer(refused="its artifact belongs to another model"), b""
        site = Site([jax.local_devices(backend="cpu")[0]], platform="cpu")
        environment = cache_key.environment(site, {}, flags())
        if difference := cache_key.first_difference(job.environment, environment):
            return Answer(refused=difference), b""
        data = msgspec.json.encode(answered(self._exported, proof))
        return _whole(data, {}, environment)

    def compiled(self, job: Job) -> tuple[Answer, bytes]:
        """Compile; return a program or an error."""
        present = jax.local_devices(backend="cpu")
        if job.device >= len(present):
            return Answer(refused=f"it needs {job.device + 1} devices, got {len(present)}"), b""
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
        # The compiler raises errors of many classes for an invalid model.
        except Exception as error:
            return Answer(error=_text(error)), b""
        return _written(executable, program, environment)


def _written(
    executable: jax.stages.Compiled, program: dict[str, str], environment: dict[str, str]
) -> tuple[Answer, bytes]:
    try:
        data = serialized.written(executable)
    # Some programs cannot be serialized; the class of the error depends on the program.
    except Exception as error:
        return Answer(refused=f"it cannot be serialized: {_text(error)}"), b""
    return _whole(data, program, environment)


def _whole(
    data: bytes, program: dict[str, str], environment: dict[str, str]
) -> tuple[Answer, bytes]:
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
        frozenset(packed.turned),
    )


def _text(error: Exception) -> str:
    return str(error).strip() or type(error).__name__


def main(child: Child, jobs: BinaryIO, answers: BinaryIO) -> None:
    """Run jobs until the end of input."""
    is_niced = False
    answers.write(READY)
    answers.flush()
    for line in jobs:
        job = msgspec.json.decode(line, type=Job)
        artifact = jobs.read(job.artifact_bytes)
        parameters = jobs.read(job.trial.parameter_bytes) if job.trial is not None else b""
        if job.is_niced and not is_niced:
            _nice()
            is_niced = True
        began = time.process_time()
        answer, data = _done(child, job, artifact, parameters)
        answer = replace(answer, processor_seconds=time.process_time() - began)
        answers.write(msgspec.json.encode(answer) + b"\n")
        answers.write(data)
        answers.flush()


def _done(child: Child, job: Job, artifact: bytes, parameters: bytes) -> tuple[Answer, bytes]:
    try:
        if artifact:
            child.take(job.computation, artifact)
        return child.done(job) if job.trial is None else child.tried(job, parameters)
    # After any other error the server compiles the program itself.
    except Exception as error:
        return Answer(refused=_text(error)), b""


def _nice() -> None:
    """Lower the priority of all threads, including XLA's, for the rest of the process."""
    wanted = os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS
    for thread in _THREADS.iterdir() if _THREADS.exists() else ():
        with suppress(OSError):  # The thread has ended.
            os.setpriority(os.PRIO_PROCESS, int(thread.name), wanted)
    # On systems without a niceness per thread, the process has one.
    os.setpriority(os.PRIO_PROCESS, 0, wanted)


def serve(parent: int, memory_bytes: int) -> None:
    """Run the jobs from stdin; only answers are written to stdout."""
    end_with_parent(parent)
    # Anything else that prints to stdout must not corrupt the answers.
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        child = Child()
        # JAX has allocated its own memory by now. The server also watches resident memory.
        confine(memory_bytes, file_bytes=FILE_BYTES, open_files=OPEN_FILES)
        main(child, sys.stdin.buffer, answers)


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
