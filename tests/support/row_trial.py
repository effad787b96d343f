"""Runs what was proved: the server's own row trial, and a stricter one for each output."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.export import Exported
from jax.extend.backend import get_backend
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jaxlib import xla_client

from support.rows import Inputs
from xlaserve.row_proofs import refining
from xlaserve.row_proofs.neighbours import find_difference
from xlaserve.row_proofs.tolerances import TOLERANCES
from xlaserve.tensors import Tensor, TensorSpec, datatype_of

Array: TypeAlias = "np.ndarray[Any, Any]"


def leak(exported: Exported, seed: int = 0) -> str:
    """Return what an output's row depends on besides the input row; empty if nothing was seen."""
    call = jax.jit(exported.call)

    def run(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        return [np.asarray(output) for output in call(*inputs)]

    with jax.enable_x64(True):
        inputs, outputs = (
            [_spec(f"{kind}{n}", aval.shape, aval.dtype) for n, aval in enumerate(avals)]
            for kind, avals in (("x", exported.in_avals), ("y", exported.out_avals))
        )
        found = find_difference(run, inputs, outputs, seeds=(seed,))
    return str(found or "")


def _spec(name: str, shape: Sequence[object], dtype: "np.dtype[np.generic]") -> TensorSpec:
    datatype = datatype_of(dtype)
    assert datatype is not None
    return TensorSpec(
        name, datatype, tuple(size if isinstance(size, int) else -1 for size in shape)
    )


# --- A trial of each output ----------------------------------------------------------------------

WATCHED = 3
SIZES = (2, 3, 5, 8)
"""Batch sizes besides 1."""
MANY = 300
COMPILED_SIZES = (3, 8)
"""Batch sizes for programs that have to be compiled for each size."""

_NUMBERS = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    2.0,
    0.5,
    1e-30,
    1e-45,
    1e30,
    3e38,
    -3e38,
    np.inf,
    -np.inf,
    np.nan,
)
_INTEGERS = (0, 1, 2, 3, 5, 7, -1, -2, 8, 100, 2**31 - 1, -(2**31), 2**30)
_COMPILED = frozenset({"fft", "cholesky", "triangular_solve", "rng_bit_generator", "custom_call"})
"""Operations that StableHLO's reference interpreter does not support."""
_QUICKLY = [("xla_backend_optimization_level", "0"), ("xla_llvm_disable_expensive_passes", True)]

Run: TypeAlias = Callable[[Sequence[Array]], Sequence[Array]]


def dependences(
    refinery: refining.Refinery,
    kinds: Inputs,
    seed: int,
    *,
    is_compiled: bool = False,
    counts: bool = False,
    proved: Sequence[bool] = (),
) -> tuple[list[str], bool]:
    """Return what the rows of each output depend on, and whether XLA compiled the program.

    StableHLO's reference interpreter computes each element in the same way at every size, so
    any difference shows a dependence. Operations that it does not support are compiled by XLA;
    then only differences beyond rounding count. Programs that `counts` marks loop up to an
    integer input, so they get no large integers. Outputs that are not `proved` and showed no
    dependence are tested in a large batch as well. Call it within `refining.parsing()`.
    """
    modules = {rows: refinery.refined(refinery.open_module(rows, "cpu")) for rows in (1, *SIZES)}
    first = refining.parse(modules[1])
    is_compiled = is_compiled or _has_to_be_compiled(str(first))
    sizes = COMPILED_SIZES if is_compiled else SIZES
    make = _compiled if is_compiled else _interpreted
    runs = {rows: make(modules[rows]) for rows in (1, *sizes)}
    found: list[str] = []
    for number, values in enumerate(_VALUES):
        if is_compiled and values == "hostile":
            # Overflow may give NaN in one kernel and infinity in another.
            continue
        trial = _Trial(kinds, (seed, number), values, counts=counts, is_exact=not is_compiled)
        found = trial.seen(runs, found)
        if all(found):
            break
    if not all(seen or is_proved for seen, is_proved in zip(found, proved, strict=False)):
        # With that many rows, narrow integers cannot hold the row numbers.
        many = refinery.refined(refinery.open_module(MANY, "cpu"))
        trial = _Trial(
            kinds, (seed, MANY), "large integers", counts=counts, is_exact=not is_compiled
        )
        found = trial.seen({1: runs[1], MANY: make(many)}, found)
    return found, is_compiled


