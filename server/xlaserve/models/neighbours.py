"""A trial of a model: whether a row's answer changes with the rows beside it.

It proves nothing when it passes: `rows` proves. It refutes what mixes rows where that shows in the
numbers that it tries.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import numpy as np

from xlaserve.models.tolerances import TOLERANCES
from xlaserve.tensors import Tensor, TensorSpec

Run: TypeAlias = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Executes a model on any number of rows: inputs in, outputs out, in declared order."""

SUBJECTS = 3
"""Rows that are watched while others come and go."""

BATCHES = (4, 8)
"""The sizes of the batches that they are put in, besides 1 and SUBJECTS. Each is compiled."""

SEEDS = (0, 1)

_FACTOR = 1000
_SMALL_INTEGERS = 8
"""Integers are below it as a rule, since many a model looks them up in a table."""

_SMALLEST = 1e-3
"""Threshold: an output whose numbers are all smaller is what is left of larger ones."""


@dataclass(frozen=True, slots=True)
class Difference:
    """An answer that changed with what stood beside its row."""

    output: str
    rows: int
    """Rows of the batch in which it changed."""
    beside: str
    """Its neighbours, in a phrase."""
    largest: float
    """The largest change; NaN where only one of the answers is a number."""
    shown: str = ""
    """The row, and both answers, as far as they fit in a line."""

    def __str__(self) -> str:
        """Say it in one clause."""
        shown = f": {self.shown}" if self.shown else ""
        return (
            f"output '{self.output}' of a row changes by up to {self.largest:.3g} in a batch of "
            f"{self.rows}, {self.beside}{shown}"
        )


@dataclass(frozen=True, slots=True)
class _Batch:
    """Rows that are watched, among others."""

    tensors: Sequence[Tensor]
    places: Sequence[int]
    """Positions of the watched rows."""
    beside: str


def find_difference(
    run: Run,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    *,
    batches: Sequence[int] = BATCHES,
    seeds: Sequence[int] = SEEDS,
) -> Difference | None:
    """Return the first answer that changes with the rows beside its own; None if none does.

    The inputs have sizes for all dimensions but the first, which is the batch. The rows are
    permuted, repeated, and put before, behind and between others: random ones, a thousand times
    larger and smaller ones, zeros, NaN and infinities. Raises what `run` raises.
    """
    for seed in seeds:
        random = np.random.default_rng(seed)
        subjects = [_random(random, spec, SUBJECTS) for spec in inputs]
        singles = [run([rows[i : i + 1] for rows in subjects]) for i in range(SUBJECTS)]
        alone = [np.concatenate(rows) for rows in zip(*singles, strict=True)]
        for batch in _batches(random, inputs, subjects, batches):
            found = run(batch.tensors)
            there = [np.asarray(output)[list(batch.places)] for output in found]
            for spec, expected, got in zip(outputs, alone, there, strict=True):
                difference = _difference(spec, expected, got)
                if difference is not None:
                    rows = len(batch.tensors[0])
                    shown = _shown(subjects, expected, got)
                    return replace(difference, rows=rows, beside=batch.beside, shown=shown)
    return None


def _batches(
    random: np.random.Generator,
    specs: Sequence[TensorSpec],
    subjects: Sequence[Tensor],
    sizes: Sequence[int],
) -> Iterator[_Batch]:
    """Yield the watched rows in one batch after another."""
    for places in (range(SUBJECTS), random.permutation(SUBJECTS).tolist()):
        yield _ordered(subjects, list(places), "beside one another")
    for size in sizes:
        for kind, fill in _kinds(specs):
            others = fill(random, specs, subjects, size - SUBJECTS)
            whole = [np.concatenate(both) for both in zip(subjects, others, strict=True)]
            for name, order in _orders(random, size):
                yield _ordered(whole, order, f"{name} {kind}")


def _ordered(tensors: Sequence[Tensor], order: Sequence[int], beside: str) -> _Batch:
    """Put row `order[i]` in place i; the watched rows are the first ones of `tensors`."""
    places = [order.index(row) for row in range(SUBJECTS)]
    return _Batch([tensor[list(order)] for tensor in tensors], places, beside)


def _orders(random: np.random.Generator, size: int) -> Iterator[tuple[str, list[int]]]:
    rows = list(range(size))
    yield "before", rows
    yield "behind", [*rows[SUBJECTS:], *rows[:SUBJECTS]]
    yield "among", [int(row) for row in random.permutation(size)]


# --- other rows --------------------------------------------------------------------------------

_Fill: TypeAlias = Callable[
    [np.random.Generator, Sequence[TensorSpec], Sequence[Tensor], int], list[Tensor]
]


