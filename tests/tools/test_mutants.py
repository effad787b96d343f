"""The mutations, and how the tests of a small tree react to them."""

import ast
import subprocess
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import executed
import mutants
import warm
from mutations import mutations


def edited(source: str) -> set[str]:
    return {mutation.applied(source).strip() for mutation in mutations(source)}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = a < b", {"x = (a <= b)"}),
        ("x = a < b == c", {"x = (a <= b == c)", "x = (a < b != c)"}),
        ("x = a in b", {"x = (a not in b)"}),
        ("x = a is None", {"x = (a is not None)"}),
        ("x = a and b", {"x = (a or b)", "x = (a)", "x = (b)"}),
        (
            "x = a or b or c",
            {"x = (a and b and c)", "x = (b or c)", "x = (a or c)", "x = (a or b)"},
        ),
        ("x = not a", {"x = (a)"}),
        ("x = a + b", {"x = (a - b)"}),
        ("x = 1", {"x = 2"}),
        ("x = True", {"x = False"}),
        ("x = zip(f(1), strict=True)", {"x = zip(f(2), strict=True)"}),
        ("x = f(a, strict=True)", {"x = f(a, strict=False)"}),
        ("x = a if b else c", {"x = a if (not b) else c"}),
        ("x = [a for a in b if a]", {"x = [a for a in b if (not a)]"}),
        ("if a:\n    f()", {"if (not a):\n    f()", "if a:\n    pass"}),
        ("while True:\n    break", {"while True:\n    pass"}),
        ("for a in b:\n    continue", {"for a in b:\n    pass"}),
        ("def f():\n    return a", {"def f():\n    return None"}),
        ("def f():\n    return False", {"def f():\n    return True"}),
        ("def f(a=1): ...", {"def f(a=2): ..."}),
        ("async def f():\n    await a.b()", {"async def f():\n    pass"}),
        ("x += y", {"pass"}),
        ("raise ValueError", {"pass"}),
        ("try:\n    x = a\nexcept E:\n    raise", {"try:\n    x = a\nexcept E:\n    pass"}),
        (
            "try:\n    x = a\nexcept E:\n    b()\n    c()",
            {
                "try:\n    x = a\nexcept E:\n    raise",
                "try:\n    x = a\nexcept E:\n    pass\n    c()",
                "try:\n    x = a\nexcept E:\n    b()\n    pass",
            },
        ),
    ],
)
def test_each_mistake_is_one_edit(source: str, expected: set[str]) -> None:
    assert expected == edited(source)


@pytest.mark.parametrize(
    "source",
    [
        '"""A text of 1 and True."""',
        "x: Literal[1, True] = y",
        "X: TypeAlias = tuple[int, 1]",
        "@f(slots=True)\nclass A(B[1]): ...",
        "def f(a: Literal[1]) -> Literal[2]: ...",
        "_log.info('x', a=1 + 2)",
        "x = f'{a + 1}'",
        "assert a < b",
        "x = zip(a, b, strict=True)",
        "if TYPE_CHECKING:\n    f()",
        "__slots__ = (1,)",
        "def __repr__(self):\n    return 1",
        "def f():\n    return None",
    ],
)
def test_what_changes_no_answer_is_left_alone(source: str) -> None:
    assert set() == edited(source)


def test_every_mutant_of_the_server_is_another_program() -> None:
    """Each mutant compiles, and differs in the executed code."""
    found = [
        mutant
        for package in ("concurrency", "row_proofs/rules", "http/metrics/metrics")
        for mutant in mutants.sample(mutants.ROOT, package, 3, 25)
    ]
    for mutant in found:
        source = (mutants.ROOT / mutant.path).read_text()
        other = ast.parse(mutant.mutation.applied(source))

        assert ast.dump(ast.parse(source)) != ast.dump(other), mutant
    assert 75 == len(found)


def test_lines_and_letters_around_an_edit_stay() -> None:
    source = "# é\nx = [\n    'é', a < b,\n    'ö',\n]  # ü\n"

    assert {source.replace("a < b", "(a <= b)").strip()} == edited(source)


