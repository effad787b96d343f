from collections import Counter
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("onnx", reason="onnx is not installed")

from support import onnx_cases
from support.onnx_cases import Case

from xlaserve.models.onnx.operators import OPERATORS

EACH = 1
"""How many cases of each operator run by default; `-m large` runs them all."""

DIFFERENT = {
    # Ours is what onnxruntime and PyTorch give: the corners of the whole pixels of the result.
    "test_resize_downsample_scales_linear_align_corners",
    "test_resize_downsample_scales_cubic_align_corners",
}


@cache
def _cases() -> list[Case]:
    return onnx_cases.cases()


def test_every_operator_is_in_the_documentation() -> None:
    text = (Path(__file__).parents[3] / "docs" / "onnx.md").read_text()
    rows = [line.split("|")[2] for line in text.splitlines() if line.startswith("| ")]

    named = {name for row in rows for name in row.split() if name[0].isupper()}

    assert {name for family in OPERATORS.values() for name in family} <= named


def test_operators_give_what_onnx_says() -> None:
    """The first cases of each operator pass, or are refused for a reason that is known."""
    outcomes = {case.name: onnx_cases.outcome(case) for case in onnx_cases.few(_cases(), EACH)}

    assert {} == {name: said for name, said in outcomes.items() if said.startswith("FAILED")}
    assert list(outcomes.values()).count("passed") >= 130


_FLOATS = ("FLOAT", "FLOAT16")
_FEW_BITS = ("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ")
_LOW_BITS = ("UINT4", "INT4", "UINT2", "INT2")


def test_a_conversion_to_the_type_of_a_constant_saturates_or_keeps_low_bits_as_onnx_says() -> None:
    """An input cannot have such a type, a constant can: 16 cases, and those without saturation."""
    named = {
        f"test_castlike_{saturation}{source}_to_{target}"
        for source in _FLOATS
        for target in (*_FEW_BITS, *_LOW_BITS, "FLOAT4E2M1")
        for saturation in ("", "no_saturate_")
    }
    found = [case for case in _cases() if case.name in named]
    outcomes = {case.name: onnx_cases.outcome(onnx_cases.with_constant(case, 1)) for case in found}

    assert dict.fromkeys(outcomes, "passed") == outcomes
    assert 26 == len(outcomes)


def test_a_quantisation_rounds_what_is_half_way_as_onnx_says() -> None:
    """XLA multiplies with the reciprocal of a divisor that it knows, the case divides."""
    (case,) = (case for case in _cases() if case.name == "test_dynamicquantizelinear_expanded")

    assert "passed" == onnx_cases.outcome(case)


@pytest.mark.large
def test_every_case_of_onnx_passes_or_is_refused_for_a_known_reason() -> None:
    """Run it with `pytest -m large tests/models/onnx -s`; it prints the count of each outcome."""
    outcomes = {case.name: onnx_cases.outcome(case) for case in _cases()}
    print(*Counter(outcomes.values()).most_common(), sep="\n")

    failed = {name: said for name, said in outcomes.items() if said.startswith("FAILED")}

    assert failed.keys() <= DIFFERENT, failed
