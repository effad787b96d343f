"""A small model with one parameter, for tests of metadata and management."""

from pathlib import Path

import numpy as np

import xlaserve


def export_double(root: Path) -> None:
    """Write the model `double` to a repository: y = 2 x, FP32[-1,2], up to four rows."""
    xlaserve.export_model(
        lambda p, x: {"y": x * p["v"]},
        {"v": np.full((1, 2), 2, np.float32)},
        {"x": ("FP32", [-1, 2])},
        root / "double" / "1",
        max_batch_size=4,
    )
