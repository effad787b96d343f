"""Compiles, warms and measures a model's executables for every bucket and device."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from math import inf
from typing import TypeAlias

import jax
import numpy as np

from xlaserve.artifact.shapes import OpenDimensions, Sizes
from xlaserve.artifact.signature import Signature
from xlaserve.row_proofs.neighbours import Run
from xlaserve.runtime.devices.sites import Site
from xlaserve.runtime.failures import is_exhausted
from xlaserve.runtime.loaded import Stage
from xlaserve.runtime.programs.executables import Executables, Made, Wanted
from xlaserve.runtime.programs.footprint import Footprint
from xlaserve.runtime.programs.program_table import Arrays, Call, Copy, Program, bucket_shape
from xlaserve.runtime.programs.shared_programs import Lease, SharedProgram
from xlaserve.tensors import Tensor, TensorSpec, describe

_WARM_RUNS = 2
_MEASURED_RUNS = 8
_MEASURED_SECONDS = 0.005

_ALIKE, _ALIKE_SECONDS = 4.0, 100e-6
"""Factor and seconds by which a program's times with two models' parameters may differ for this
model to adopt the other model's measurements."""

_REMEASUREMENTS = 2
_REMEASURE_SECONDS = 0.002
"""Number of repeated measurements of every program, and the time limit of each. Without them, a
disturbance of a few milliseconds would distort the time of a single bucket."""

Place: TypeAlias = "tuple[Copy, int, Sizes]"
"""Identifies a program: its copy, number of rows (`buckets.FIXED` for none) and other sizes."""


