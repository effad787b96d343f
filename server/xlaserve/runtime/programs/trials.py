"""Runs trials of artifacts in another process, with time and memory limits."""

# Some of the jax functions called here are untyped.
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
"""Processor time of one trial in seconds, including compilation."""

_JOB_TIMES = 20.0
"""Time limit of a whole job outside of a server, as a multiple of `seconds` of processor time; a
server has `load_seconds`."""

MEMORY_BYTES = 4 << 30
"""Memory limit of the process outside of a server; a server has `compile_process_bytes`."""

_IDLE_SECONDS = 30.0
_PARAMETERS_PART = 4
"""Parameters are sent to the process if they need at most 1/4 of its memory limit."""

_LOOP = b"while_v"
"""Name of the loop operation in a serialized module, in any version of the operation."""


_log = structlog.get_logger("proof")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a trial."""

    difference: Difference | None = None
    unfinished: str = ""
    """Why the trial is incomplete; empty if it completed."""
    never_began: bool = False
    """Whether the first execution did not complete."""


@dataclass(frozen=True, slots=True)
class Subject:
    """An artifact with its parameters, in the form that its programs take."""

    model: str
    computation: str
    exported: Exported
    inputs: Sequence[TensorSpec]
    """Input specifications in which every dimension but the first has a size."""
    outputs: Sequence[TensorSpec]
    leaves: Sequence[Any]
    """JAX or numpy arrays; copied from the device when they are sent to a process."""
    packing: Packed = field(default_factory=lambda: Packed(0, (), {}, ()))
    is_wide: bool = True

    @property
    def has_loops(self) -> bool:
        """Tell whether the artifact has loops, so that it might not terminate."""
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
    """Run a trial of an artifact in another process, with time and memory limits. Blocks.

    `seconds` limits the processor time if there are no `processes`, which have their own limits.
    With `first`, the artifact is first executed on inputs of these shapes, zeros or random numbers,
    with this much time per core. `is_compared`: also compare rows. Raises the exception of
    `check_cancelled`.
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
        answer = processes.compile(
            job,
            lambda: bytes(subject.exported.serialize()),
            check_cancelled,
            lambda: list(map(_bytes, subject.leaves)),
        )
        return Outcome(msgspec.msgpack.decode(answer, type=Tried).difference)
    except TrialEndedError as ended:
        return _ended(ended, limits)
    except (CompilationError, Refused) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return Outcome(unfinished=f"it failed in the trial process: {lines[0][:300]}")


def of_declared(
    subject: Subject, compilation: Compilation, check_cancelled: Callable[[], None]
) -> Outcome:
    """Try rows that were declared independent, in the pool or in a temporary process.

    The limit is `trial_seconds` in either case. Blocks.
    """
    return tried(
        subject,
        compilation.processes,
        seconds=compilation.trial_seconds,
        is_thorough=True,
        check_cancelled=check_cancelled,
    )


def refused_proof(verdict: Verdict, difference: Difference, **of: str) -> Verdict:
    """Return the verdict, changed to report the contradicting trial in the log."""
    _log.error(
        "row proof contradicted",
        **of,
        reason=str(difference),
        consequence="requests are not batched",
        to_do="report this with the model, or the part that reproduces it",
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
    """Return a pool with a temporary process, which ends when idle."""
    limits = Limits(1, MEMORY_BYTES, _IDLE_SECONDS, _JOB_TIMES * seconds, seconds, is_logged=False)
    return CompilerProcesses(limits)


def _bytes(leaf: Any) -> memoryview:
    # numpy has no buffer protocol for some dtypes, such as bfloat16.
    return np.ascontiguousarray(np.asarray(leaf)).reshape(-1).view(np.uint8).data


def _named(spec: TensorSpec) -> Named:
    return Named(spec.name, spec.datatype.name, tuple(spec.shape))
