"""Hugging Face checkpoints with the tensors that the stored references were computed from."""

import json
from pathlib import Path

import huggingface_references as references
from xlaserve.artifact import weights
from xlaserve.importers.huggingface import checkpoint

DATA = Path(__file__).parents[1] / "data/huggingface"


def write_tensors(directory: Path, name: str) -> None:
    """Write the tensors of a test case, which are derived from their names and shapes."""
    shapes = json.loads((DATA / name / "shapes.json").read_text())
    tensors = {key: references.seeded(key, tuple(shape)) for key, shape in shapes.items()}
    weights.write(directory / checkpoint.SINGLE, tensors)
