"""The documentation of OpenAI's endpoints covers every field."""

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from xlaserve.openai import fields
from xlaserve.openai.bodies import ChatFields, CompletionFields, Sampling

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "openai.md").read_text()


def section(title: str) -> str:
    found = re.search(rf"^### {title}\n(.*?)^##", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def names_of(kind: type[msgspec.Struct], but: type[msgspec.Struct] | None = None) -> set[str]:
    without = set() if but is None else names_of(but)
    return {field.name for field in msgspec.structs.fields(kind)} - without


@pytest.mark.parametrize(
    ("title", "names"),
    [
        ("Obeyed by both", names_of(Sampling)),
        ("Obeyed by completions", names_of(CompletionFields, Sampling)),
        ("Obeyed by chats", names_of(ChatFields, Sampling)),
    ],
)
def test_fields_that_are_obeyed(title: str, names: set[str]) -> None:
    rows = re.findall(r"^\| (`.*?) \|", section(title), re.MULTILINE)

    assert names == {name for row in rows for name in re.findall(r"`(\w+)`", row)}


@pytest.mark.parametrize(
    ("endpoint", "hints"),
    [("completions", fields.COMPLETION_HINTS), ("chats", fields.CHAT_HINTS)],
)
def test_hints(endpoint: str, hints: Sequence[str]) -> None:
    row = re.search(rf"^\| {endpoint} \| (.*) \|$", section("Hints"), re.MULTILINE)

    assert row is not None
    assert list(hints) == re.findall(r"`(\w+)`", row[1])


def test_fields_that_are_refused() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|", section("Refused"), re.MULTILINE)
    known = {
        "completions": fields.COMPLETION_REFUSED,
        "chats": fields.CHAT_REFUSED,
        "messages": fields.MESSAGE_REFUSED,
    }

    assert sorted(rows) == sorted((name, of) for of, those in known.items() for name in those)
