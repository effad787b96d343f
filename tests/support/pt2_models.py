"""Stored torch.export programs with PyTorch's answers, and modified archives."""

import io
import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from xlaserve.importers.pt2 import archive
from xlaserve.importers.pt2.archive import Archive
from xlaserve.tensors import Tensor

DATA = Path(__file__).parents[1] / "data" / "pt2"
PROGRAM = "models/model.json"

Json = dict[str, Any]
Files = dict[str, bytes]


def path(name: str) -> Path:
    """Return the file of a stored program."""
    return DATA / f"{name}.pt2"


def answers(name: str) -> tuple[list[Tensor], list[Tensor]]:
    """Return a program's inputs and PyTorch's answers."""
    with np.load(DATA / f"{name}.npz") as stored:
        inputs = [stored[key] for key in sorted(stored) if key.startswith("input")]
        return inputs, [stored[key] for key in sorted(stored) if key.startswith("output")]


def files_of(name: str) -> Files:
    """Return the files of a stored archive, relative to its directory."""
    with zipfile.ZipFile(path(name)) as zipped:
        return {key.partition("/")[2]: zipped.read(key) for key in zipped.namelist()}


def packed(files: Mapping[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """Return an archive with these files."""
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", compression) as zipped:
        for name, data in files.items():
            zipped.writestr(f"m/{name}", data)
    return written.getvalue()


def changed(name: str, change: Callable[[Json], object], file: str = PROGRAM) -> bytes:
    """Return a stored archive after changing one of its JSON files."""
    files = files_of(name)
    tree = json.loads(files[file])
    change(tree)
    return packed({**files, file: json.dumps(tree).encode()})


def read(data: bytes) -> Archive:
    """Parse an in-memory archive."""
    return archive.read(data)
