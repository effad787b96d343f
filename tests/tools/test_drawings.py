"""The drawings of the state tables are up to date and complete."""

import re
from pathlib import Path

import pytest

from architecture.drawings import DRAWINGS
from xlaserve.grpc.http2.states import TRANSITIONS, Reaction, State

ROOT = Path(__file__).resolve().parents[2]
BY_TITLE = {drawing.title: drawing for drawing in DRAWINGS}


@pytest.mark.parametrize("title", BY_TITLE)
def test_the_architecture_page_has_the_drawing(title: str) -> None:
    assert f"\n{BY_TITLE[title].text()}" in (ROOT / "docs" / "architecture.md").read_text()


@pytest.mark.parametrize("title", BY_TITLE)
def test_a_drawing_names_its_table(title: str) -> None:
    source = BY_TITLE[title].source

    assert source in BY_TITLE[title].text()
    assert (ROOT / source).is_file()


def test_every_row_of_the_streams_is_drawn_or_listed() -> None:
    page = BY_TITLE["The states of an HTTP/2 stream"].text()
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
