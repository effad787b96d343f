"""The compiler process: `python -P -m xlaserve.offline.targets.child`.

It reads jobs from stdin, one JSON object per line, and writes the results to stdout in the same
way, until stdin ends. Its environment is that of `environment.of`; its JAX serves no requests.
"""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import io
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from xlaserve.errors import InvalidModel, XlaserveError
from xlaserve.generation import loading as generators
from xlaserve.generation.in_place import Memory
from xlaserve.generation.lowering import Wanted, why_not
from xlaserve.model_config.config import ModelConfig
from xlaserve.model_config.text import read_config
from xlaserve.offline.targets import environment, wheels
from xlaserve.offline.targets.ahead import Ahead
from xlaserve.offline.targets.jobs import Compiled, CompiledProgram, Job, Problem, Reserved
from xlaserve.offline.targets.results import Results, key_of
from xlaserve.offline.targets.topology import Device, open_devices
from xlaserve.process.endings import end_with_parent
from xlaserve.runtime.devices import jax_runtime
from xlaserve.runtime.devices import target_kinds as kinds
from xlaserve.runtime.devices.sites import Site
from xlaserve.runtime.devices.target_kinds import Target
from xlaserve.runtime.loaded import ModelMemory
from xlaserve.runtime.programs.footprint import Footprint


class Child:
    """Compiles jobs for the targets of one platform."""

    def __init__(self) -> None:
        jax_runtime.start("cpu")
        self._devices: dict[tuple[str, int], Sequence[Device]] = {}

    def compiled(self, job: Job) -> Compiled:
        """Compile a job; failures are reported in the result."""
        try:
            target = kinds.named(job.target)
            return self.compile(job, target, dict(wheels.versions(target.platform)))
        except XlaserveError as error:
            return Compiled(job, problem=Problem(str(error)))
        # Compilers raise exceptions of many types.
        except Exception as error:
            return Compiled(job, problem=problem_of(error))

    def compile(self, job: Job, target: Target, versions: dict[str, str]) -> Compiled:
        """Compile a job; raises the exceptions of the compiler."""
        present = self.opened(target, job.count)
        if generators.is_there(Path(job.path)):
            return self._generator(job, target, versions, present)
        model = Ahead.read(Path(job.path), config_of(job), target.platform, present)
        programs = tuple(_programs(job, target, versions, model))
        copy = model.copies[0]
        return Compiled(
            job,
            programs,
            _reserved(model.memory, copy.site),
            model.plan.rows.max_batch_size,
            copy.in_flight,
            copy.leaves_bytes,
            versions,
            model.plan.rows.notice,
        )

    def _generator(
        self, job: Job, target: Target, versions: dict[str, str], present: Sequence[Device]
    ) -> Compiled:
        model = generators.Ahead.of(Path(job.path), config_of(job), target.platform, present)
        programs, temporaries = [], 0
        for wanted, found in _compiled_generator(job, target, versions, model):
            taken = found.footprint
            memory = Memory(taken.aliased_bytes, taken.temporaries_bytes, taken.workspace_bytes)
            if not why_not(wanted, memory, model.lowering.cache_bytes):
                temporaries = max(temporaries, memory.booked)
            programs.append(found)
        held = model.lowering.memory(temporaries, model.host_bytes)
        return Compiled(
            job,
            tuple(programs),
            _reserved(held, model.site),
            parameters_bytes=held.parameters_bytes // len(model.site.devices),
            versions=versions,
        )

    def opened(self, target: Target, count: int) -> Sequence[Device]:
        """Open this many devices of a target; raises DeviceUnavailable."""
        key = target.name, count
        if key not in self._devices:
            self._devices[key] = open_devices(target, count)
        return self._devices[key]


@dataclass(frozen=True, slots=True)
class _Compiler:
    """Compiles a job's programs, or finds their footprints in the cache."""

    job: Job
    target: Target
    versions: Mapping[str, str]
    results: Results

    @classmethod
    def of(cls, job: Job, target: Target, versions: Mapping[str, str]) -> "_Compiler":
        directory = Path(job.cache_directory) if job.cache_directory else None
        return cls(job, target, versions, Results(directory))

    def program(
        self,
        lowered: Any,
        site: Site,
        rows: int,
        sizes: tuple[int, ...],
        footprint_of: Callable[[Any], Footprint],
    ) -> CompiledProgram:
        """Return a program's footprint; raises the exceptions of the compiler."""
        target, count = self.target, self.job.count
        flags = environment.flags_of(target, count, self.job.flags)
        devices = f"{target.topology(count)} {dict(target.options)} {target.config}"
        options = self.job.options
        given = options.key(site.platform, len(site.devices))
        module = _module_of(lowered)
        choices = environment.choices(site.platform, module)
        key_parts = (
            *flags,
            *(f"{name}={value}" for name, value in given.items()),
            *map(str, choices),
        )
        key = key_of(module, devices, self.versions, key_parts)
        footprint, seconds = self.results.get(key), 0.0
        if footprint is None:
            started = time.perf_counter()
            found = [footprint_of(options.compiled(lowered, site, more)) for more in choices]
            seconds = time.perf_counter() - started
            footprint = reduce(Footprint.or_larger, found)
            self.results.put(key, footprint)
        return CompiledProgram(key, site.device_names[0], rows, sizes, footprint, seconds)


