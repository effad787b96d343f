"""Models that answer what they are asked, of any datatype: nothing is compiled for them."""

import json
from collections.abc import Sequence
from pathlib import Path


def write(root: Path, name: str, datatype: str, dims: Sequence[int] = (-1,)) -> None:
    """Add a model to a repository: `x` comes back as `y`."""
    tensor = {"data_type": f"TYPE_{_NAMES.get(datatype, datatype)}", "dims": list(dims)}
    config = {
        "backend": "identity",
        "input": [{"name": "x", **tensor}],
        "output": [{"name": "y", **tensor}],
    }
    (root / name / "1").mkdir(parents=True)
    (root / name / "config.json").write_text(json.dumps(config))


_NAMES = {"BYTES": "STRING"}
"""What configurations call datatypes whose name is another there."""
