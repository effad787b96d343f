"""Failed tests are run again: those that then pass are flaky, the others fail."""

import asyncio
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.unsteady import REMEMBERED_SECONDS

SETTINGS = Path(__file__).resolve().parents[2] / "pyproject.toml"
CONFTEST = """
from support import unsteady

pytest_addoption = unsteady.pytest_addoption
pytest_configure = unsteady.pytest_configure
"""
UNSTEADY = """
import os
from pathlib import Path

def once(name):
    place = Path(__file__).with_name(name)
    if not place.exists():
        place.write_text("")
        raise AssertionError(f"{name} the first time")
    print(f"{name} the second time, {os.environ.get('PYTEST_XDIST_WORKER')}")
"""


def unsteady(*names: str) -> str:
    return UNSTEADY + "".join(f"\n\ndef test_{name}():\n    once('{name}')\n" for name in names)


class Project:
    """A few tests, and pytest's output for them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.memory = folder / "kept" / "unsteady"
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setenv("UNSTEADY_RUN", "this")
        (folder / "conftest.py").write_text(CONFTEST)

    def write(self, files: Mapping[str, str]) -> None:
        for name, text in files.items():
            (self.folder / f"test_{name}.py").write_text(text)

    def remember(self, test: str, run: str, seconds_ago: float) -> None:
        self.memory.parent.mkdir()
        line = {"test": test, "run": run, "seconds": time.time() - seconds_ago}
        self.memory.write_text(json.dumps(line) + "\n")

    def remembered(self) -> list[str]:
        if not self.memory.exists():
            return []
        return sorted(json.loads(line)["test"] for line in self.memory.read_text().splitlines())

    async def run(self, *options: str, workers: int = 0) -> tuple[int, str]:
        places = ("-c", str(SETTINGS), "--rootdir", str(self.folder), str(self.folder))
        plugins = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "pytest", *places, *plugins, "--numprocesses", str(workers)),
            *("--unsteady", str(self.memory), *options),
            cwd=self.folder,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said, _ = await process.communicate()
        assert process.returncode is not None
        return process.returncode, said.decode()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    return Project(tmp_path, monkeypatch)


async def test_a_test_that_fails_once_is_told_and_the_run_succeeds(project: Project) -> None:
    """Both outputs are printed, and the summary counts the test once."""
    project.write({"some": unsteady("a", "b", "c") + "\n\ndef test_good(): ...\n"})
    code, said = await project.run(workers=2)

    assert 0 == code, said
    assert "1 passed, 3 unsteady" in said
    for name in "abc":
        assert f"UNSTEADY test_some.py::test_{name}: failed, then passed alone" in said
        assert f"AssertionError: {name} the first time" in said
        assert f"{name} the second time, None" in said, "in a process of its own"
    assert [f"test_some.py::test_{name}" for name in "abc"] == project.remembered()


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
async def test_a_broken_test_fails_beside_one_that_is_unsteady(
    project: Project, workers: int
) -> None:
    project.write({"some": unsteady("a") + "\n\ndef test_bad():\n    assert 1 == 2\n"})
    code, said = await project.run(workers=workers)

    assert 1 == code, said
    assert "1 failed, 1 unsteady" in said
    assert "FAILED test_some.py::test_bad - assert 1 == 2" in said
    assert "UNSTEADY test_some.py::test_bad" not in said
    assert ["test_some.py::test_a"] == project.remembered()


async def test_four_unsteady_tests_are_too_many(project: Project) -> None:
    project.write({"some": unsteady("a", "b", "c", "d")})
    code, said = await project.run()

    assert 1 == code, said
    assert "4 failed" in said
    assert "4 tests failed, at most 3 may be unsteady: none was run again" in said


@pytest.mark.slow
async def test_what_was_unsteady_in_another_environment_of_the_run_counts(
    project: Project,
) -> None:
    project.write({"some": unsteady("b", "c", "d")})
    project.remember("test_other.py::test_a", "this", 60)
    code, said = await project.run()

    assert 1 == code, said
    assert "3 tests failed and 1 were unsteady earlier" in said


@pytest.mark.parametrize(
    ("run", "seconds_ago", "status"),
    [
        ("this", 60, 1),
        pytest.param("another", 60, 1, marks=pytest.mark.slow),
        pytest.param("another", REMEMBERED_SECONDS + 60, 0, marks=pytest.mark.slow),
    ],
)
async def test_a_test_that_is_unsteady_in_two_runs_fails(
    project: Project, run: str, seconds_ago: float, status: int
) -> None:
    """The runs may be in two environments or two runs of tox; an old record is forgotten."""
    project.write({"some": unsteady("a")})
    project.remember("test_some.py::test_a", run, seconds_ago)
    code, said = await project.run()

    assert status == code, said
    assert "UNSTEADY test_some.py::test_a: failed, then passed alone" in said
    assert bool(status) is ("unsteady before, too, mend the cause: test_some.py::test_a" in said)


@pytest.mark.parametrize("workers", [1, pytest.param(0, marks=pytest.mark.slow)])
async def test_a_file_that_cannot_be_collected_fails_the_run(
    project: Project, workers: int
) -> None:
    project.write({"some": unsteady("a"), "broken": "import no_such_module\n"})
    code, said = await project.run("--continue-on-collection-errors", workers=workers)

    assert code, said
    assert "no_such_module" in said
    assert [] == project.remembered()


@pytest.mark.slow
async def test_a_run_that_stopped_at_a_failure_has_not_shown_that_the_others_pass(
    project: Project,
) -> None:
    project.write({"some": unsteady("a") + "\n\ndef test_bad():\n    assert 1 == 2\n"})
    code, said = await project.run("-x", "-p", "no:randomly")

    assert 1 == code, said
    assert [] == project.remembered()


HALVES = """
from pathlib import Path