def _kinds(specs: Sequence[TensorSpec]) -> Iterator[tuple[str, _Fill]]:
    yield "random rows", partial(_scaled, 1)
    yield f"rows that are {_FACTOR} times as large", partial(_scaled, _FACTOR)
    yield "rows of zeros", partial(_scaled, 0)
    yield "copies of the first", _repeated
    if any(_is_float(spec) for spec in specs):
        yield f"rows that are {_FACTOR} times as small", partial(_scaled, 1 / _FACTOR)
        yield "rows of NaN", partial(_filled, np.nan)
        yield "rows of infinity", partial(_filled, np.inf)


def _scaled(
    factor: float,
    random: np.random.Generator,
    specs: Sequence[TensorSpec],
    subjects: Sequence[Tensor],
    count: int,
) -> list[Tensor]:
    return [_times(spec, _random(random, spec, count), factor) for spec in specs]


def _repeated(
    random: np.random.Generator,
    specs: Sequence[TensorSpec],
    subjects: Sequence[Tensor],
    count: int,
) -> list[Tensor]:
    return [np.repeat(rows[:1], count, axis=0) for rows in subjects]


def _filled(
    value: float,
    random: np.random.Generator,
    specs: Sequence[TensorSpec],
    subjects: Sequence[Tensor],
    count: int,
) -> list[Tensor]:
    rows = [_random(random, spec, count) for spec in specs]
    for spec, tensor in zip(specs, rows, strict=True):
        if _is_float(spec):
            tensor[...] = value
    return rows


def _random(random: np.random.Generator, spec: TensorSpec, rows: int) -> Tensor:
    dtype, shape = spec.datatype.dtype, (rows, *spec.shape[1:])
    if dtype.kind in "iub":
        return random.integers(0, 2 if dtype.kind == "b" else _SMALL_INTEGERS, shape).astype(dtype)
    return random.standard_normal(shape).astype(dtype)


def _times(spec: TensorSpec, rows: Tensor, factor: float) -> Tensor:
    dtype = spec.datatype.dtype
    if dtype.kind in "iu":
        most = min(np.iinfo(dtype).max, _SMALL_INTEGERS * _FACTOR)
        return np.minimum(rows.astype(np.int64) * int(factor), most).astype(dtype)
    with np.errstate(over="ignore"):
        return (rows.astype(np.float64) * factor).astype(dtype)


def _is_float(spec: TensorSpec) -> bool:
    return spec.datatype.dtype.kind not in "iub"


# --- showing -----------------------------------------------------------------------------------

_SHOWN_NUMBERS = 4


def _shown(subjects: Sequence[Tensor], expected: Tensor, got: Tensor) -> str:
    """Show the watched row whose answer changed most, and its answers from where they differ."""
    if expected.shape != got.shape:
        return f"answers of shape {expected.shape[1:]} alone and {got.shape[1:]} there"
    want, have = (one.astype(np.float64).reshape(len(one), -1) for one in (expected, got))
    with np.errstate(invalid="ignore"):
        gaps = np.nan_to_num(np.where(want == have, 0.0, np.abs(want - have)), nan=np.inf)
    gaps[np.isnan(want) & np.isnan(have)] = 0.0
    row, first = np.unravel_index(int(gaps.argmax()), gaps.shape)
    numbers = " and ".join(_numbers(tensor[row]) for tensor in subjects)
    return (
        f"the row {numbers} gives {_numbers(want[row, first:])} alone and "
        f"{_numbers(have[row, first:])} there"
    )


def _numbers(tensor: Tensor) -> str:
    flat = tensor.reshape(-1)
    some = [f"{float(number):.4g}" for number in flat[:_SHOWN_NUMBERS]]
    return f"[{' '.join(some)}{' ...' if flat.size > _SHOWN_NUMBERS else ''}]"


# --- comparing ---------------------------------------------------------------------------------


def _difference(spec: TensorSpec, expected: Tensor, got: Tensor) -> Difference | None:
    """Compare what rows gave alone with what they gave in a batch."""
    if expected.shape != got.shape:
        return Difference(spec.name, 0, "", float("nan"))
    want, have = expected.astype(np.float64), got.astype(np.float64)
    same = (want == have) | (np.isnan(want) & np.isnan(have))
    with np.errstate(invalid="ignore"):
        gaps = np.where(same, 0.0, np.abs(want - have))
    largest = float(np.abs(want[np.isfinite(want)]).max(initial=0.0))
    # Relative to the largest number of the output.
    allowed = TOLERANCES.get(spec.datatype.name, 0.0) * max(largest, _SMALLEST)
    # A gap that is no number is beyond every limit.
    if np.all(gaps <= allowed):
        return None
    return Difference(spec.name, 0, "", float(gaps.max()))