class Compiler:
    """Compiles a model's executables bucket by bucket."""

    def __init__(
        self,
        lease: Lease,
        executables: Executables,
        signature: Signature,
        copies: Sequence[Copy],
        dimensions: OpenDimensions,
        *,
        is_measured: bool = True,
        admit: Callable[[int], None] = lambda programs: None,
    ) -> None:
        self._admit = admit
        """Raises OutOfMappings unless this many programs may be compiled."""
        self._lease = lease
        self._executables = executables
        self.seconds = 0.0
        """Compilation time so far, in seconds."""
        self.shared = 0
        """Number of programs that another model had compiled."""
        self._dimensions = dimensions
        self._signature = signature
        self._copies = copies
        self._is_measured = is_measured
        """Whether programs are executed before requests arrive. If the number of loop iterations
        depends on inputs, a warm-up may never end, and its time is meaningless.
        """
        self._is_unlike = False
        """Whether programs are slower or faster with this model's parameters than with another's:
        processors are slow with very small (denormal) numbers.
        """

    @property
    def made(self) -> tuple[int, int]:
        """Return the number of programs that this load has compiled and read from the cache."""
        return self._executables.compiled, self._executables.cached

    def compile(
        self,
        buckets: Sequence[int],
        check_cancelled: Callable[[], None],
        on_stage: Callable[[Stage], None],
    ) -> None:
        """Compile buckets for every copy, warm them up, then make them available to requests."""
        for copy, program in self._made(self.work(buckets), check_cancelled, on_stage):
            copy.add(program)

    def work(self, buckets: Sequence[int]) -> list[Place]:
        """Return the programs that these buckets need, for every copy."""
        return [
            (copy, bucket, sizes)
            for bucket in buckets
            for sizes in self._dimensions.combinations
            for copy in self._copies
        ]

    def compile_one(
        self, bucket: int, sizes: Sizes, check_cancelled: Callable[[], None] = lambda: None
    ) -> tuple[Program, ...]:
        """Compile a program for each copy, without making them available to requests."""
        work = [(copy, bucket, sizes) for copy in self._copies]
        return tuple(program for _, program in self._made(work, check_cancelled))

    def found(self, bucket: int) -> list[tuple[Copy, Program]]:
        """Return other models' programs for a bucket, or an empty list unless every copy has one.

        Executes nothing, because it is called from another model's thread.
        """
        work = self.work([bucket])
        keys = [self._executables.key(self._wanted(*place)) for place in work]
        if self._is_unlike or (there := self._lease.take(keys)) is None:
            return []
        if self._is_measured and any(one.seconds == inf or one.is_cached for one in there):
            self._lease.drop(keys)
            return []
        self.shared += len(there)
        return [
            (place[0], self._program(place, key, one, one.seconds, is_ours=False))
            for place, key, one in zip(work, keys, there, strict=True)
        ]

    def _made(
        self,
        work: Sequence[Place],
        check_cancelled: Callable[[], None] = lambda: None,
        on_stage: Callable[[Stage], None] = lambda stage: None,
    ) -> list[tuple[Copy, Program]]:
        """Compile, execute and measure the programs, or share another model's programs."""
        keys = [self._executables.key(self._wanted(*place)) for place in work]
        try:
            made: list[tuple[SharedProgram, bool]] = []
            for step, place in enumerate(work, start=1):
                check_cancelled()
                if self._lease.find(keys[step - 1]) is None:
                    on_stage(Stage("compiling", step, len(work)))
                made.append(self._shared(place, keys[step - 1 :], check_cancelled))
            ready: list[tuple[Copy, Program]] = []
            fresh: list[int] = []
            for index, (place, key, (one, is_ours)) in enumerate(
                zip(work, keys, made, strict=True)
            ):
                check_cancelled()
                seconds = one.seconds
                if self._is_measured and (self._is_unlike or one.is_cached or seconds == inf):
                    on_stage(Stage("warming", index + 1, len(work)))
                    seconds = self._warm(place, one, is_ours=is_ours)
                    fresh.append(index)
                ready.append((place[0], self._program(place, key, one, seconds, is_ours=is_ours)))
            self._measure(ready, fresh, check_cancelled)
        except BaseException:
            self._lease.drop(keys)
            raise
        for index in fresh:
            one = made[index][0]
            one.seconds = min(one.seconds, ready[index][1].seconds)
        self._executables.log_dropped()
        self.seconds += sum(program.compile_seconds for _, program in ready)
        self.shared += sum(not is_ours for _, is_ours in made)
        if any(is_ours for _, is_ours in made):
            self._lease.announce()
        return ready

    def _shared(
        self, place: Place, keys: Sequence[Hashable], check_cancelled: Callable[[], None]
    ) -> tuple[SharedProgram, bool]:
        """Return the shared program of the first key, compiling it unless another model has.

        `keys` also contains the programs that this load needs next.
        """

        def make(program: SharedProgram) -> None:
            # Check for all missing programs, so that a load fails before it compiles any.
            self._admit(sum(self._lease.find(key) is None for key in keys))
            self._fill(place, program, self._compiled(*place, check_cancelled))

        return self._lease.get(keys[0], make, check_cancelled)

    @staticmethod
    def _fill(place: Place, program: SharedProgram, made: Made) -> None:
        is_accelerator = place[0].site.is_accelerator
        program.footprint = Footprint.of(made.executable, accelerated=is_accelerator)
        program.compile_seconds = made.seconds
        program.is_cached = made.is_cached
        program.executable = made.executable

    def _program(
        self, place: Place, key: Hashable, one: SharedProgram, seconds: float, *, is_ours: bool
    ) -> Program:
        _, bucket, sizes = place
        return Program(
            one.executable,
            bucket,
            sizes,
            seconds if self._is_measured else inf,
            one.compile_seconds if is_ours else 0.0,
            one.footprint,
            key,
        )

    def _warm(self, place: Place, one: SharedProgram, *, is_ours: bool) -> float:
        """Execute a program and return its time; if it fails, compile a replacement."""
        copy, bucket, sizes = place
        specs = self._dimensions.specs(self._signature.inputs, sizes)
        if one.is_cached:
            tried = self._tried(one.executable, copy, specs, bucket)
            if not isinstance(tried, str):
                one.is_cached = False
                return tried
            wanted = self._wanted(*place)
            self._fill(place, one, self._executables.recompile(wanted, tried, is_ours=is_ours))
        return warmed(one.executable, copy.leaves, specs, bucket)

    def _measure(
        self,
        ready: list[tuple[Copy, Program]],
        fresh: Sequence[int],
        check_cancelled: Callable[[], None],
    ) -> None:
        """Repeat measurements if time permits; the fastest run counts.

        The programs at the indexes `fresh` were executed with this model's parameters. Of the
        others, only the one with the fewest rows is measured: if its time is about that of the
        other model, the other model's times are used for all.
        """
        measured = list(fresh)
        others = [index for index in range(len(ready)) if index not in fresh]
        if self._is_measured and others:
            smallest = min(others, key=lambda index: ready[index][1].rows)
            if not self._is_like(*ready[smallest]):
                self._is_unlike = True
                measured = list(range(len(ready)))
                for index in others:
                    copy, program = ready[index]
                    ready[index] = (copy, replace(program, seconds=inf))
        for _ in range(_REMEASUREMENTS if measured else 0):
            check_cancelled()
            for index in measured:
                copy, program = ready[index]
                ready[index] = (copy, self._remeasured(copy, program))

    def _is_like(self, copy: Copy, program: Program) -> bool:
        """Tell whether a program is about as fast as with another model's parameters."""
        specs = self._dimensions.specs(self._signature.inputs, program.sizes)
        quickest = inf
        for _ in range(_WARM_RUNS + _MEASURED_RUNS):
            quickest = min(quickest, self._quickest(copy, program, specs, 1))
            quick, slow = sorted((quickest, program.seconds))
            if slow <= _ALIKE * quick + _ALIKE_SECONDS:
                return True
            if quickest > _MEASURED_SECONDS:
                break
        return False

    def _quickest(
        self, copy: Copy, program: Program, specs: Sequence[TensorSpec], runs: int
    ) -> float:
        arguments = _zeros(specs, program.rows)
        return min(_seconds(program.call, copy.leaves, arguments) for _ in range(runs))

    def _tried(
        self, executable: jax.stages.Compiled, copy: Copy, specs: Sequence[TensorSpec], bucket: int
    ) -> float | str:
        """Return the fastest run of a cached program in seconds, or its error."""
        try:
            seconds = warmed(executable, copy.leaves, specs, bucket)
            return self._wrong_output(executable, copy, specs, bucket) or seconds
        # A program of another version may raise any error.
        except Exception as error:
            if is_exhausted(error):
                raise
            return f"its warm-up failed: {error}"

    def _wrong_output(
        self,
        executable: jax.stages.Compiled,
        copy: Copy,
        specs: Sequence[TensorSpec],
        bucket: int,
    ) -> str:
        """Return how a cached program's output differs from the signature, or an empty string."""
        outputs = executable(copy.leaves, _zeros(specs, bucket))
        for spec, output in zip(self._signature.outputs, outputs, strict=True):
            expected = bucket_shape(spec, bucket)
            if output.dtype != spec.datatype.dtype or not _fits(output.shape, expected):
                found = describe(output.dtype.name, output.shape)
                return f"output '{spec.name}': expected {spec}, got {found}"
        return ""

    def run_on(self, sizes: Sizes, check_cancelled: Callable[[], None] = lambda: None) -> Run:
        """Return a function that executes any number of rows and compiles programs as needed."""
        copy = self._copies[0]
        executables: dict[int, Made] = {}

        def run(tensors: Sequence[Tensor]) -> list[Tensor]:
            rows = len(tensors[0])
            if rows not in executables:
                executables[rows] = self._for_trial(copy, rows, sizes, check_cancelled)
            try:
                outputs = executables[rows].executable(copy.leaves, list(tensors))
                return [np.asarray(output) for output in outputs]
            except Exception as error:
                if is_exhausted(error) or not executables[rows].is_cached:
                    raise
                wanted = self._wanted(copy, rows, sizes)
                executables[rows] = self._executables.recompile(wanted, f"it failed: {error}")
            return run(tensors)

        return run

    def _for_trial(
        self, copy: Copy, rows: int, sizes: Sizes, check_cancelled: Callable[[], None]
    ) -> Made:
        """Return another model's program if there is one, otherwise a temporary program."""
        there = self._lease.find(self._executables.key(self._wanted(copy, rows, sizes)))
        if there is not None and not there.is_cached:
            return Made(there.executable, 0.0)
        return self._compiled(copy, rows, sizes, check_cancelled)

    def _remeasured(self, copy: Copy, program: Program) -> Program:
        """Measure a program again if it is fast enough; keep the fastest run."""
        specs = self._dimensions.specs(self._signature.inputs, program.sizes)
        if program.seconds == inf:
            return replace(program, seconds=warmed(program.call, copy.leaves, specs, program.rows))
        runs = min(_MEASURED_RUNS, int(_REMEASURE_SECONDS / max(program.seconds, 1e-6)))
        if not runs:
            return program
        seconds = self._quickest(copy, program, specs, runs)
        return replace(program, seconds=min(program.seconds, seconds))

    def lowered(self, copy: Copy, bucket: int, sizes: Sizes) -> jax.stages.Lowered:
        """Return a copy's lowered module. The host may lack its devices."""
        return self._executables.lowered(self._wanted(copy, bucket, sizes))

    def prepare(self, copy: Copy, bucket: int, sizes: Sizes) -> float:
        """Store a program in the compilation cache; see `Executables.prepare`."""
        return self._executables.prepare(self._wanted(copy, bucket, sizes))

    def _compiled(
        self, copy: Copy, bucket: int, sizes: Sizes, check_cancelled: Callable[[], None]
    ) -> Made:
        return self._executables.make(
            self._wanted(copy, bucket, sizes),
            is_run=self._is_measured,
            is_niced=not self._lease.is_alone,
            check_cancelled=check_cancelled,
        )

    def _wanted(self, copy: Copy, bucket: int, sizes: Sizes) -> Wanted:
        specs = self._dimensions.specs(self._signature.inputs, sizes)
        arguments = _abstract(specs, bucket, copy.site)
        whole = copy.outputs if copy.site.rules else None
        return Wanted(copy.site, copy.leaves, arguments, whole)


