"""Explains why a model directory has no version to load."""

from pathlib import Path

from xlaserve.model_config.text import CONFIG_FILES
from xlaserve.residence.repository.listing import subdirectories
from xlaserve.residence.repository.names import is_version


def why_no_version(directory: Path) -> str:
    """Return why no version in a model directory can be loaded, and how to fix that.

    Raises OSError if the directory cannot be read.
    """
    inner = subdirectories(directory)
    numbers = sorted((path.name for path in inner if is_version(path.name)), key=int)
    if numbers:
        return (
            "no version directory matches its version_policy: change the policy, or add a version"
            f" to {', '.join(numbers)}"
        )
    place = directory.name
    files = [path for path in directory.iterdir() if path.is_file() and path.name[:1] != "."]
    if any(path.name not in CONFIG_FILES for path in files):
        return f"its files are not in a version directory: move them from {place}/ to {place}/1/"
    if len(inner) == 1:
        found = inner[0].name
        return f"'{found}' is not a version number: move {place}/{found}/ to {place}/1/"
    return f"it has no version directory: put its files into {place}/1/"
