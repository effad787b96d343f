"""Analyses an artifact at two batch sizes, on every platform."""

# Some JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
from jax.export import Exported

from xlaserve.row_proofs import program, refining, size_arithmetic
from xlaserve.row_proofs.domain import (
    ROWS,
    Dimension,
    Value,
    has_rows,
    is_uniform,
    size_of,
    uniform,
    varying,
)
from xlaserve.row_proofs.findings import Finding, Unfollowed
from xlaserve.row_proofs.program import Mismatch, Program, Tensor
from xlaserve.row_proofs.refining import Refinery
from xlaserve.row_proofs.sizes import BATCH, ZERO
from xlaserve.row_proofs.table import RULES
from xlaserve.row_proofs.verdict import Independence, Verdict
from xlaserve.row_proofs.walk import Walker

PAIRS = ((37, 41), (53, 61), (101, 109))
"""Pairs of batch sizes to analyse. They are odd and unusual, so that a model's constants are not
confused with the batch size. The next pair is tried if the modules of a pair differ in
structure."""

MAX_SECONDS = 20.0
"""CPU seconds for one walk, excluding JAX's tracing and refinement. CPU time makes the verdict
independent of the machine's load."""


@dataclass(frozen=True, slots=True)
class ProofTask:
    """The artifact to prove, with its outputs, sizes and platforms."""

    exported: Exported
    parameters: int
    outputs: Sequence[str]
    sizes: Mapping[str, int]
    platforms: Sequence[str]

    @property
    def batch(self) -> str:
        """Return the name of the batch dimension; empty if there is none."""
        shapes = [aval.shape for aval in self.exported.in_avals[self.parameters :]]
        firsts = {str(shape[0]) if shape else "" for shape in shapes}
        name = firsts.pop() if len(firsts) == 1 else ""
        return name if name.isidentifier() and name not in self.sizes else ""

    @property
    def batched(self) -> frozenset[int]:
        """Return the positions of the arguments that have a batch dimension."""
        count = len(self.exported.in_avals)
        return frozenset(range(self.parameters, count) if self.batch else ())


def verdicts(task: ProofTask) -> Mapping[str, Verdict]:
    """Return the verdict for each platform; raises Unfollowed, or JAX's exceptions.

    A computation that is the same on several platforms is analysed once.
    """
    found: dict[tuple[bytes, ...], Verdict] = {}
    by_platform: dict[str, Verdict] = {}
    # Needed to read 64-bit types. It changes no other type, since the artifact states them all.
    with jax.enable_x64(True), refining.parsing():
        refinery = Refinery(task.exported, task.sizes, task.batch)
        for platform in task.platforms or task.exported.platforms:
            same = found.get(key := _at_both(refinery, platform, PAIRS[0]))
            if same is None or not _is_so_on(platform, same, task, refinery):
                found[key] = same = _on_platform(task, refinery, platform)
            by_platform[platform] = same
    return by_platform


def _at_both(refinery: Refinery, platform: str, rows: tuple[int, int]) -> tuple[bytes, ...]:
    """Return the refined modules at two batch sizes: a constant might equal a single size."""
    return tuple(refinery.refined(refinery.open_module(size, platform)) for size in rows)


def _is_so_on(platform: str, found: Verdict, task: ProofTask, refinery: Refinery) -> bool:
    """Tell whether a verdict also holds on a platform with the same computation at two sizes."""
    module = refinery.open_module(PAIRS[0][0], platform)
    is_proved = found.independence is Independence.PROVED
    return not is_proved or size_arithmetic.question(module, task.batched) is None


def has_open_loops(task: ProofTask) -> bool:
    """Tell whether some loop's trip count may vary with the inputs; raises as `verdicts` does."""
    with jax.enable_x64(True), refining.parsing():
        refinery = Refinery(task.exported, task.sizes, task.batch, any_size=PAIRS[0][0])
        return any(_has_open_loop(refinery, platform) for platform in _platforms(task, refinery))


def _has_open_loop(refinery: Refinery, platform: str) -> bool:
    module = refining.parse(refinery.refined(refinery.open_module(PAIRS[0][0], platform)))
    read = program.read(module, module, PAIRS[0])
    walker = Walker(RULES, time.thread_time() + MAX_SECONDS)
    walker.region(read.body, [Value(varying(read.types[one].shape)) for one in read.body.arguments])
    return walker.loops_follow_inputs


