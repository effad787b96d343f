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
    # XLA multiplies by 1/255 where the case divides: a number half-way goes to the other side.
    "test_dynamicquantizelinear_expanded",
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


@pytest.mark.large
def test_every_case_of_onnx_passes_or_is_refused_for_a_known_reason() -> None:
    """Run it with `pytest -m large tests/models/onnx -s`; it prints the count of each outcome."""
    outcomes = {case.name: onnx_cases.outcome(case) for case in _cases()}
    print(*Counter(outcomes.values()).most_common(), sep="\n")

    failed = {name: said for name, said in outcomes.items() if said.startswith("FAILED")}

    assert failed.keys() <= DIFFERENT, failed
