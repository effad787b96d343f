"""All of onnx's own test suite: operators, small models, and models exported by PyTorch."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto
from onnx.backend.test.loader import load_model_tests

from support import onnx_cases
from support.onnx_cases import PASSED, Case

LEAST_PASSED = 1911
"""Number of cases that passed when last checked; only ever raise it."""

DIFFERENT = frozenset(
    {
        # We agree with onnxruntime and PyTorch, which use the corners of whole output pixels.
        "test_resize_downsample_scales_linear_align_corners",
        "test_resize_downsample_scales_cubic_align_corners",
    }
)
"""Cases whose expected answer we deliberately do not match."""

_KINDS = ("simple", "pytorch-converted", "pytorch-operator")
"""Categories of models stored as files in onnx; others would need a download."""

_NOT_CONVERTED = "an operator that is not converted"
_REFUSALS = (
    ("is not one of the", _NOT_CONVERTED),
    ("cannot be converted: ", "an operator that is refused for good"),
)
_TOGETHER = 8
"""Cases per task of the process pool."""


@cache
def everything() -> tuple[Case, ...]:
    """Return all cases in the onnx package, sorted by name."""
    found = [*onnx_cases.every_node(), *_of_files()]
    return tuple(sorted(found, key=lambda case: case.name))


def first_of_each(found: Sequence[Case]) -> Iterator[Case]:
    """Yield the first case for each distinct set of operators."""
    seen: set[tuple[str, ...]] = set()
    for case in found:
        kind = tuple(sorted(case.operators))
        if kind not in seen:
            seen.add(kind)
            yield case


def third(found: Sequence[Case]) -> Iterator[Case]:
    """Yield a third of the cases for each set of operators, including the first."""
    counts: dict[tuple[str, ...], int] = {}
    for case in found:
        kind = tuple(sorted(case.operators))
        if counts.setdefault(kind, 0) % 3 == 0:
            yield case
        counts[kind] += 1


def outcome(case: Case) -> str:
    """Run a case; return PASSED, HELD, or `refused: `, `differs: ` or `FAILED: ` and details."""
    try:
        found = onnx_cases.outcome(case)
    # Any other exception is a bug of ours.
    except Exception as error:
        return f"FAILED: {type(error).__name__}: {str(error)[:300]}"
    if case.name in DIFFERENT:
        is_so = found.startswith("FAILED: Y: differs by ")
        return f"differs: {found}" if is_so else f"FAILED: {found}, and was to differ"
    if not found.startswith("FAILED"):
        return found if found.startswith(PASSED) else f"refused: {found}"
    return next((f"refused: {why}" for part, why in _REFUSALS if part in found), found)


def outcomes(cases: Sequence[Case], processes: int) -> Mapping[str, str]:
    """Run cases in `processes` processes; return outcomes by name."""
    names = [case.name for case in cases]
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        return dict(zip(names, pool.map(_run_named, names, chunksize=_TOGETHER), strict=True))


def _run_named(name: str) -> str:
    import jax

    with jax.enable_x64(True):
        return outcome(_by_name()[name])


@cache
def _by_name() -> Mapping[str, Case]:
    return {case.name: case for case in everything()}


def _of_files() -> Iterator[Case]:
    for kind in _KINDS:
        for case in load_model_tests(kind=kind):
            directory = Path(str(case.model_dir))
            model = onnx.load(directory / "model.onnx")
            sets = [_data(one) for one in sorted(directory.glob("test_data_set_*"))]
            yield Case(f"{kind}/{case.name}", model, sets)


def _data(directory: Path) -> tuple[Sequence[Any], Sequence[Any]]:
    return _tensors(directory, "input"), _tensors(directory, "output")


def _tensors(directory: Path, kind: str) -> list[TensorProto]:
    count = len(list(directory.glob(f"{kind}_*.pb")))
    return [onnx.load_tensor(directory / f"{kind}_{index}.pb") for index in range(count)]
