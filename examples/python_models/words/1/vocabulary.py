"""A module next to model.py; other models may have one with the same name."""

from pathlib import Path

UNKNOWN = 1


def load_vocabulary(path: Path) -> dict[str, int]:
    """Return the id of each word in a file; id 0 means no word, and 1 an unknown word."""
    return {word: number for number, word in enumerate(path.read_text().split(), UNKNOWN + 1)}
