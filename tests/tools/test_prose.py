"""The prose checker finds each habit, ignores code, and finds nothing in this repository."""

from pathlib import Path

import pytest

import prose
from prose import HABITS, MOST_WORDS, Kind, Text

ROOT = Path(__file__).resolve().parents[2]
FILE = Path("a.py")

ODD = (
    "What is asked to stay on the device is for nobody.",
    "Reads what a client sent.",
    "Nobody waits any more.",
    "It has done so since then.",
    "Lines used to be made in a thread.",
    "Wanted were 1.35.",
    "The load was called off.",
    "Requests stand in line.",
    "Let go of a buffer.",
    "No client is let in.",
    "A version directory of before.",
    "The others are gone on with.",
)
PLAIN = (
    "What is a row?",
    "It says what is wrong with a file.",
    "There are many more of them.",
    "A file is used to find it.",
    "Keys are used to sign.",
    "Wanted: a test.",
    "A request before it is admitted.",
)


@pytest.mark.parametrize(("habit", "odd"), list(zip(HABITS, ODD, strict=True)))
def test_each_habit_is_found(habit: prose.Habit, odd: str) -> None:
    kind = Kind.PAGE if habit.kinds & Kind.PAGE else Kind.CAPTION
    (found,) = prose.findings(Text(kind, FILE, 3, odd))

    assert found.startswith("a.py:3: '")
    assert found.endswith(f": {habit.remedy}")


@pytest.mark.parametrize("text", PLAIN)
def test_plain_english_is_no_finding(text: str) -> None:
    assert [] == list(prose.findings(Text(Kind.PAGE, FILE, 1, text)))


def test_a_caption_has_a_most_of_words_besides_references() -> None:
    fits = " ".join(["word"] * MOST_WORDS) + " (RFC 9113, 6.8)."
    long = f"one {fits}"

    assert [] == list(prose.findings(Text(Kind.CAPTION, FILE, 1, fits)))
    assert [f"a.py:1: caption of {MOST_WORDS + 1} words, expected at most {MOST_WORDS}"] == list(
        prose.findings(Text(Kind.CAPTION, FILE, 1, long))
    )
    assert [] == list(prose.findings(Text(Kind.DOCSTRING, FILE, 1, long)))


def test_docstrings_and_texts_of_errors_are_read_and_other_code_is_not() -> None:
    source = '''"""A caption. More of it.

Another paragraph."""

class Gone(Exception):
    """One
    line."""

    def __init__(self):
        super().__init__("an error")

def f(x="any more"):
    """A function."""
    raise ValueError(f"{x} is wrong")
'''
    found = {(text.kind, text.line, text.words) for text in prose.in_module(source, FILE)}

    assert {
        (Kind.DOCSTRING, 1, "A caption. More of it."),
        (Kind.CAPTION, 1, "A caption."),
        (Kind.DOCSTRING, 5, "One line."),
        (Kind.ERROR, 10, "an error"),
        (Kind.DOCSTRING, 12, "A function."),
        (Kind.ERROR, 14, " is wrong"),
    } == found


def test_headings_and_code_of_a_page_are_no_prose() -> None:
    page = (
        "# What is trusted\n\n    any more\n\n```\nany more\n```\nsome `any more` here\n- an item\n"
    )

    assert [(8, "some `code` here"), (9, "- an item")] == [
        (text.line, text.words) for text in prose.in_page(page, FILE) if text.words
    ]


def test_a_finding_fails_the_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "page.md"
    page.write_text("a page\n")
    assert 0 == prose.main([str(tmp_path)])

    page.write_text("a page\nof before\n")
    assert 1 == prose.main([str(tmp_path)])
    assert "docs/page.md:2: 'of before'" in capsys.readouterr().out


def test_every_kind_of_text_of_the_repository_is_checked() -> None:
    files = {text.file for text in prose.texts(ROOT)}

    assert Path("README.md") in files
    assert Path("docs/index.md") in files
    assert Path("server/xlaserve/serving/README.md") in files
    assert Path("server/xlaserve/serving/engine.py") in files