def test_a_seed_gives_the_same_sample_and_another_seed_another() -> None:
    first, same, other = (
        mutants.sample(mutants.ROOT, "concurrency", seed, 10) for seed in (1, 1, 2)
    )

    assert first == same
    assert first != other
    assert 10 == len(first)


def test_a_package_is_a_part_of_the_path() -> None:
    base = mutants.ROOT / mutants.PACKAGE

    def names(package: str) -> set[str]:
        found = mutants.modules(mutants.ROOT, package)
        return {path.relative_to(base).as_posix() for path in found}

    for package in ("rules", "row_proofs", "row_proofs.rules"):
        assert "row_proofs/rules/shape.py" in names(package)
    assert {"row_proofs/rules/shape.py"} == names("row_proofs/rules/shape")
    assert not names("rule")


def test_the_tests_of_a_module_are_those_that_import_it_and_those_through_the_door() -> None:
    path = Path("server/xlaserve/http/json/json_tensors.py")
    found = mutants.tests_of(mutants.ROOT, path)

    assert "tests/transport/rest/test_json_tensors.py" in found
    assert "tests/contract/test_v2_rest.py" in found


@pytest.mark.parametrize(
    ("module", "test"),
    [
        ("http/connection/fast_path", "tests/transport/rest/test_fast_path.py"),
        ("http/connection/server", "tests/transport/rest/test_server.py"),
        ("grpc/server", "tests/transport/grpc/test_server.py"),
        ("grpc/http2/frames", "tests/transport/http2/test_frames.py"),
        ("serving/call", "tests/core/serving/test_call.py"),
        ("residence/control", "tests/core/residence/test_control.py"),
        ("workers/channel", "tests/processes/test_channel.py"),
        ("model_config/ragged", "tests/models/test_ragged.py"),
        ("settings/__init__", "tests/test_settings.py"),
        ("artifact/__init__", "tests/models/test_artifact.py"),
    ],
)
def test_the_tests_named_for_a_module_are_found_in_the_folders_of_its_package(
    module: str, test: str
) -> None:
    path = mutants.PACKAGE / f"{module}.py"

    assert (mutants.ROOT / path).is_file()
    assert test in mutants.tests_of(mutants.ROOT, path)


def test_every_package_of_the_server_has_tests_of_its_own_that_are_there() -> None:
    """Without a row in the table, a mutant would run all tests, for hours."""
    base = mutants.ROOT / mutants.PACKAGE
    modules = [path.relative_to(base).with_suffix("") for path in base.rglob("*.py")]
    packages = {inner.parts[0] for inner in modules if len(inner.parts) > 1}
    alone = {inner.name for inner in modules if len(inner.parts) == 1} - {"__init__", "__main__"}

    for table in (mutants.HOMES, mutants.THROUGH_THE_DOOR):
        assert packages | alone == {prefix.partition("/")[0] for prefix in table}
        places = {one: (base / one, base / f"{one}.py") for one in table}
        assert [] == [one for one in places if not any(path.exists() for path in places[one])]
        assert [] == [one for one in table if not table[one]]
        named = {name for names in table.values() for name in names}
        assert [] == sorted(name for name in named if not (mutants.ROOT / name).exists())
    homes = {mutants.ROOT / home for homes in mutants.HOMES.values() for home in homes}
    assert [] == sorted(home for home in homes if not any(home.glob("test_*.py")))


