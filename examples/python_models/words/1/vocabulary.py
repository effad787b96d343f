"""A module beside model.py: other models may have one of the same name."""

from pathlib import Path

UNKNOWN = 1


def load_vocabulary(path: Path) -> dict[str, int]:
    """Return the number of each word of a file; 0 is for no word at all."""
    return {word: number for number, word in enumerate(path.read_text().split(), UNKNOWN + 1)}
