from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("onnx", reason="onnx is not installed")

from support import onnx_cases
from support.onnx_cases import Case

from xlaserve.importers.onnx.operators import OPERATORS


@cache
def _cases() -> list[Case]:
    return onnx_cases.cases()


def test_every_operator_is_in_the_documentation() -> None:
    text = (Path(__file__).parents[3] / "docs" / "onnx.md").read_text()
    rows = [line.split("|")[2] for line in text.splitlines() if line.startswith("| ")]

    named = {name for row in rows for name in row.split() if name[0].isupper()}

    assert {name for family in OPERATORS.values() for name in family} <= named


_FLOATS = ("FLOAT", "FLOAT16")
_FEW_BITS = ("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ")
_LOW_BITS = ("UINT4", "INT4", "UINT2", "INT2")


@pytest.mark.slow  # 26 compilations; those of inputs are in the suite
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


@pytest.mark.slow  # it compiles a program for each datatype
def test_a_quantisation_rounds_what_is_half_way_as_onnx_says() -> None:
    """XLA multiplies with the reciprocal of a divisor that it knows, the case divides."""
    (case,) = (case for case in _cases() if case.name == "test_dynamicquantizelinear_expanded")

    assert "passed" == onnx_cases.outcome(case)
