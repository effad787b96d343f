"""Container images: the packages installed in them, and the user they run as."""

import json
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from support.images import ROOT, instructions, of, stages

import image_locks

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
_LOCKED = re.compile(r"^([\w.-]+)==([\w.]+)")
_CONTEXT = (ROOT / ".dockerignore").read_text().splitlines()


@cache
def locked(name: str) -> dict[str, str]:
    """Return the versions in a lock file by package, after checking that each has its hashes."""
    found, entries = {}, (image_locks.FOLDER / f"{name}.txt").read_text()
    for entry in re.split(r"\n(?=\S)", entries.strip()):
        match = _LOCKED.match(entry)
        assert match, entry
        assert "--hash=sha256:" in entry, f"{match[1]} has no hash"
        found[str(canonicalize_name(match[1]))] = match[2]
    return found


def wanted(name: str) -> Iterator[Requirement]:
    project = PROJECT["project"]
    extras = image_locks.EXTRAS[name]
    for text in [
        *project["dependencies"],
        *(one for extra in extras for one in project["optional-dependencies"][extra]),
    ]:
        yield Requirement(text)


@pytest.mark.parametrize("name", image_locks.EXTRAS)
def test_a_lock_file_holds_what_the_server_asks_for(name: str) -> None:
    """A file older than pyproject.toml fails here: run `python tools/image_locks.py`."""
    versions = locked(name)
    problems = [
        f"{one}: {versions.get(canonicalize_name(one.name))}"
        for one in wanted(name)
        if (found := versions.get(canonicalize_name(one.name))) is None
        or not one.specifier.contains(Version(found), prereleases=True)
    ]

    assert [] == problems


def test_what_builds_an_image_is_locked_too() -> None:
    backend = PROJECT["build-system"]["requires"]

    assert set(backend) <= set(image_locks.BUILD) <= locked("build").keys()
    assert "cyclonedx-bom" not in locked("cpu"), "it would be in the image"


def test_every_lock_file_is_made_by_the_tool() -> None:
    assert {"build", *image_locks.EXTRAS} == {path.stem for path in image_locks.FOLDER.iterdir()}


def test_only_locked_wheels_are_installed() -> None:
    """Every package has a hash, none is compiled, and pip is removed afterwards."""
    steps = [argument for name, argument in stages()["build"] if name == "RUN"]
    installs = [part for step in steps for part in step.split("&&") if "pip install" in part]

    assert 3 == len(installs)
    for install in installs:
        hashed = "--require-hashes --no-deps --only-binary :all:" in install
        assert hashed or "--no-deps --no-index" in install, install
    assert any("pip uninstall --yes pip" in step for step in steps)
    assert not any("apt-get" in step for step in steps)


@pytest.mark.parametrize("stage", ["server", "sagemaker"])
def test_an_image_runs_as_nobody_special(stage: str) -> None:
    user = of("USER", stage)[-1]
    given = dict(argument.split("=", 1) for argument in of("ARG", stage))

    assert "1000" == given.get(user.removeprefix("$"), user)
    assert ["useradd --uid 1000 --create-home xlaserve"] == of("RUN", stage)


def test_an_image_says_how_it_is() -> None:
    assert "xlaserve health --live" in " ".join(json.loads(probe("server")))
    assert "http://127.0.0.1:8080/ping" in probe("sagemaker")
    assert of("EXPOSE", "sagemaker")[0] in probe("sagemaker")


def probe(stage: str) -> str:
    (check,) = of("HEALTHCHECK", stage)
    return check.partition("CMD ")[2]


def test_what_is_copied_is_in_the_context() -> None:
    """A file excluded by .dockerignore would otherwise fail only the image build."""
    allowed = [Path(line[1:]) for line in _CONTEXT if line.startswith("!")]
    copied = [
        Path(source)
        for name, argument in instructions()
        if name == "COPY" and "--from" not in argument
        for source in argument.split()[:-1]
    ]

    assert "*" in _CONTEXT
    for path in copied:
        assert (ROOT / path).exists(), path
        assert any(path.is_relative_to(one) for one in allowed), path