def _abstract(specs: Sequence[TensorSpec], bucket: int, site: Site) -> list[jax.ShapeDtypeStruct]:
    return [
        jax.ShapeDtypeStruct(
            bucket_shape(spec, bucket), spec.datatype.dtype, sharding=site.inputs(bucket)
        )
        for spec in specs
    ]


def _fits(shape: Sequence[int], expected: Sequence[int]) -> bool:
    return len(shape) == len(expected) and all(
        size in (-1, found) for size, found in zip(expected, shape, strict=True)
    )


def warmed(
    executable: "Call | jax.stages.Compiled",
    leaves: Sequence[jax.Array],
    specs: Sequence[TensorSpec],
    bucket: int,
) -> float:
    """Execute until the slow first runs are over; return the fastest run in seconds."""
    arguments = _zeros(specs, bucket)
    runs = [_seconds(executable, leaves, arguments) for _ in range(_WARM_RUNS)]
    while len(runs) < _WARM_RUNS + _MEASURED_RUNS and sum(runs[1:]) < _MEASURED_SECONDS:
        runs.append(_seconds(executable, leaves, arguments))
    return min(runs)


def _zeros(specs: Sequence[TensorSpec], bucket: int) -> Arrays:
    return [np.zeros(bucket_shape(spec, bucket), spec.datatype.dtype) for spec in specs]


def _seconds(call: Call, leaves: Sequence[jax.Array], arguments: Arrays) -> float:
    started = time.perf_counter()
    for output in call(leaves, arguments):
        np.asarray(output)
    return time.perf_counter() - started