TREE: Mapping[str, str] = {
    "server/xlaserve/__init__.py": "",
    "server/xlaserve/parity.py": "def is_even(x):\n    return x % 2 == 0\n\n\nLEAST = 3\n",
    "tests/test_parity.py": (
        "from xlaserve.parity import is_even\n\n\ndef test_even():\n    assert is_even(4)\n"
        "    assert not is_even(5)\n\n\ndef test_nothing():\n    pass\n"
    ),
    "pytest.ini": ("[pytest]\naddopts = -p no:asyncio -p no:hypothesispytest -p no:schemathesis\n"),
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


def test_mutants_that_no_test_notices_are_printed_as_patches(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tree itself is not modified."""
    every = mutants.sample(tree, "parity", 1, 100)
    chosen = [one for one in every if one.mutation.replacement in ("4", "(x % 2 != 0)")]
    noticed = mutants.tried(tree, chosen)
    said = capsys.readouterr().out

    assert (2, 1) == (len(chosen), noticed)
    assert 1 == said.count("killed server/xlaserve/parity.py:2 comparison")
    assert 1 == said.count("LIVED server/xlaserve/parity.py:5 constant")
    assert "-LEAST = 3\n+LEAST = 4\n" in said
    assert TREE["server/xlaserve/parity.py"] == (tree / "server/xlaserve/parity.py").read_text()


def test_a_mutant_is_tried_by_the_tests_that_execute_its_line(tree: Path) -> None:
    """If an import executes the line, or on Python 3.11, all tests of the module run."""
    every = mutants.sample(tree, "parity", 1, 100)
    with closing(mutants.Copy(tree)) as copy:
        trial = copy.trial(every)

    chosen = {one.mutation.start[0]: trial.of(tree / one.path, one.mutation) for one in every}
    executing = ["tests/test_parity.py::test_even"] if executed.IS_POSSIBLE else []
    assert {2: executing, 5: []} == {line: list(tests) for line, tests in chosen.items()}


LATE = "with open('imports', 'a') as imports:\n    imports.write('once ')\n"
"""Executed whenever a test module is imported."""
ENDLESS = "import atexit\nimport threading\natexit.register(threading.Event().wait)\n"
"""Blocks the interpreter's exit, as XLA and onnxruntime do when they wait for a lost thread."""
THREAD = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"


@pytest.mark.skipif(not executed.IS_POSSIBLE, reason="needs Python 3.12 to know executed lines")
@pytest.mark.parametrize(
    ("before", "imports"),
    [(ENDLESS + LATE, 1), (THREAD + LATE, 3)],
    ids=["forks", "threads"],
)
def test_tests_are_collected_once_for_all_mutants_of_functions(
    tree: Path, capsys: pytest.CaptureFixture[str], before: str, imports: int
) -> None:
    """If an import starts a thread, which a fork would lack, tests are collected for each run."""
    file = tree / "tests/test_parity.py"
    file.write_text(before + file.read_text())
    every = mutants.sample(tree, "parity", 1, 100)
    chosen = next(one for one in every if one.mutation.replacement == "(x % 2 != 0)")
    with closing(mutants.Copy(tree)) as copy:
        trial = copy.trial(every)
        fate = copy.fate(chosen, trial)

    assert mutants.KILLED == fate
    assert imports == (tree / "imports").read_text().count("once")
    assert (imports > 1) == ("2 threads after collection" in capsys.readouterr().out)


def test_a_mutant_that_no_end_is_seen_of_is_stopped(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutants, "_MORE_SECONDS", 0.0)
    module = tree / "server/xlaserve/parity.py"
    module.write_text("def is_even(x):\n    while x > 1:\n        x -= 2\n    return x == 0\n")
    every = mutants.sample(tree, "parity", 1, 100)
    chosen = next(one for one in every if one.mutation.kind == "assignment left out")
    with closing(mutants.Copy(tree)) as copy:
        assert mutants.STOPPED == copy.fate(chosen, copy.trial(every))


NESTED = """
def over(x):
    y = 1
    def inner():
        return %s, y
    return inner
f = over(2)
"""


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("x", "x + 1", 3),
        ("x < 2", "x <= 2", True),
        ("x", "0", None),
        ("(lambda: x)()", "x", None),
    ],
)
def test_functions_get_the_code_of_an_edited_module(
    before: str, after: str, expected: int | None
) -> None:
    """Applies to existing functions too, unless the new code needs other closure variables."""
    made: dict[str, Any] = {}
    exec(compile(NESTED % before, "nested.py", "exec"), made)

    assert (expected is not None) == warm.edited("nested.py", NESTED % before, NESTED % after)
    if expected is not None:
        assert [(expected, 1)] * 2 == [made["f"](), made["over"](2)()]


@pytest.mark.slow
def test_tests_that_fail_without_a_mutation_prove_nothing(tree: Path) -> None:
    (tree / "tests/test_parity.py").write_text(
        "from xlaserve.parity import LEAST\n\n\ndef test_bad():\n    assert False\n"
    )

    with pytest.raises(ValueError, match="without a mutation, tests/test_parity.py ends with 1"):
        mutants.tried(tree, mutants.sample(tree, "parity", 1, 1))
