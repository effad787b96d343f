"""Every check that ends a stream or a connection cites its section in a comment."""

import ast
import re
from pathlib import Path

import pytest

from xlaserve.grpc import http2

FOLDER = Path(http2.__path__[0])
FAILURES = {"ConnectionFailure", "StreamFailure", "_fail"}
SECTION = re.compile(r"(?<![\d.])([1-9]|10)(\.\d+){1,3}(?![\d.])|RFC 7541 ")

FILES = [
    "control_frames.py",
    "data_frames.py",
    "flow_control.py",
    "frame_reader.py",
    "header_frames.py",
    "streams.py",
]
"""Modules that validate frames."""

ELSEWHERE = {
    "connection.py": "ends a connection for its user",
    "limits.py": "counts, whatever the frames are",
    "headers.py": "cites the sections of its rules in its own way",
    "errors.py": "",
}


def checks(source: str) -> list[tuple[int, str]]:
    """Return the line of each failure, with the text of the check above it."""
    lines = source.splitlines()
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Raise | ast.Expr):
            continue
        call = node.exc if isinstance(node, ast.Raise) else node.value
        if isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] in FAILURES:
            found.append(
                (node.lineno, "\n".join(_check_above(lines, node.lineno - 1, node.end_lineno)))
            )
    return found


def _check_above(lines: list[str], at: int, end: int | None) -> list[str]:
    """Return the statement and its enclosing condition, with their comments."""
    indent = len(lines[at]) - len(lines[at].lstrip())
    taken = lines[at:end]
    while at > 0:
        at -= 1
        taken.insert(0, lines[at])
        outer = len(lines[at]) - len(lines[at].lstrip())
        if lines[at].strip() and outer < indent and not lines[at].lstrip().startswith(")"):
            break
    return taken


@pytest.mark.parametrize("name", FILES)
def test_every_check_names_its_section(name: str) -> None:
    source = (FOLDER / name).read_text()
    without = [line for line, text in checks(source) if not SECTION.search(_comments(text))]

    assert [] == without
    assert checks(source)


def _comments(text: str) -> str:
    return "\n".join(re.findall(r"#.*|\"\"\".*", text))


def test_no_file_is_left_out() -> None:
    raising = {
        path.name
        for path in FOLDER.glob("*.py")
        if re.search("ConnectionFailure\\(|StreamFailure\\(", path.read_text())
    }

    assert raising <= {*FILES, *ELSEWHERE}


def test_a_check_without_a_section_is_found() -> None:
    """Otherwise the test above could not fail."""
    cited = "def f(a):\n    if a:  # 6.9.1\n        raise StreamFailure(1)\n"

    assert [SECTION.search(_comments(text)) is not None for _, text in checks(cited)] == [True]
    plain = cited.replace("  # 6.9.1", "")
    assert [SECTION.search(_comments(text)) is not None for _, text in checks(plain)] == [False]
