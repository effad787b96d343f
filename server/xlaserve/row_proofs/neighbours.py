"""Tests by execution whether a row's answer depends on the rest of the batch.

Passing the trial proves nothing; `proof` does. It detects models that mix rows if the difference
shows in the numbers tried.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import numpy as np

from xlaserve.row_proofs.tolerances import TOLERANCES
from xlaserve.tensors import Shape, Tensor, TensorSpec

Run: TypeAlias = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Executes the model on a batch of any size: inputs to outputs, in declared order."""

Say: TypeAlias = Callable[[str], None]
"""Called with a phrase that describes the next execution."""

SUBJECTS = 3
"""Number of observed rows."""

BATCHES = (4, 8)
"""Batch sizes tried besides 1 and SUBJECTS. Each is compiled."""

SEEDS = (0, 1)

FEW = (SUBJECTS, 5)
"""Batch sizes of the short trial, besides 1."""

_CONFIRMING_SEEDS = (0, 1, 2)
"""A difference must occur with each of these seeds, since rounding may flip one comparison."""

_FACTOR = 1000
_SMALL_INTEGERS = 8
"""Integer inputs are usually smaller than this, since many models use them as table indices."""

_SMALLEST = 1e-3
"""An output with only smaller numbers is treated as a rounding residue of larger ones."""


@dataclass(frozen=True, slots=True)
class Difference:
    """An answer that changed with the other rows in its batch."""

    output: str
    rows: int
    """Size of the batch in which the answer changed."""
    beside: str
    """The other rows, in a phrase."""
    largest: float
    """The largest change; NaN if only one of the two answers is a number."""
    shown: str = ""
    """The input row and both answers, shortened to fit in a line."""

    def __str__(self) -> str:
        """Describe the difference in one clause."""
        shown = f": {self.shown}" if self.shown else ""
        return (
            f"output '{self.output}' of a row changes by up to {self.largest:.3g} in a batch of "
            f"{self.rows}, {self.beside}{shown}"
        )


@dataclass(frozen=True, slots=True)
class _Batch:
    """A batch that contains the observed rows."""

    tensors: Sequence[Tensor]
    places: Sequence[int]
    """Indices of the observed rows."""
    beside: str


def find_difference(
    run: Run,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    *,
    batches: Sequence[int] = BATCHES,
    seeds: Sequence[int] = SEEDS,
    say: Say = lambda phrase: None,
) -> Difference | None:
    """Return the first answer that depends on the other rows of its batch; None if none does.

    All dimensions of the inputs except the first, the batch, must have fixed sizes. The rows are
    permuted, repeated, and placed before, after and among others: random rows, rows a thousand
    times larger or smaller, zeros, and finally NaN and infinities, on which a loop may not
    terminate. Raises the exceptions of `run`.
    """
    for kinds in (_usual(inputs), _extreme(inputs)):
        for seed in seeds if kinds else ():
            random = np.random.default_rng(seed)
            subjects = [_random(random, spec, SUBJECTS) for spec in inputs]
            found = _compared(
                run,
                outputs,
                subjects,
                _batches(random, inputs, subjects, batches, kinds),
                say=say,
            )
            if found is not None:
                return found
    return None


def find_contradiction(
    run: Run,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    *,
    sizes: Sequence[int] = FEW,
    least: Callable[[], float] = lambda: 0.0,
    say: Say = lambda phrase: None,
) -> Difference | None:
    """Return an answer that contradicts a proof of independence; None if none is found.

    A short trial at each of the `sizes`: rows alone, next to one another, padded, and among random
    rows. Rounding differences do not count: `least` returns the tolerance of the narrowest float
    type used, and a difference must be reproduced with other inputs. Raises the exceptions of
    `run`.
    """
    difference = None
    for seed in _CONFIRMING_SEEDS:
        random = np.random.default_rng(seed)
        subjects = [_random(random, spec, SUBJECTS) for spec in inputs]
        batches = _few_batches(random, inputs, subjects, sizes)
        # `least` reads the whole module: call it only after a difference was found.
        least_of_all = 0.0 if difference is None else least()
        found = _compared(run, outputs, subjects, batches, least=least_of_all, say=say)
        if found is None:
            return None
        difference = difference or found
    return difference


def _compared(
    run: Run,
    outputs: Sequence[TensorSpec],
    subjects: Sequence[Tensor],
    batches: Iterator[_Batch],
    *,
    least: float = 0.0,
    say: Say,
) -> Difference | None:
    """Return the first difference between answers for rows alone and in batches."""
    say("each row alone")
    singles = [run([rows[i : i + 1] for rows in subjects]) for i in range(SUBJECTS)]
    alone = [np.concatenate(rows) for rows in zip(*singles, strict=True)]
    for batch in batches:
        rows = len(batch.tensors[0])
        say(f"a batch of {rows}, {batch.beside}")
        found = run(batch.tensors)
        there = [np.asarray(output)[list(batch.places)] for output in found]
        for spec, expected, got in zip(outputs, alone, there, strict=True):
            difference = _difference(spec, expected, got, least)
            if difference is not None:
                shown = _shown(subjects, expected, got)
                return replace(difference, rows=rows, beside=batch.beside, shown=shown)
    return None


