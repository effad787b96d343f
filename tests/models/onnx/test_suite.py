"""Cases of onnx's own suite: one per operator, and with `slow` a third of all.

`tox run -e onnx` runs all of them, and counts.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from support import onnx_cases, onnx_models, onnx_suite

SHARDS = 6


def check(cases: Sequence[onnx_cases.Case]) -> None:
    outcomes = {case.name: onnx_suite.outcome(case) for case in cases}

    assert {} == {name: said for name, said in outcomes.items() if said.startswith("FAILED")}
    assert onnx_cases.PASSED in outcomes.values()


@pytest.mark.parametrize("shard", range(SHARDS))
def test_a_case_of_each_operator_passes_or_is_refused_for_a_known_reason(shard: int) -> None:
    check(list(onnx_suite.first_of_each(onnx_suite.everything()))[shard::SHARDS])


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
def test_a_third_of_the_cases_passes_or_is_refused_for_a_known_reason(shard: int) -> None:
    """Except those that the test above has run."""
    cases = onnx_suite.everything()
    known = {case.name for case in onnx_suite.first_of_each(cases)}
    found = [case for case in onnx_suite.third(cases) if case.name not in known]
    check(found[shard::SHARDS])


def test_first_of_each_has_every_operator_and_the_third_has_more() -> None:
    cases = onnx_suite.everything()
    third = [case.name for case in onnx_suite.third(cases)]
    found = list(onnx_suite.first_of_each(cases))

    assert 2000 <= len(cases) <= 3 * len(third)
    assert {case.name for case in found} < set(third)
    assert {name for case in cases for name in case.operators} == {
        name for case in found for name in case.operators
    }


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("test_relu", onnx_cases.PASSED),
        ("test_hannwindow", onnx_cases.HELD),  # of an operator that wants it known
        ("test_hannwindow_expanded", onnx_cases.HELD),  # of what that is computed from
        ("test_reshape_extended_dims", onnx_cases.HELD),
    ],
)
def test_a_case_says_whether_its_inputs_were_held_constant(name: str, said: str) -> None:
    (case,) = (case for case in onnx_suite.everything() if case.name == name)

    assert said == onnx_suite.outcome(case)


@pytest.mark.parametrize("name", sorted(onnx_suite.DIFFERENT))
def test_what_is_other_than_onnx_says_is_what_onnxruntime_gives(name: str) -> None:
    (case,) = (case for case in onnx_suite.everything() if case.name == name)
    ((inputs, outputs),) = case.data_sets
    names = [item.name for item in case.model.graph.input if item.name]
    given = dict(zip(names, map(np.asarray, inputs), strict=True))
    shaped = {"X": given.pop("X")}
    graph = onnx_models.graph_of(case.model)
    (found,) = onnx_cases.compute(
        replace(graph, constants={**graph.constants, **given}), shaped
    ).values()
    (expected,) = onnx_models.theirs(case.model, shaped | given)

    assert not np.allclose(expected, outputs[0], atol=1e-2)
    np.testing.assert_allclose(found, expected, atol=1e-5)
