"""Each figure is judged by its own criterion, and an outcome by all its figures."""

from pathlib import Path

import numpy as np
import pytest

from acceptance import command, rows
from acceptance.figures import MIB, Outcome, growth, slope
from acceptance.loads import growth_per_cycle
from acceptance.rows import Row, Size

ROOT = Path(__file__).resolve().parents[2]


def test_an_outcome_without_figures_does_not_hold() -> None:
    assert not Outcome().holds


def test_an_outcome_holds_where_each_figure_does() -> None:
    outcome = Outcome()
    outcome.at_most("memory", 1, 1, " MiB")
    outcome.at_least("requests", 2, 1)
    outcome.none("errors", [])
    outcome.note("p99", 5)

    assert outcome.holds
    outcome.none("wrong answers", ["1 was 2", "1 was 2"])
    assert not outcome.holds
    assert ["wrong answers"] == outcome.failing
    assert "wrong answers: 2: 1 was 2 (criterion: 0) FAILS" == str(outcome.figures[-1])


@pytest.mark.parametrize(("value", "holds"), [(1.0, True), (1.01, False)])
def test_a_figure_may_be_as_large_as_its_criterion(value: float, *, holds: bool) -> None:
    outcome = Outcome()
    outcome.at_most("memory", value, 1)

    assert holds is outcome.holds


@pytest.mark.parametrize("leak", [0, 1000, 100_000])
def test_what_each_cycle_keeps_is_found_under_noise(leak: int) -> None:
    noise = np.random.default_rng(1).integers(0, MIB, 1000)
    resident = [float(500 * MIB + leak * cycle + noise[cycle]) for cycle in range(1000)]

    assert abs(slope(resident) - leak) < 500
    assert abs(growth_per_cycle(resident) - leak) < 500


def test_one_step_in_the_middle_is_no_slope() -> None:
    """An allocator that takes one more arena and keeps it does not leak."""
    resident = [100.0 * MIB] * 50 + [101.0 * MIB] * 50

    assert growth(resident) == 0
    assert growth([float(cycle) for cycle in range(100)]) > 0


# --- the table and its command -----------------------------------------------------------------


def test_ids_are_there_once() -> None:
    ids = [row.id for row in rows.ROWS]

    assert sorted(set(ids)) == sorted(ids)


def test_every_row_is_checked_or_tested() -> None:
    assert [] == [row.id for row in rows.ROWS if row.check is None and not row.tests]


def test_every_test_that_a_row_names_is_there() -> None:
    missing = []
    for row in rows.ROWS:
        for test in row.tests:
            file, _, name = test.partition("::")
            path = ROOT / file
            if not path.exists() or (name and f"def {name}(" not in path.read_text()):
                missing.append(f"{row.id}: {test}")

    assert [] == missing


def test_the_page_has_every_row_with_a_figure_and_a_command() -> None:
    lines = (ROOT / "docs" / "measurements" / "reliability.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
    shown = {row[0]: row for row in cells if row and row[0][1:].isdigit()}

    assert sorted(row.id for row in rows.ROWS) == sorted(shown)
    for row in rows.ROWS:
        _, _, _, figure, command = shown[row.id]
        assert figure
        assert command
        if row.environment in rows.ENVIRONMENTS:
            assert command.startswith(f"`{row.environment} -- --rows {row.id}"), command


def fake(*, holds: bool) -> Row:
    """Make a row with a known figure."""

    def check(
        folder: Path, *, count: int = 10, seconds: float = 60, without: tuple[str, ...] = ()
    ) -> Outcome:
        outcome = Outcome()
        outcome.add("count", count, f"for {seconds:g} s", holds=holds)
        outcome.note("left out", ", ".join(without))
        return outcome

    sizes = {Size.SHORT: {"count": 1}}
    return Row("X1", rows.SOAK, "nothing", "none", check, sizes, takes=("seconds", "without"))


@pytest.mark.parametrize(("holds", "status"), [(True, 0), (False, 1)])
def test_the_status_says_whether_criteria_are_met(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, holds: bool, status: int
) -> None:
    monkeypatch.setattr(command, "ROWS", (fake(holds=holds),))

    said = ["--seconds", "5", "--without", "grpc,rest"]
    assert status == command.main(["soak", "--short", *said])
    printed = capsys.readouterr().out
    assert "count: 1 (criterion: for 5 s)" in printed
    assert "left out: grpc, rest (" in printed
    assert f"below their criterion: {'none' if holds else 'X1'}" in printed


def test_a_row_that_an_environment_lacks_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["soak", "--rows", "H1"])

    assert "soak has no row H1" in capsys.readouterr().err
