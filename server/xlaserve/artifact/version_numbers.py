"""Chooses the version number of an import, and publishes the finished version."""

from pathlib import Path

from xlaserve.errors import InvalidModel


def target(directory: Path, version: int | None) -> Path:
    """Return the path of the version to write; None selects the next number.

    Raises FileExistsError if the version exists, and InvalidModel for a number below 1.
    """
    there = [int(p.name) for p in directory.glob("*") if p.name.isascii() and p.name.isdigit()]
    number = max(there, default=0) + 1 if version is None else version
    if number < 1:
        raise InvalidModel(f"version: expected a positive number, got {number}")
    found = directory / str(number)
    if found.exists():
        raise FileExistsError(f"{found} already exists, and imports do not overwrite")
    return found


def publish(written: Path, place: Path) -> None:
    """Rename a finished version to its final path; raises FileExistsError if that exists by now."""
    place.parent.mkdir(exist_ok=True)
    try:
        written.rename(place)
    except OSError as error:
        raise FileExistsError(f"{place} exists already: {error.strerror}") from error
