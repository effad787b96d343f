"""Trials of artifacts in a process that ends with its time or memory limit."""

# Much of jax is typed, but not all that is called here.
# mypy: disallow-untyped-calls=False

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import structlog
from jax.export import Exported

from xlaserve.row_proofs.neighbours import Difference
from xlaserve.row_proofs.verdict import CONTRADICTED, Independence, Verdict
from xlaserve.runtime.programs.compilation import Compilation
from xlaserve.runtime.programs.compilers.jobs import Array, Job, Named, Packed, Trial
from xlaserve.runtime.programs.compilers.pool import (
    CompilationError,
    CompilerProcesses,
    Limits,
    Refused,
    TrialEndedError,
)
from xlaserve.runtime.programs.proving import digest_of
from xlaserve.runtime.programs.trying import FIRST, Tried
from xlaserve.tensors import Shape, TensorSpec

SECONDS = 60.0
"""Processor time of one trial, compilation included."""

_JOB_TIMES = 20.0
"""Times as many seconds, on the clock, for a whole job outside of a server, which has its
`load_seconds` for it."""

MEMORY_BYTES = 4 << 30
"""Memory of the process outside of a server, which has `compile_process_bytes`."""

_IDLE_SECONDS = 30.0
_PARAMETERS_PART = 4
"""Parameters are sent where they take at most this part of the memory of the process."""

_LOOP = b"while_v"
"""The operation in the bytes of a module, whatever its version is."""


_log = structlog.get_logger("proof")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a trial."""

    difference: Difference | None = None
    unfinished: str = ""
    """Why it saw only a part, or nothing; empty where it ended."""
    never_began: bool = False
    """Whether the very first execution did not end."""


@dataclass(frozen=True, slots=True)
class Subject:
    """An artifact with its parameters, in the form in which its programs take them."""

    model: str
    computation: str
    exported: Exported
    inputs: Sequence[TensorSpec]
    """Every dimension but the first has a size."""
    outputs: Sequence[TensorSpec]
    leaves: Sequence[Any]
    """Arrays of JAX or numpy; those on a device are fetched where a process gets them."""
    packing: Packed = field(default_factory=lambda: Packed(0, (), {}, ()))
    is_wide: bool = True

    @property
    def has_loops(self) -> bool:
        """Tell whether an artifact has loops, and so may never end."""
        return _LOOP in self.exported.mlir_module_serialized


def tried(
    subject: Subject,
    processes: CompilerProcesses | None = None,
    *,
    seconds: float = SECONDS,
    is_thorough: bool,
    first: Sequence[Shape] = (),
    is_of_zeros: bool = True,
    is_compared: bool = True,
    check_cancelled: Callable[[], None] = lambda: None,
) -> Outcome:
    """Have a process try an artifact within limits of time and memory. Blocks.

    `seconds` are those of the processor where there are no `processes`, whose limits hold. With
    `first` it is executed once on inputs of these shapes before, on zeros or on random numbers, for
    as many seconds of each core. `is_compared`: whether rows are compared at all. Raises what
    `check_cancelled` raises.
    """
    processes = processes or _own_processes(seconds)
    limits = processes.limits
    size = sum(leaf.nbytes for leaf in subject.leaves)
    is_sent = size <= limits.bytes // _PARAMETERS_PART
    if not is_sent:
        return Outcome(
            unfinished=f"its parameters have {size} bytes, more than a trial process may use"
            f" ({limits.bytes // _PARAMETERS_PART})"
        )
    trial = Trial(
        tuple(map(_named, subject.inputs)),
        tuple(map(_named, subject.outputs)) if is_compared else (),
        is_thorough=is_thorough and is_compared,
        is_wide=subject.is_wide,
        first=tuple(map(tuple, first)),
        is_of_zeros=is_of_zeros,
        first_seconds=limits.trial_seconds * (os.cpu_count() or 1),
        processor_seconds=limits.trial_seconds,
        parameter_bytes=size,
    )
    job = Job(
        subject.model,
        subject.computation or digest_of(subject.exported),
        0,
        subject.packing,
        tuple(Array(leaf.dtype.name, leaf.shape) for leaf in subject.leaves),
        (),
        {},
        {},
        trial=trial,
    )
    try:
        said = processes.compile(
            job,
            lambda: bytes(subject.exported.serialize()),
            check_cancelled,
            lambda: list(map(_bytes, subject.leaves)),
        )
        return Outcome(msgspec.msgpack.decode(said, type=Tried).difference)
    except TrialEndedError as ended:
        return _ended(ended, limits)
    except (CompilationError, Refused) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return Outcome(unfinished=f"it failed in the trial process: {lines[0][:300]}")


def of_declared(
    subject: Subject, compilation: Compilation, check_cancelled: Callable[[], None]
) -> Outcome:
    """Try rows that were declared independent, in the pool or in a temporary process.

    It has `trial_seconds` in either case. Blocks.
    """
    return tried(
        subject,
        compilation.processes,
        seconds=compilation.trial_seconds,
        is_thorough=True,
        check_cancelled=check_cancelled,
    )


def refused_proof(verdict: Verdict, difference: Difference, **of: str) -> Verdict:
    """Return the verdict after a contradicting trial, for the log."""
    _log.error(
        "row proof contradicted",
        **of,
        reason=str(difference),
        consequence="requests are not batched",
        what_to_do="report this with the model, or the part that reproduces it",
    )
    return replace(verdict, independence=Independence.UNKNOWN, reason=f"{CONTRADICTED}{difference}")


def _ended(ended: TrialEndedError, limits: Limits) -> Outcome:
    during = f" ({ended.doing})" if ended.doing else ""
    never_began = ended.is_limit and ended.doing.startswith(FIRST)
    if ended.is_limit:
        of = "of each core" if never_began else "of the processor"
        unfinished = f"it did not end in {limits.trial_seconds:g} seconds {of}{during}"
        if ended.is_late:
            unfinished = f"it did not end in {limits.job_seconds:g} seconds{during}"
        return Outcome(unfinished=unfinished, never_began=never_began)
    return Outcome(unfinished=f"{ended}{during}")


@lru_cache(1)
def _own_processes(seconds: float) -> CompilerProcesses:
    """Return a temporary process, which ends when idle."""
    limits = Limits(1, MEMORY_BYTES, _IDLE_SECONDS, _JOB_TIMES * seconds, seconds, is_told=False)
    return CompilerProcesses(limits)


def _bytes(leaf: Any) -> memoryview:
    # Numpy knows no buffer of some dtypes, such as bfloat16.
    return np.ascontiguousarray(np.asarray(leaf)).reshape(-1).view(np.uint8).data


def _named(spec: TensorSpec) -> Named:
    return Named(spec.name, spec.datatype.name, tuple(spec.shape))
