"""Write the lock files of tox's environments: one for each Python, in locks/.

    python tools/locks.py

Needs uv, and the package index that it is set up for. tox installs nothing but these versions,
except in the environment `newest`. The versions of tox and tox-uv go into tox.ini too, so that a
run is the same whichever tox somebody has installed. The images have their own: image_locks.py.
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
"""Further requirement of hatchling for an editable installation."""
_PLATFORM = "x86_64-manylinux_2_31"
"""The platform of CI, and the oldest that libtpu has wheels for. On others these versions hold as
well; a package that only they have is not locked."""
_FORM = ("--no-header", "--no-annotate", "--no-emit-index-url")
"""Options without which a lock file would name who made it, and with which index."""


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
    """Return the lock file of a version of Python, such as 3.12."""
    return FOLDER / f"{python}.txt"


def write(path: Path, *wanted: str) -> None:
    """Write a lock file with the newest versions that fit together; ends the program without."""
    command = ["uv", "pip", "compile", "--quiet", "--upgrade", *_FORM, *wanted]
    done = subprocess.run([*command, f"--output-file={path}"], check=False)
    if done.returncode:
        sys.exit(done.returncode)
    print(f"wrote {path.relative_to(ROOT)}")


def versions(text: str) -> dict[str, str]:
    """Return the version of each package of a lock file."""
    return dict(_locked(text))


def _locked(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        if match := re.match(r"([\w.-]+)==([^\s;]+)", line):
            yield match[1], match[2]


def pinned(settings: str, found: dict[str, str]) -> str:
    """Return tox.ini with the locked versions of what it requires."""
    for name in PINNED:
        settings = re.sub(
            rf"(?m)^(    {re.escape(name)})[=>].*$", rf"\g<1>=={found[name]}", settings
        )
    return settings


if __name__ == "__main__":
    main()
