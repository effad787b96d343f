"""The drawings of the tables of states: that they are fresh, and leave nothing out."""

import re
import sys
from pathlib import Path

import pytest

import draw_lifecycle
from xlaserve.grpc.http2.states import TRANSITIONS, Reaction, State

DRAWINGS = {drawing.page: drawing for drawing in draw_lifecycle.DRAWINGS}


@pytest.mark.parametrize("name", DRAWINGS)
def test_the_page_is_fresh(name: str) -> None:
    assert DRAWINGS[name].text() == (draw_lifecycle.DOCS / name).read_text()


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_page_names_its_table(name: str) -> None:
    source = DRAWINGS[name].source

    assert source in DRAWINGS[name].text()
    assert (draw_lifecycle.DOCS.parent / source).is_file()


def test_every_row_of_the_streams_is_drawn_or_listed() -> None:
    page = DRAWINGS["http2-streams.md"].text()
    drawn = {
        (before, name)
        for before, names in re.findall(r"^    (\w+) --> \w+: (.*)$", page, re.MULTILINE)
        for name in names.split(", ")
    }
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| ")]
    columns = [cell.strip() for cell in rows[0][1:]]
    listed = {
        (row[0].strip(), column)
        for row in rows[1:]
        for column, cell in zip(columns, row[1:], strict=True)
        if cell.strip() in Reaction.__members__
    }

    assert {row[0].strip() for row in rows[1:]} <= {state.name for state in State}
    assert not drawn & listed
    assert {(s.name, i.name) for s, row in TRANSITIONS.items() for i in row} == drawn | listed


def test_a_stale_page_fails_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["draw_lifecycle.py", *arguments])
        return draw_lifecycle.main()

    monkeypatch.setattr(draw_lifecycle, "DOCS", tmp_path)
    codes = [run("--check"), run(), run("--check")]
    (tmp_path / "http2-streams.md").write_text("stale")

    assert [1, 0, 0, 1] == [*codes, run("--check")]
    assert "http2-streams.md is stale" in capsys.readouterr().out
