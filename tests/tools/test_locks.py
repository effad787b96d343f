"""The lock files of tox's environments: complete, up to date, and without an index."""

import re
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import locks

PROJECT: dict[str, Any] = tomllib.loads((locks.ROOT / "pyproject.toml").read_text())
SETTINGS = (locks.ROOT / "tox.ini").read_text()


def locked(python: str) -> dict[str, str]:
    found = locks.versions(locks.lock_file(python).read_text())
    return {str(canonicalize_name(name)): version for name, version in found.items()}


def wanted() -> Iterator[str]:
    """Yield every requirement of the project: server, extras, dependency groups, and build."""
    yield from (*PROJECT["build-system"]["requires"], locks.EDITABLE)
    yield from PROJECT["project"]["dependencies"]
    for texts in PROJECT["project"]["optional-dependencies"].values():
        yield from texts
    for entries in PROJECT["dependency-groups"].values():
        yield from (entry for entry in entries if isinstance(entry, str))


@pytest.mark.parametrize("python", locks.PYTHONS)
def test_a_lock_file_holds_every_requirement_of_the_project(python: str) -> None:
    """A lock file older than pyproject.toml fails here: run `python tools/locks.py`."""
    versions = locked(python)
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": "linux",
    }
    problems = [
        f"{one}: {found}"
        for one in map(Requirement, wanted())
        if one.name != PROJECT["project"]["name"]
        and (one.marker is None or one.marker.evaluate(dict(environment)))
        and (
            (found := versions.get(str(canonicalize_name(one.name)))) is None
            or not one.specifier.contains(Version(found), prereleases=True)
        )
    ]

    assert [] == problems


@pytest.mark.parametrize("python", locks.PYTHONS)
def test_a_lock_file_names_versions_and_nothing_else(python: str) -> None:
    """Without an index or path, a lock file means the same to everybody."""
    line = re.compile(r"[a-z0-9.-]+==[\w.+!]+(?: ; [\w\s.'<>=!()]+)?")
    lines = locks.lock_file(python).read_text().splitlines()

    assert len(lines) > 100
    assert [] == [text for text in lines if not line.fullmatch(text)]


def test_there_is_a_lock_file_for_each_python_that_tox_runs_on() -> None:
    supported = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))

    assert supported == [*locks.PYTHONS]
    assert {f"{version}.txt" for version in supported} == {
        path.name for path in locks.FOLDER.iterdir()
    }


def test_tox_ini_requires_the_locked_tox() -> None:
    """`pip install tox` installs the newest tox, which then provisions and uses the locked one."""
    for python in locks.PYTHONS:
        assert SETTINGS == locks.pinned(SETTINGS, locked(python))


def test_only_what_tox_ini_requires_is_written_into_it() -> None:
    settings = "requires =\n    tox>=4\n    tox-uv>=1\ndeps =\n    toxic>=1\n    other>=2\n"

    assert (
        "requires =\n    tox==4.5\n    tox-uv==1.2\ndeps =\n    toxic>=1\n    other>=2\n"
        == locks.pinned(settings, {"tox": "4.5", "tox-uv": "1.2", "other": "3", "toxic": "4"})
    )
