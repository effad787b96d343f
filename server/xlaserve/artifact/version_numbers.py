"""The number and the place of the version that an import writes."""

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


def publish(written: Path, place: Path) -> None:
    """Move a written version to its place; raises FileExistsError where there is one by now."""
    place.parent.mkdir(exist_ok=True)
    try:
        written.rename(place)
    except OSError as error:
        raise FileExistsError(f"{place} exists already: {error.strerror}") from error
