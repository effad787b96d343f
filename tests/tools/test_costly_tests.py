"""The table of costly tests: chosen by their cost, and all existing."""

import ast
import json
from pathlib import Path

import pytest

import costly_tests

ROOT = Path(__file__).resolve().parents[2]
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def lines(tests: dict[str, float]) -> list[str]:
    return [json.dumps(list(test)) for test in tests.items()]


def test_the_last_run_of_a_test_counts_and_parameters_are_one_function() -> None:
    found = costly_tests.costs(
        [*lines({"a.py::f[1]": 9.0, "a.py::f[2]": 2.0}), '["a.py::f[1]", 1]']
    )

    assert found == {"a.py::f": [1, 2.0]}


@pytest.mark.parametrize(
    ("rest", "expected"),
    [(11, []), (10, ["one"]), (9, ["one"]), (5, ["many", "one"]), (0, ["f", "many", "one"])],
)
def test_the_functions_with_the_costliest_tests_are_named_until_the_rest_is_small(
    rest: float, expected: list[str]
) -> None:
    functions = {"one": [2.0], "many": [1.0] * 8, "f": [0.5, 0.5]}

    assert costly_tests.costliest(functions, rest) == expected


def test_a_table_is_read_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costly_tests, "TABLE", tmp_path / "costly.tsv")
    costly_tests.TABLE.write_text(
        costly_tests.table({"a.py::f": [2.0, 1.0], "b.py::g": [0.1]}, 0.5)
    )

    assert costly_tests.TABLE.read_text().splitlines()[1:] == ["a.py::f\t3.0\t2"]
    assert costly_tests.named() == {"a.py::f"}


def test_what_the_table_names_is_there() -> None:
    """A renamed function would silently return to `tox run`."""
    missing = []
    for test in costly_tests.named():
        file, *names = test.split("::")
        path = ROOT / file
        if not (path.exists() and _is_defined(path, names[0])):
            missing.append(test)

    assert not missing


def _is_defined(path: Path, name: str) -> bool:
    """Tell whether a module defines a test with a name, or a state machine's test case."""
    body = ast.parse(path.read_text()).body
    defined = [node.name for node in body if isinstance(node, DEFINITIONS)]
    assigned = [
        ast.unparse(target)
        for node in body
        if isinstance(node, ast.Assign)
        for target in node.targets
    ]
    return name in (*defined, *assigned)
