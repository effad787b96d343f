"""sentence-transformers encoders with the tensors that the stored references were computed from."""

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
    """Write the tensors of a test case, which are derived from their names and shapes."""
    found = shapes or json.loads((DATA / name / "shapes.json").read_text())
    tensors = {key: references.numbers_of(key, tuple(shape)) for key, shape in found.items()}
    weights.write(directory / checkpoint.SINGLE, tensors)
