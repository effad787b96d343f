"""R1 and R2: conclusions from stored results, and what a trial of a program detects."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import pytest
from support.row_trial import dependences
from support.rows import Inputs, exported

from acceptance import row_programs
from acceptance.figures import Outcome
from xlaserve.row_proofs import refining

NUMBERS: Inputs = [((4,), "float32")]


def concluded(folder: Path, outputs: Sequence[tuple[bool, str, str]]) -> Outcome:
    """Return the conclusion from programs judged earlier, with one output each."""
    lines = [{"seed": seed, "outputs": [output]} for seed, output in enumerate(outputs)]
    (folder / "moves.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return row_programs.judge(folder, family="moves", programs=len(outputs))


def test_an_output_that_is_proved_and_depends_on_others_fails_the_row(tmp_path: Path) -> None:
    outcome = concluded(tmp_path, [(True, "", ""), (True, "", "row 1 of 2")])

    assert ["outputs that are proved and depend on more than their row"] == outcome.failing
    assert any("1: row 1 of 2" in figure.value for figure in outcome.figures)


@pytest.mark.parametrize(("refused", "holds"), [(1, True), (2, False)])
def test_a_tenth_of_the_independent_outputs_may_be_refused(
    refused: int, holds: bool, tmp_path: Path
) -> None:
    independent = [(True, "", "")] * (10 - refused) + [(False, "a reason", "")] * refused

    outcome = concluded(tmp_path, [*independent, (False, "a reason", "row 1 of 2")])

    assert holds == outcome.holds


def test_a_run_goes_on_where_another_one_was_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def lines(family: str, seeds: Sequence[int]) -> list[dict[str, Any]]:
        asked.extend(seeds)
        return [{"seed": seed, "outputs": [(True, "", "")]} for seed in seeds]

    monkeypatch.setattr(row_programs, "_lines", lines)
    path = tmp_path / "broad.jsonl"
    path.write_text('{"seed": 5, "outputs": [[true, "", ""]]}\n{"seed": 6, "outp')

    outcome = row_programs.judge(tmp_path, family="broad", programs=3, first=5, processes=1)
    again = row_programs.judge(tmp_path, family="broad", programs=3, first=5, processes=1)

    assert [6, 7] == asked
    assert outcome.holds
    assert again == outcome


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_trial_says_which_output_depends_on_more_than_its_row(is_compiled: bool) -> None:
    found = exported(lambda x: [x * 2, x + x[:1], x + x.shape[0]], NUMBERS)

    with jax.enable_x64(True), refining.parsing():
        refinery = refining.Refinery(found, {}, "b")
        seen, was_compiled = dependences(refinery, NUMBERS, 1, is_compiled=is_compiled)

    assert is_compiled == was_compiled
    assert [False, True, True] == [bool(one) for one in seen]
