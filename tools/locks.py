"""Write the lock files of the tox environments: one per Python version, in locks/.

    python tools/locks.py

Needs uv and a configured package index. tox installs exactly these versions, except in the
environment `newest`. The versions of tox and tox-uv are also written to tox.ini, so that a run does
not depend on the installed tox. The images have their own lock files: image_locks.py.
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "locks"
PYTHONS = ("3.11", "3.12", "3.13")
PINNED = ("tox", "tox-uv")
"""Packages that tox.ini requires in the locked version."""
EDITABLE = "editables~=0.3"
"""Additional requirement of hatchling for an editable installation."""
_PLATFORM = "x86_64-manylinux_2_31"
"""CI's platform, and the oldest for which libtpu has wheels. On other platforms the same versions
apply; packages needed only there are not locked.
"""
_FORM = ("--no-header", "--no-annotate", "--no-emit-index-url")
"""Options that keep the invocation and the index URL out of the lock files."""


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = [f"--group={ROOT / 'pyproject.toml'}:{name}" for name in project["dependency-groups"]]
    with TemporaryDirectory() as directory:
        build = Path(directory, "build.in")
        build.write_text("\n".join((*project["build-system"]["requires"], EDITABLE)))
        for version in PYTHONS:
            write(
                lock_file(version),
                *(str(ROOT / "pyproject.toml"), str(build), "--all-extras", *groups),
                *(f"--python-version={version}", f"--python-platform={_PLATFORM}"),
            )
    settings = ROOT / "tox.ini"
    settings.write_text(pinned(settings.read_text(), versions(lock_file(PYTHONS[0]).read_text())))


def lock_file(python: str) -> Path:
    """Return the lock file for a Python version, such as 3.12."""
    return FOLDER / f"{python}.txt"


def write(path: Path, *wanted: str) -> None:
    """Write a lock file with the newest compatible versions; exits if there are none."""
    command = ["uv", "pip", "compile", "--quiet", "--upgrade", *_FORM, *wanted]
    done = subprocess.run([*command, f"--output-file={path}"], check=False)
    if done.returncode:
        sys.exit(done.returncode)
    print(f"wrote {path.relative_to(ROOT)}")


def versions(text: str) -> dict[str, str]:
    """Return the version of each package in a lock file."""
    return dict(_locked(text))


def _locked(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        if match := re.match(r"([\w.-]+)==([^\s;]+)", line):
            yield match[1], match[2]


def pinned(settings: str, found: dict[str, str]) -> str:
    """Return tox.ini with the locked versions of its requirements."""
    for name in PINNED:
        settings = re.sub(
            rf"(?m)^(    {re.escape(name)})[=>].*$", rf"\g<1>=={found[name]}", settings
        )
    return settings


if __name__ == "__main__":
    main()
