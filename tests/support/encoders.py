"""Encoders as sentence-transformers saves them, with the tensors of the stored references."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import encoder_references as references
from xlaserve.artifact import weights
from xlaserve.importers.huggingface import checkpoint

DATA = Path(__file__).parents[1] / "data/encoders"


def write_tensors(
    directory: Path, name: str, shapes: Mapping[str, Sequence[int]] | None = None
) -> None:
    """Write the tensors of a case: they follow from their names and shapes."""
    found = shapes or json.loads((DATA / name / "shapes.json").read_text())
    tensors = {key: references.numbers_of(key, tuple(shape)) for key, shape in found.items()}
    weights.write(directory / checkpoint.SINGLE, tensors)
