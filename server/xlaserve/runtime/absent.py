"""Explains why a directory contains no model that the server can load."""

from collections.abc import Sequence
from pathlib import Path

from xlaserve.artifact.manifest import FILE_NAME
from xlaserve.errors import repeatable

_SHOWN = 4
"""Maximum number of file names in the error message."""
_SHOWN_CHARACTERS = 200
"""File names in the error message are cut to this many characters."""
_MOST = 1000
"""Maximum number of directory entries to inspect."""


def text(path: Path, looked_for: Sequence[str], named: str = "") -> str:
    """Return which files are missing, what the directory contains instead, and what to do.

    `looked_for` lists the files that identify a model directory; `named` is the single file that
    the configuration or the kind of model requires, if there is one.
    """
    missing = _short(named) if named else FILE_NAME
    others = "" if named else f", looked for {', '.join(looked_for[:-1])} or {looked_for[-1]}"
    return f"{missing} is missing: {_there(path)}{others}"


def _there(path: Path) -> str:
    if path.is_symlink() or path.parent.is_symlink():
        # Do not list the entries: the link's target may be a directory that the caller may not
        # read.
        return f"the directory '{_shown(path)}', the target of a link, has no such file"
    try:
        entries = [entry for entry, _ in zip(path.iterdir(), range(_MOST), strict=False)]
    except FileNotFoundError:
        return f"there is no directory '{_shown(path)}'"
    except OSError as error:
        return f"the directory '{_shown(path)}' cannot be read: {error.strerror}"
    return _found(path, sorted(one for one in entries if not one.name.startswith(".")))


def _found(path: Path, entries: list[Path]) -> str:
    if not entries:
        return f"the directory '{_shown(path)}' is empty"
    versions = [entry for entry in entries if entry.name.isdecimal() and entry.is_dir()]
    if versions:
        return (
            f"the directory '{_shown(path)}' contains the versions {_listed(versions)} but no"
            " model files: name one of these"
        )
    within = [entry for entry in entries if (entry / FILE_NAME).is_file()]
    if within:
        return f"the model is one level below, in {_listed(within)}: name that directory"
    return f"the directory '{_shown(path)}' holds {_listed(entries)}"


def _shown(path: Path) -> str:
    """Return the directory's name for an error message, without the path on the server."""
    return _short(path.name)


def _short(name: str) -> str:
    return repeatable(name)[:_SHOWN_CHARACTERS]


def _listed(entries: list[Path]) -> str:
    more = f" and {len(entries) - _SHOWN} more" if len(entries) > _SHOWN else ""
    return ", ".join(_shown(entry) for entry in entries[:_SHOWN]) + more