def _few_batches(
    random: np.random.Generator,
    specs: Sequence[TensorSpec],
    subjects: Sequence[Tensor],
    sizes: Sequence[int],
) -> Iterator[_Batch]:
    for size in sizes:
        if size < SUBJECTS:
            continue
        if size > SUBJECTS:
            repeated = [np.repeat(rows[-1:], size - SUBJECTS, axis=0) for rows in subjects]
            padded = [np.concatenate(both) for both in zip(subjects, repeated, strict=True)]
            yield _Batch(padded, range(SUBJECTS), "before padding")
        others = _scaled(1, random, specs, subjects, size - SUBJECTS)
        whole = [np.concatenate(both) for both in zip(subjects, others, strict=True)]
        order = [int(row) for row in random.permutation(size)]
        situation = "among random rows" if size > SUBJECTS else "beside one another"
        yield _ordered(whole, order, situation)


def _batches(
    random: np.random.Generator,
    specs: Sequence[TensorSpec],
    subjects: Sequence[Tensor],
    sizes: Sequence[int],
    kinds: "Sequence[tuple[str, _Fill]]",
) -> Iterator[_Batch]:
    """Yield batches that contain the observed rows."""
    for places in (range(SUBJECTS), random.permutation(SUBJECTS).tolist()):
        yield _ordered(subjects, list(places), "beside one another")
    for size in sizes:
        for kind, fill in kinds:
            others = fill(random, specs, subjects, size - SUBJECTS)
            whole = [np.concatenate(both) for both in zip(subjects, others, strict=True)]
            for name, order in _orders(random, size):
                yield _ordered(whole, order, f"{name} {kind}")


def _ordered(tensors: Sequence[Tensor], order: Sequence[int], situation: str) -> _Batch:
    """Put row `order[i]` at index i; the first rows of `tensors` are the observed ones."""
    places = [order.index(row) for row in range(SUBJECTS)]
    return _Batch([tensor[list(order)] for tensor in tensors], places, situation)


def _orders(random: np.random.Generator, size: int) -> Iterator[tuple[str, list[int]]]:
    rows = list(range(size))
    yield "before", rows
    yield "behind", [*rows[SUBJECTS:], *rows[:SUBJECTS]]
    yield "among", [int(row) for row in random.permutation(size)]


# --- Other rows --------------------------------------------------------------------------------

_Fill: TypeAlias = Callable[
    [np.random.Generator, Sequence[TensorSpec], Sequence[Tensor], int], list[Tensor]
]


def _usual(specs: Sequence[TensorSpec]) -> list[tuple[str, _Fill]]:
    found: list[tuple[str, _Fill]] = [
        ("random rows", partial(_scaled, 1)),
        (f"rows that are {_FACTOR} times as large", partial(_scaled, _FACTOR)),
        ("rows of zeros", partial(_scaled, 0)),
        ("copies of the first", _repeated),
    ]
    if any(_is_float(spec) for spec in specs):
        found.append((f"rows that are {_FACTOR} times as small", partial(_scaled, 1 / _FACTOR)))
    return found


def _extreme(specs: Sequence[TensorSpec]) -> list[tuple[str, _Fill]]:
    if not any(_is_float(spec) for spec in specs):
        return []
    return [
        ("rows of NaN", partial(_filled, np.nan)),
        ("rows of infinity", partial(_filled, np.inf)),
    ]


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
    return random_numbers(random, spec, (rows, *spec.shape[1:]))


def random_numbers(random: np.random.Generator, spec: TensorSpec, shape: Shape) -> Tensor:
    """Return normally distributed numbers of the input's datatype, or small integers."""
    dtype = spec.datatype.dtype
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


# --- Formatting --------------------------------------------------------------------------------

_SHOWN_NUMBERS = 4


def _shown(subjects: Sequence[Tensor], expected: Tensor, got: Tensor) -> str:
    """Format the observed row whose answer changed most, and its answers from where they differ."""
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


# --- Comparison --------------------------------------------------------------------------------


def _difference(
    spec: TensorSpec, expected: Tensor, got: Tensor, least: float = 0.0
) -> Difference | None:
    """Compare answers for rows alone with those in a batch.

    `least` is the minimum tolerance, relative to the largest number.
    """
    if expected.shape != got.shape:
        return Difference(spec.name, 0, "", float("nan"))
    want, have = expected.astype(np.float64), got.astype(np.float64)
    same = (want == have) | (np.isnan(want) & np.isnan(have))
    with np.errstate(invalid="ignore"):
        gaps = np.where(same, 0.0, np.abs(want - have))
    largest = float(np.abs(want[np.isfinite(want)]).max(initial=0.0))
    # Relative to the largest number in the output.
    allowed = max(TOLERANCES.get(spec.datatype.name, 0.0), least) * max(largest, _SMALLEST)
    # A NaN gap exceeds every tolerance.
    if np.all(gaps <= allowed):
        return None
    return Difference(spec.name, 0, "", float(gaps.max()))