def _programs(
    job: Job, target: Target, versions: Mapping[str, str], model: Ahead
) -> Iterator[CompiledProgram]:
    compiler = _Compiler.of(job, target, versions)
    for place in model.work():
        copy, rows, sizes = place
        of = partial(Footprint.of, accelerated=copy.site.is_accelerator)
        found = compiler.program(model.lowered(place), copy.site, rows, sizes, of)
        model.note(place, found.footprint)
        yield found


def _compiled_generator(
    job: Job, target: Target, versions: Mapping[str, str], model: generators.Ahead
) -> Iterator[tuple[Wanted, CompiledProgram]]:
    compiler, site = _Compiler.of(job, target, versions), model.site

    for wanted in model.lowering.programs():

        def footprint_of(executable: Any, wanted: Wanted = wanted) -> Footprint:
            return Footprint.of(
                executable, accelerated=site.is_accelerator, kept_bytes=wanted.kept_bytes
            )

        rows, sizes = model.sizes(wanted)
        yield wanted, compiler.program(wanted.lowered(), site, rows, sizes, footprint_of)


def _reserved(memory: ModelMemory, site: Site) -> Reserved:
    return Reserved(
        memory.parameters_bytes,
        memory.constants_bytes,
        memory.temporaries_bytes,
        memory.executables_bytes,
        dict(memory.on_devices(site.device_names[0])),
        memory.states_bytes,
    )


def _module_of(lowered: Any) -> bytes:
    written = io.BytesIO()
    lowered.compiler_ir("stablehlo").operation.write_bytecode(written)
    return written.getvalue()


def config_of(job: Job) -> ModelConfig:
    """Return the configuration of a job's model; raises InvalidModel."""
    config = read_config(Path(job.config_directory)) if job.config_directory else ModelConfig()
    if config.is_ensemble:
        raise InvalidModel("it is an ensemble, whose steps are compiled separately")
    return replace(config, parameters={**config.parameters, **job.parameters})


def main(child: Child, jobs: BinaryIO, answers: BinaryIO) -> None:
    """Compile jobs until the end of input."""
    for line in jobs:
        done = child.compiled(msgspec.json.decode(line, type=Job))
        answers.write(msgspec.json.encode(done) + b"\n")
        answers.flush()


def serve(make: Callable[[], Child]) -> None:
    """Read jobs from stdin, and keep stdout for the answers alone."""
    # Redirect the output of plugins to stderr.
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        main(make(), sys.stdin.buffer, answers)


_MAX_CHARACTERS = 300

_OPERATIONS = tuple(
    re.compile(pattern)
    for pattern in (
        r"translation rule for primitive '(?P<operation>[\w.-]+)' not found",
        r"No FFI handler registered for (?P<operation>[\w.$-]+)",
        r"Custom emitter for (?P<operation>[\w.$-]+) not found",
        # %dot_general.1 = s64[64,64]{1,0} dot(...)
        r"rewriting is not implemented: %\S+ = \S+ (?P<operation>[\w-]+)\(",
        r"Unexpected operand type for (?P<operation>\w+)",
    )
)
"""Matches errors of JAX's lowering, and of the CUDA and TPU compilers."""

_LOCATION = re.compile(r"Suspected Python Code Location:\s+(?P<place>/[^\s:]+:\d+)")


def problem_of(error: BaseException) -> Problem:
    """Extract the problem from an exception of lowering or compilation."""
    text = str(error) or type(error).__name__
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reason = lines[0] if lines else type(error).__name__
    if len(reason) > _MAX_CHARACTERS:
        reason = f"{reason[:_MAX_CHARACTERS]}..."
    found = (match["operation"] for pattern in _OPERATIONS if (match := pattern.search(text)))
    location = _LOCATION.search(text)
    return Problem(reason, next(found, ""), location["place"] if location else "")


if __name__ == "__main__":
    end_with_parent()
    serve(Child)
