"""The version and commit of this build. Uses only the standard library."""

import os
import re
from functools import cache
from pathlib import Path
from typing import Any

COMMIT_FILE = "commit.txt"
"""File in a wheel that contains its commit, written by `hatch_build.py`."""
KEPT_FILE = "build.txt"
"""File in an archive of kept code with its version and commit: see `process/own_code.py`."""
VARIABLE = "SOURCE_COMMIT"
"""Environment variable with the commit, for builds without a repository such as images."""

UNKNOWN = "0"
"""The version if the package is neither installed nor in a source tree."""

_SHOWN = 12
"""Number of characters of a commit to show."""
_NUMBER = re.compile(r'^version = "([^"]+)"$', re.MULTILINE)
_PATTERN = "xlaserve-*.dist-info"
_OF = re.compile(r"xlaserve-(.+)\.dist-info")
_COMMIT = re.compile(r"[0-9a-f]{40,64}")


@cache
def number() -> str:
    """Return the version of the installed distribution, or of the source tree.

    The package may be used from a source tree on PYTHONPATH without being installed. Reads
    directory names, because importing `importlib.metadata` takes longer than the rest of a command.
    """
    if kept := _kept():
        return kept[0]
    packages = Path(__file__).parent.parent
    distributions = [
        found[1] for each in packages.glob(_PATTERN) if (found := _OF.match(each.name))
    ]
    if len(distributions) == 1:
        return distributions[0]
    found = _NUMBER.search(_read_text(packages.parent / "pyproject.toml"))
    return found[1] if found else UNKNOWN


@cache
def version() -> str:
    """Return version and commit as `0.1.0+c9b4d5dd84c6`, or only the version.

    Uncommitted changes are not detected.
    """
    found = commit()
    return f"{number()}+{found[:_SHOWN]}" if found else number()


@cache
def commit() -> str:
    """Return the commit of this code, from the wheel or the repository; or an empty string."""
    if kept := _kept():
        return kept[1]
    package = Path(__file__).parent
    return _read(package / COMMIT_FILE) or commit_of(package.parent.parent)


def kept_text() -> str:
    """Return the contents of `KEPT_FILE` for this build."""
    return f"{number()}\n{commit()}\n"


def _kept() -> list[str]:
    """Return version and commit if this code is kept in an archive; otherwise an empty list."""
    loader: Any = globals()["__loader__"]
    try:
        data: bytes = loader.get_data(str(Path(__file__).with_name(KEPT_FILE)))
    except OSError:
        return []
    return data.decode().split("\n")


def commit_of(source: Path) -> str:
    """Return the commit of a source tree, or an empty string outside of a repository."""
    if not (source / "pyproject.toml").exists():
        return ""
    found = _of_repository(source / ".git")
    return found or _valid(os.environ.get(VARIABLE, ""))


def _of_repository(git: Path) -> str:
    if git.is_file():  # a linked worktree
        git = git.parent / _read_text(git).removeprefix("gitdir:").strip()
    head = _read_text(git / "HEAD").strip()
    if not head.startswith("ref:"):
        return _valid(head)
    name = head.removeprefix("ref:").strip()
    common = git / (_read_text(git / "commondir").strip() or ".")
    for place in (git, common):
        if found := _read(place / name):
            return found
    packed = (line.split(" ") for line in _read_text(common / "packed-refs").splitlines())
    return next((_valid(line[0]) for line in packed if line[1:] == [name]), "")


def _read(path: Path) -> str:
    return _valid(_read_text(path))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def _valid(text: str) -> str:
    return text.strip() if _COMMIT.fullmatch(text.strip()) else ""
