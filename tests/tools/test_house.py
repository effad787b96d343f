"""The house rules: sizes of files and classes, and READMEs that match the code."""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from architecture.told import TOUR

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "server" / "xlaserve"

MOST_LINES = 500
LONGER: Mapping[str, int] = {
    "server/xlaserve/settings/__init__.py": 508,
    "server/xlaserve/serving/stations/batching.py": 514,
    "server/xlaserve/errors/__init__.py": 568,
    "server/xlaserve/row_proofs/rules/shape.py": 512,
    "server/xlaserve/runtime/exported/jax_export.py": 561,
}
"""Line counts of files beyond the limit; the numbers may only decrease."""
MOST_METHODS = 25
LARGER: Mapping[str, int] = {"ProcessCopy": 28, "FastPath": 26}
"""Method counts of classes beyond the limit; the numbers may only decrease."""

HARD_FOLDERS = (
    *("residence", "serving", "serving/stations", "runtime", "row_proofs", "generation"),
    *("importers/onnx", "importers/pt2", "python_models", "offline/targets"),
    *("grpc", "grpc/http2", "http", "workers"),
)


def classes() -> Iterator[tuple[str, int]]:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                functions = (ast.FunctionDef, ast.AsyncFunctionDef)
                yield node.name, sum(isinstance(inner, functions) for inner in node.body)


def test_no_file_is_too_long() -> None:
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines())
        for path in PACKAGE.rglob("*.py")
    }
    found = {name: lines for name, lines in lengths.items() if lines > MOST_LINES}

    assert {} == {name: lines for name, lines in found.items() if lines > LONGER.get(name, 0)}
    assert [] == [name for name in LONGER if name not in found]


def test_no_class_has_too_many_methods() -> None:
    found = {name: count for name, count in classes() if count > MOST_METHODS}

    assert {} == {name: count for name, count in found.items() if count > LARGER.get(name, 0)}
    assert [] == [name for name in LARGER if name not in found]


@pytest.mark.parametrize("folder", HARD_FOLDERS)
def test_files_that_a_readme_names_are_there(folder: str) -> None:
    text = (PACKAGE / folder / "README.md").read_text()
    here = PACKAGE / folder
    # Names are relative to the README's directory, one below it, the package, or the root.
    bases = (here, *(path for path in here.rglob("*") if path.is_dir()), PACKAGE, ROOT)
    named = set(re.findall(r"`((?:\.\./)?[\w/]+\.(?:py|md|proto))`", text)) - {"model.py"}

    assert named
    assert [] == [name for name in named if not any((base / name).exists() for base in bases)]


@pytest.mark.parametrize("folder", ["serving/stations", "python_models", "workers"])
def test_every_file_of_a_folder_is_in_its_readme(folder: str) -> None:
    text = (PACKAGE / folder / "README.md").read_text()
    files = {path.name for path in (PACKAGE / folder).glob("[a-z]*.py")}

    assert set() == {name for name in files if f"`{name}`" not in text}


def test_names_on_the_newcomers_tour_are_in_the_code() -> None:
    """Each row's directory exists and contains the names that the change touches."""
    rows = [line.split(" | ") for line in TOUR.splitlines() if re.match(r"\| an? ", line)]

    assert ["datatype", "route", "RPC", "permission", "response cache"] == [
        row[0].removeprefix("| ").removeprefix("an ").removeprefix("a ") for row in rows
    ]
    for _, room, touched, _ in rows:
        place = PACKAGE / room.strip("`")
        files = [place] if place.is_file() else list(place.glob("*.py"))
        there = "".join(path.read_text() for path in files)
        elsewhere = "".join(
            (PACKAGE / path).read_text() for path in re.findall(r"`([a-z]+/[\w/]+\.py)`", touched)
        )
        for name in re.findall(r"`([\w/]+\.py)`", touched):
            bases = (PACKAGE, place, ROOT)
            assert any((base / name).is_file() for base in bases), (room, name)
        for name in re.findall(r"`(?:[\w/]+\.py: )?(_?[A-Z]\w*[a-zA-Z])(?:\.(\w+))?`", touched):
            for part in filter(None, name):
                defined = rf"^ *(?:class |(?:async )?def )?{part}\b *[:=(]"
                assert re.search(defined, there + elsewhere, re.MULTILINE), (room, part)


def test_a_module_that_is_run_defines_nothing_below_that() -> None:
    """When the module runs as a program, later definitions do not exist yet."""
    run = [path for path in PACKAGE.rglob("*.py") if "__main__" in path.read_text()]
    ends = {path.name: ast.parse(path.read_text()).body for path in run}

    assert "child.py" in ends
    assert [] == [name for name, body in ends.items() if any(map(_is_run, body[:-1]))]


def _is_run(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and "__main__" in ast.unparse(statement.test)
