"""Environments of a tox run: none is skipped silently, none succeeds without running."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tox.report import HandledError

ROOT = Path(__file__).resolve().parents[2]
OTHERS = [f"3.{minor}" for minor in (11, 12, 13) if minor != sys.version_info.minor]
CHECKS = {"lint", "layers", "generated", "docs", "type"}


def tox(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run tox with only the Pythons in this folder on the PATH."""
    environment = {"PATH": str(folder), "HOME": str(folder), "COLUMNS": "200"}
    # Whatever version of tox is installed here, do not fetch another.
    settings = ("-x", "tox.requires=")
    places = ("--root", str(ROOT), "--workdir", str(folder / "work"), "-c", str(ROOT / "tox.ini"))
    return subprocess.run(
        [sys.executable, "-m", "tox", arguments[0], *places, *settings, *arguments[1:]],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def env_list(folder: Path) -> set[str]:
    ended = tox(folder, "config", "--core", "-k", "env_list")
    assert not ended.returncode, ended.stderr
    return set(ended.stdout.partition("env_list =")[2].split())


def install(folder: Path, version: str, status: int = 0) -> None:
    """Put a Python on the PATH, or a shim that reports by its status that there is none."""
    program = folder / f"python{version}"
    program.write_text(f"#!/bin/sh\nexit {status}\n")
    program.chmod(0o755)


def test_the_whole_suite_runs_on_the_python_that_tox_runs_on(tmp_path: Path) -> None:
    """It needs no Python on the PATH, so every tox run executes at least this suite."""
    ended = tox(tmp_path, "config", "-e", "tests", "-k", "base_python")

    assert f"base_python = {sys.executable}" in ended.stdout
    assert {"tests", *CHECKS} == env_list(tmp_path)


def test_a_smoke_suite_runs_on_each_of_the_others_that_is_there(tmp_path: Path) -> None:
    """A shim without a Python behind it does not count as one."""
    install(tmp_path, OTHERS[0])
    install(tmp_path, OTHERS[1], status=127)

    assert {"tests", *CHECKS, f"smoke-py{OTHERS[0].replace('.', '')}"} == env_list(tmp_path)


def test_those_that_are_not_there_are_named(tmp_path: Path) -> None:
    ended = tox(tmp_path, "config", "--core", "-k", "env_list")
    said = ended.stdout + ended.stderr

    assert all(
        f"no smoke suite on Python {other}: python{other} is not there" in said for other in OTHERS
    )


@pytest.mark.parametrize("name", ["py3{}", "smoke-py3{}"])
def test_a_python_that_was_asked_for_and_is_not_there_fails(tmp_path: Path, name: str) -> None:
    version = OTHERS[0].partition(".")[2]
    ended = tox(tmp_path, "run", "--notest", "-e", name.format(version))

    assert ended.returncode
    assert "No interpreter found" in ended.stdout + ended.stderr


def test_a_python_that_is_not_supported_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    toxfile = importlib.import_module("toxfile")

    with pytest.raises(
        HandledError, match=r"runs on Python 3.11, 3.12, 3.13, and tox runs on 3.10"
    ):
        toxfile.check_python("3.10")
    toxfile.check_python("3.11")


def test_every_file_that_an_environment_names_is_there() -> None:
    """Otherwise a suite whose file was renamed would fail only in CI."""
    named = set(re.findall(r"tests/[\w/]+\.py", (ROOT / "tox.ini").read_text()))

    assert named
    assert [] == sorted(name for name in named if not (ROOT / name).is_file())


def test_every_lock_file_is_audited_and_what_cannot_be_audited_fails() -> None:
    """Without `--strict`, pip-audit skips packages that it cannot look up, and succeeds."""
    audit = (ROOT / "tox.ini").read_text().partition("[testenv:audit]")[2].partition("\n[")[0]

    assert "pip-audit --strict" in audit
    locks = sorted(path.name for path in (ROOT / "deploy" / "locks").glob("*.txt"))
    assert locks == sorted(re.findall(r"--requirement deploy/locks/([\w.]+)", audit))


def test_every_environment_is_locked_for_its_python_but_one(tmp_path: Path) -> None:
    names = ["tests", "type", "lint", "docs", "zoo", "soak", ".pkg", "newest"]
    ended = tox(tmp_path, "config", "-e", ",".join(names), "-k", "constraints")
    found = re.findall(r"\[(?:testenv|pkgenv):(.+)\]\nconstraints =(.*(?:\n  .*)?)", ended.stdout)
    lock = str(ROOT / "locks" / f"{'.'.join(map(str, sys.version_info[:2]))}.txt")

    assert {name: "" if name == "newest" else lock for name in names} == {
        name: text.strip() for name, text in found
    }, ended.stdout + ended.stderr