def _platforms(task: ProofTask, refinery: Refinery) -> list[str]:
    """Return one platform for each distinct computation."""
    found: dict[bytes, str] = {}
    for platform in task.platforms or task.exported.platforms:
        module = refinery.open_module(PAIRS[0][0], platform)
        found.setdefault(refinery.refined(module), platform)
    return list(found.values())


def _on_platform(task: ProofTask, refinery: Refinery, platform: str) -> Verdict:
    for rows in PAIRS:
        module = refinery.open_module(rows[0], platform)
        both = _at_both(refinery, platform, rows)
        # Kept alive until the end of the walk, since the program refers to them.
        modules = [refining.parse(each) for each in both]
        try:
            read = program.read(modules[0], modules[1], rows)
        except Mismatch:
            continue
        if len(read.body.arguments) != len(task.exported.in_avals):
            raise Unfollowed("does not take all of its arguments")
        question = partial(size_arithmetic.question, module, task.batched)
        return walked(read, task.batched, task.outputs, question)
    raise Unfollowed("differs between two batch sizes")


def walked(
    read: Program,
    batched: Collection[int],
    outputs: Sequence[str],
    question: Callable[[int | None], Finding | None] = lambda output: None,
) -> Verdict:
    """Analyse a program and return the verdict on its outputs.

    `batched` has the positions of the arguments with rows. `question(output)` returns what prevents
    the proof of an output for reasons outside the walk; `question(None)` asks about all outputs.
    Raises Unfollowed.
    """
    walker, values = followed(read, batched)
    finding, output = _worst(outputs, values, question)
    loops = walker.loops_follow_rows, walker.loops_follow_inputs
    if finding is None:
        return Verdict(Independence.PROVED, "", "", "", "", *loops)
    _, operation, reason, location = finding
    return Verdict(Independence.UNKNOWN, output, operation, reason, location, *loops)


def followed(read: Program, batched: Collection[int]) -> tuple[Walker, list[Value]]:
    """Walk over a program and return the abstract values of its outputs; raises Unfollowed."""
    walker = Walker(RULES, time.thread_time() + MAX_SECONDS)
    arguments = [
        _argument(read.types[number], is_batched=place in batched)
        for place, number in enumerate(read.body.arguments)
    ]
    return walker, walker.region(read.body, arguments)


def _argument(kind: Tensor, *, is_batched: bool) -> Value:
    if ZERO in kind.shape:
        return Value(uniform(kind.shape))
    if not is_batched:
        return Value(varying(kind.shape))
    first, *rest = kind.shape
    if first != BATCH or not all(size.is_static for size in rest):
        raise Unfollowed("has an input with several batch dimensions")
    return Value(((ROWS,), *varying(rest)))


def _worst(
    outputs: Sequence[str],
    values: Sequence[Value],
    question: Callable[[int | None], Finding | None],
) -> tuple[Finding | None, str]:
    """Return the finding to report and its output: preferably one that mixes rows."""
    found = [
        (finding, name)
        for name, value in zip(outputs, values, strict=True)
        if (finding := not_proved(value)) is not None
    ]
    mixed = [each for each in found if each[0].mixed]
    if found:
        return next(iter(mixed or found))
    if question(None) is None:
        return None, ""
    answers = ((question(number), name) for number, name in enumerate(outputs))
    return next((each for each in answers if each[0] is not None), (None, ""))


def not_proved(value: Value) -> Finding | None:
    """Return why the rows of an output are not proved to depend on the input rows alone."""
    if value.blocked is not None or value.sized is not None:
        return value.blocked or value.sized
    if not value.dimensions:
        return Finding(False, "", "an output is a scalar")
    first, *rest = value.dimensions
    if any(has_rows(dimension) for dimension in rest):
        return Finding(True, "", "its rows are not along the first dimension")
    if any(not part.size.is_static for dimension in rest for part in dimension):
        return Finding(False, "", "another dimension depends on the batch size")
    return _not_rows(first)


def _not_rows(first: Dimension) -> Finding | None:
    """Return why the first dimension of an output is not the batch."""
    if first == (ROWS,) or (is_uniform(first) and size_of(first) == BATCH):
        return None
    if has_rows(first):
        return Finding(True, "", "its rows are not the rows of the batch")
    return Finding(True, "", "it depends on the row's index in the batch")
