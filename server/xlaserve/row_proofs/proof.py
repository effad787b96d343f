"""The analysis of one artifact: at two batch sizes, on every platform, to a verdict."""

# Much of jax is typed, but not all that is called here.
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
"""Batch sizes at which a computation is looked at: odd ones, so that no model has a constant of
them, which refinement would make one with the batch. Where the two are not alike, the next."""

MAX_SECONDS = 20.0
"""CPU seconds for one walk, without the tracing and refinement of JAX: CPU time, so that the load
of the machine changes no verdict."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The subject of a proof."""

    exported: Exported
    parameters: int
    outputs: Sequence[str]
    sizes: Mapping[str, int]
    platforms: Sequence[str]

    @property
    def batch(self) -> str:
        """Return the name of the dimension that is the batch, or empty."""
        shapes = [aval.shape for aval in self.exported.in_avals[self.parameters :]]
        firsts = {str(shape[0]) if shape else "" for shape in shapes}
        name = firsts.pop() if len(firsts) == 1 else ""
        return name if name.isidentifier() and name not in self.sizes else ""

    @property
    def batched(self) -> frozenset[int]:
        """Return the positions of the arguments whose rows are those of the batch."""
        count = len(self.exported.in_avals)
        return frozenset(range(self.parameters, count) if self.batch else ())


def verdicts(asked: Asked) -> Mapping[str, Verdict]:
    """Return the verdict on each platform of an artifact; raises Unfollowed, or what JAX raises.

    A computation that is the same on several platforms is looked at once.
    """
    found: dict[tuple[bytes, ...], Verdict] = {}
    by_platform: dict[str, Verdict] = {}
    # Wide types exist where the artifact has them; it says so itself everywhere.
    with jax.enable_x64(True), refining.parsing():
        refinery = Refinery(asked.exported, asked.sizes, asked.batch)
        for platform in asked.platforms or asked.exported.platforms:
            same = found.get(key := _at_both(refinery, platform, PAIRS[0]))
            if same is None or not _is_so_on(platform, same, asked, refinery):
                found[key] = same = _on_platform(asked, refinery, platform)
            by_platform[platform] = same
    return by_platform


def _at_both(refinery: Refinery, platform: str, rows: tuple[int, int]) -> tuple[bytes, ...]:
    """Return a computation at two batch sizes; at one, a number may stand for that size."""
    return tuple(refinery.refined(refinery.open_module(size, platform)) for size in rows)


def _is_so_on(platform: str, found: Verdict, asked: Asked, refinery: Refinery) -> bool:
    """Tell whether a verdict holds on a platform whose computation is the same at two sizes."""
    module = refinery.open_module(PAIRS[0][0], platform)
    is_proved = found.independence is Independence.PROVED
    return not is_proved or size_arithmetic.question(module, asked.batched) is None


def has_open_loops(asked: Asked) -> bool:
    """Tell whether a loop is not known to have a constant trip count; raises as `verdict` does."""
    with jax.enable_x64(True), refining.parsing():
        refinery = Refinery(asked.exported, asked.sizes, asked.batch, any_size=PAIRS[0][0])
        return any(_has_open_loop(refinery, platform) for platform in _platforms(asked, refinery))


def _has_open_loop(refinery: Refinery, platform: str) -> bool:
    module = refining.parse(refinery.refined(refinery.open_module(PAIRS[0][0], platform)))
    read = program.read(module, module, PAIRS[0])
    walker = Walker(RULES, time.thread_time() + MAX_SECONDS)
    walker.region(read.body, [Value(varying(read.types[one].shape)) for one in read.body.arguments])
    return walker.loops_follow_inputs


def _platforms(asked: Asked, refinery: Refinery) -> list[str]:
    """Return the platforms whose computations differ."""
    found: dict[bytes, str] = {}
    for platform in asked.platforms or asked.exported.platforms:
        module = refinery.open_module(PAIRS[0][0], platform)
        found.setdefault(refinery.refined(module), platform)
    return list(found.values())


def _on_platform(asked: Asked, refinery: Refinery, platform: str) -> Verdict:
    for rows in PAIRS:
        module = refinery.open_module(rows[0], platform)
        both = _at_both(refinery, platform, rows)
        # Kept until the walk completes: what was read refers to them.
        modules = [refining.parse(each) for each in both]
        try:
            read = program.read(modules[0], modules[1], rows)
        except Mismatch:
            continue
        if len(read.body.arguments) != len(asked.exported.in_avals):
            raise Unfollowed("does not take all of its arguments")
        question = partial(size_arithmetic.question, module, asked.batched)
        return walked(read, asked.batched, asked.outputs, question)
    raise Unfollowed("differs between two batch sizes")


def walked(
    read: Program,
    batched: Collection[int],
    outputs: Sequence[str],
    question: Callable[[int | None], Finding | None] = lambda output: None,
) -> Verdict:
    """Walk over a program and judge its outputs.

    `batched` are the positions of the arguments that have rows. `question` finds what prevents the
    proof of an output where nothing else does, of any output where it is asked of none. Raises
    Unfollowed.
    """
    walker, values = followed(read, batched)
    finding, output = _worst(outputs, values, question)
    loops = walker.loops_follow_rows, walker.loops_follow_inputs
    if finding is None:
        return Verdict(Independence.PROVED, "", "", "", "", *loops)
    _, operation, reason, location = finding
    return Verdict(Independence.UNKNOWN, output, operation, reason, location, *loops)


def followed(read: Program, batched: Collection[int]) -> tuple[Walker, list[Value]]:
    """Walk over a program and return the known facts about its outputs; raises Unfollowed."""
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
    """Return why an output is not proved, and which: the first that mixes rows, or the first."""
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
    asked = ((question(number), name) for number, name in enumerate(outputs))
    return next((each for each in asked if each[0] is not None), (None, ""))


def not_proved(value: Value) -> Finding | None:
    """Return why an output is not known to be one row of it for each row of the inputs."""
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
    """Return why the first dimension of an output is not that of the rows."""
    if first == (ROWS,) or (is_uniform(first) and size_of(first) == BATCH):
        return None
    if has_rows(first):
        return Finding(True, "", "its rows are not the rows of the batch")
    return Finding(True, "", "it depends on the row's index in the batch")
