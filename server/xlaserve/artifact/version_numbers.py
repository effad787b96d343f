"""The number of the version that an import writes."""

from pathlib import Path

from xlaserve.errors import InvalidModel


def target(directory: Path, version: int | None) -> Path:
    """Return the path of the version to write, the next one if None.

    Raises FileExistsError where there is one, and InvalidModel for a number that is none.
    """
    there = [int(p.name) for p in directory.glob("*") if p.name.isascii() and p.name.isdigit()]
    number = max(there, default=0) + 1 if version is None else version
    if number < 1:
        raise InvalidModel(f"version: expected a number from 1 on, got {number}")
    found = directory / str(number)
    if found.exists():
        raise FileExistsError(f"{found} exists already, and an import overwrites nothing")
    return found