import pytest

def fails(name):
    place = Path(__file__).with_name(name)
    if not place.exists():
        place.write_text("")
        assert False

@pytest.fixture
def before():
    fails("before")

@pytest.fixture
def after():
    yield
    fails("after")

@pytest.mark.slow
def test_setup(before): ...

@pytest.mark.parametrize("text", ["a/b::c", "[x] y", "é"])
@pytest.mark.slow
def test_teardown(after, text): ...
"""
SKIPPED = """
import os
from pathlib import Path

import pytest

def test_a():
    place = Path(__file__).with_name("place")
    if place.exists():
        pytest.skip("not today")
    place.write_text("")
    assert False
"""


@pytest.mark.slow
async def test_one_that_is_skipped_the_second_time_has_failed(project: Project) -> None:
    project.write({"some": SKIPPED})
    code, said = await project.run()

    assert 1 == code, said
    assert "1 failed" in said
    assert [] == project.remembered()


@pytest.mark.slow
async def test_failures_of_fixtures_and_marked_tests_are_run_again(project: Project) -> None:
    """This includes tests whose names contain the separator of test names."""
    project.write({"some": HALVES})
    code, said = await project.run("-m", "slow", "-p", "no:randomly", "-o", "timeout=100")

    assert 0 == code, said
    assert "3 passed" in said
    assert ["test_some.py::test_setup", "test_some.py::test_teardown[a/b::c]"] == [
        *project.remembered()
    ]


DRAWING = """
import random
from pathlib import Path

def test_a():
    place = Path(__file__).with_name("drawn")
    drawn = place.read_text().split() if place.exists() else []
    place.write_text(" ".join([*drawn, str(random.random())]))
    assert drawn
"""


@pytest.mark.slow
async def test_the_second_run_makes_the_same_choices(project: Project) -> None:
    """A failure that depends on the seed occurs again with the same seed."""
    project.write({"some": DRAWING})
    code, said = await project.run()
    drawn = (project.folder / "drawn").read_text().split()

    assert 0 == code, said
    assert 2 == len(drawn)
    assert drawn[0] == drawn[1]


CRASHING = """
import os
import threading
from pathlib import Path

def first(name):
    place = Path(__file__).with_name(name)
    found = place.exists()
    place.write_text("")
    return not found

def test_crashing_once():
    if first("crashed"):
        os._exit(3)

def test_hanging():
    threading.Event().wait()

def test_hanging_once():
    if first("hung"):
        threading.Event().wait()
"""


@pytest.mark.slow
async def test_what_crashes_or_hangs_is_run_again_too(project: Project) -> None:
    project.write({"some": CRASHING})
    code, said = await project.run("--timeout", "2", workers=1)

    assert 1 == code, said
    assert "UNSTEADY test_some.py::test_crashing_once: failed, then passed alone" in said
    assert "UNSTEADY test_some.py::test_hanging_once: failed, then passed alone" in said
    assert "FAILED test_some.py::test_hanging - Failed: Timeout (>2.0s)" in said
    assert "1 failed, 2 unsteady" in said


@pytest.mark.slow
async def test_what_crashes_both_times_fails(project: Project) -> None:
    project.write({"some": "import os\n\ndef test_a():\n    os._exit(0)\n"})
    code, said = await project.run(workers=1)

    assert 1 == code, said
    assert "1 failed" in said
    assert [] == project.remembered()
