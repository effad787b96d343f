"""Identity models for any datatype; they need no compilation."""

import json
from collections.abc import Sequence
from pathlib import Path


def write(root: Path, name: str, datatype: str, dims: Sequence[int] = (-1,)) -> None:
    """Add a model to a repository that returns `x` as `y`."""
    tensor = {"data_type": f"TYPE_{_NAMES.get(datatype, datatype)}", "dims": list(dims)}
    config = {
        "backend": "identity",
        "input": [{"name": "x", **tensor}],
        "output": [{"name": "y", **tensor}],
    }
    (root / name / "1").mkdir(parents=True)
    (root / name / "config.json").write_text(json.dumps(config))


_NAMES = {"BYTES": "STRING"}
"""Datatypes whose name in configurations differs."""