@dataclass(frozen=True)
class _Trial:
    """Runs rows alone and the same rows in batches."""

    kinds: Inputs
    seed: Sequence[int]
    values: str
    counts: bool
    is_exact: bool

    def seen(self, runs: "Mapping[int, Run]", before: Sequence[str]) -> list[str]:
        """Return the dependences of each output, testing only outputs without one so far."""
        random = np.random.default_rng(self.seed)
        watched = [_drawn(random, self.values, WATCHED, *kind) for kind in self.kinds]
        if self.counts:
            watched = [_countable(one) for one in watched]
        alone = [runs[1]([one[n : n + 1] for one in watched]) for n in range(WATCHED)]
        found = list(before) or [""] * len(alone[0])
        sizes = [rows for rows in runs if rows > 1]
        for batch, places, beside in _batches(random, watched, self.kinds, sizes):
            given = [_countable(one) for one in batch] if self.counts else batch
            outputs = runs[len(given[0])](given)
            for place, n in places:
                for output, whole in enumerate(outputs):
                    if not _is_same(alone[n][output][0], whole[place], is_exact=self.is_exact):
                        found[output] = found[output] or (
                            f"{self.values}: row {place} of {len(whole)}, {beside}: "
                            f"{alone[n][output][0].ravel()[:6]} alone, {whole[place].ravel()[:6]}"
                        )
        return found


_VALUES = ("small integers", "small integers", "large integers", "normal", "hostile")


def _has_to_be_compiled(text: str) -> bool:
    names = set(re.findall(r"\b(chlo|stablehlo)\.(\w+)", text))
    return any(dialect == "chlo" or name in _COMPILED for dialect, name in names)


def _countable(numbers: Array) -> Array:
    return numbers if numbers.dtype.kind == "f" else numbers.clip(-100, 20)


def _drawn(
    random: np.random.Generator, values: str, rows: int, shape: Sequence[int], dtype: str
) -> Array:
    whole = (rows, *shape)
    if dtype == "int32":
        if values != "hostile":
            least = 4 if values == "large integers" else 0
            return random.integers(least, 8, whole).astype(np.int32)
        return random.choice(np.asarray(_INTEGERS, np.int64), whole).astype(np.int32)
    if values == "normal":
        return random.standard_normal(whole).astype(np.float32)
    if values == "hostile":
        return random.choice(np.asarray(_NUMBERS), whole).astype(np.float32)
    least = 2 if values == "large integers" else -4
    return random.integers(least, 5, whole).astype(np.float32)


def _batches(
    random: np.random.Generator,
    watched: Sequence[Array],
    kinds: Inputs,
    sizes: Sequence[int],
) -> Iterator[tuple[list[Array], list[tuple[int, int]], str]]:
    """Yield batches, the (position, row number) pairs in them, and the kind of other rows."""
    for size in sizes:
        for beside in ("small integers", "hostile", "zeros", "copies"):
            places = [int(place) for place in random.permutation(size)[:WATCHED]]
            which = [int(n) for n in random.permutation(WATCHED)[: len(places)]]
            batch = []
            for one, kind in zip(watched, kinds, strict=True):
                if beside == "copies":
                    whole = np.repeat(one[which[:1]], size, axis=0)
                elif beside == "zeros":
                    whole = np.zeros((size, *kind[0]), one.dtype)
                else:
                    whole = _drawn(random, beside, size, *kind)
                whole[places] = one[which]
                batch.append(whole)
            yield batch, list(zip(places, which, strict=True)), beside


def _interpreted(module: bytes) -> Run:
    parsed = refining.parse(module)

    def run(inputs: Sequence[Array]) -> Sequence[Array]:
        # Untyped: in numpy for Python 3.11, arrays are not declared as Buffer.
        arrays: list[Any] = [np.ascontiguousarray(one) for one in inputs]
        given = [ir.DenseElementsAttr.get(one) for one in arrays]
        return [_read(one) for one in stablehlo.eval_module(parsed, given)]

    return run


def _read(found: Any) -> Array:
    shape = tuple(found.type.shape)
    if found.is_splat:
        value = found.get_splat_value().value
        kind = np.float32 if isinstance(value, float) else np.int64
        return np.full(shape, value, kind)
    return np.asarray(found).reshape(shape)


def _compiled(module: bytes) -> Run:
    backend: Any = get_backend("cpu")
    options = xla_client.CompileOptions()
    options.env_option_overrides = _QUICKLY
    executable = backend.compile_and_load(module, backend.local_devices()[:1], options)

    def run(inputs: Sequence[Array]) -> Sequence[Array]:
        given = [jax.device_put(one) for one in inputs]
        return [np.asarray(one) for one in executable.execute(given)]

    return run


def _is_same(alone: Array, there: Array, *, is_exact: bool) -> bool:
    if alone.shape != there.shape:
        return False
    if is_exact or alone.dtype.kind != "f":
        return bool(np.array_equal(alone, there, equal_nan=alone.dtype.kind == "f"))
    least = TOLERANCES["FP16"]
    return bool(np.allclose(alone, there, rtol=least, atol=least, equal_nan=True))
