"""The tables of GPUs and TPUs match the figures, and every row is valid."""

from dataclasses import replace

import pytest

import accelerators_page
from accelerators_page import Row
from xlaserve.runtime.devices.target_kinds import TARGETS

ROW = Row("m", "h100", "1,8", 100, 10, 1000, 1005)


def test_page_is_fresh_and_its_rows_are_sound() -> None:
    assert {} == accelerators_page.stale()
    assert [] == list(accelerators_page.problems(accelerators_page.measured()))


def test_examples_were_measured_on_a_gpu_and_on_a_tpu() -> None:
    found = {(row.model, TARGETS[row.target].platform) for row in accelerators_page.measured()}

    assert {
        (model, platform)
        for model in ("digits", "identity", "mlp", "simple")
        for platform in ("cuda", "tpu")
    } <= found


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"reserved": 1020}, ["m on h100: 2.0% difference without a reason"]),
        ({"reserved": 1020, "why": "code"}, []),
        (
            {"reserved": 980, "why": "code"},
            ["m on h100: reserved less than the compiler's figure"],
        ),
        ({"compiled": 0, "reserved": 1}, ["m on h100: 100.0% difference without a reason"]),
    ],
)
def test_a_row_that_differs_says_why_and_never_reserves_less(
    changes: dict[str, int], expected: list[str]
) -> None:
    assert expected == list(accelerators_page.problems([replace(ROW, **changes)]))  # type: ignore[arg-type]


def test_nothing_measured_is_a_problem() -> None:
    assert ["nothing was measured"] == list(accelerators_page.problems([]))


def test_a_page_without_a_place_for_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match="no place for the table of kinds"):
        accelerators_page.page("# GPUs\n", "kinds", [])
