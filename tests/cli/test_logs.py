"""`xlaserve logs`: JSON lines become readable lines, and nothing is lost."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from xlaserve.cli import application

RECORDS: tuple[dict[str, object], ...] = (
    {"timestamp": "2026-11-27T10:00:00Z", "level": "info", "event": "loaded", "model": "a"},
    {"level": "warning", "event": "slow", "model": "b", "seconds": 2.5, "exception": "Tr\n  x"},
    {"level": "critical", "event": "gone", "model": "a", "text": "a\u001b[2Jb"},
)
LOG = "".join(f"{line}\n" for line in [*map(json.dumps, RECORDS), "Fatal: no JSON", "[1]"])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            [],
            [
                "2026-11-27T10:00:00Z info     loaded  model=a",
                "warning  slow  model=b seconds=2.5",
                "    Tr",
                "      x",
                "critical gone  model=a text=a\\x1b[2Jb",
                "Fatal: no JSON",
                "[1]",
            ],
        ),
        (
            ["--level", "warning", "--model", "a"],
            ["critical gone  model=a text=a\\x1b[2Jb"],
        ),
        (["--level", "error"], ["critical gone  model=a text=a\\x1b[2Jb", "Fatal: no JSON", "[1]"]),
    ],
)
def test_records_are_lines_for_people(
    tmp_path: Path, arguments: list[str], expected: list[str]
) -> None:
    file = tmp_path / "log"
    file.write_text(LOG)
    for given, sent in (([str(file)], ""), ([], LOG)):
        result = CliRunner().invoke(application(), ["logs", *given, *arguments], input=sent)

        assert result.exit_code == 0, result.output
        assert result.output.splitlines() == expected


def test_a_log_of_a_server_is_shown(tmp_path: Path) -> None:
    """Lines that are not valid JSON are shown too, even in a file of another encoding."""
    file = tmp_path / "log"
    file.write_bytes(b'{"event": "\xff"}\n' + b"[" * 10_000 + b'\n{"event": 1, "level": "odd"}\n')

    result = CliRunner().invoke(application(), ["logs", str(file)])

    assert result.exit_code == 0, result.output
    first, second, third = result.output.splitlines()
    assert first.startswith("info")
    assert second == "[" * 10_000
    assert third == "odd      1"
