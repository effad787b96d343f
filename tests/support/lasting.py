"""Version directories in the older format, and a `deserialize` that rejects expired exports."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax.export
from jax.export import Exported

from xlaserve.artifact import manifest


def without_stablehlo(directory: Path) -> Path:
    """Delete the durable StableHLO from a version directory, and return the directory."""
    described = manifest.read(directory)
    files = {n: record for n, record in described.files.items() if n != manifest.STABLEHLO}
    manifest.write(directory, dataclasses.replace(described, durable=None, files=files))
    (directory / manifest.STABLEHLO).unlink()
    return directory


def refusing(data: bytes) -> Callable[[bytearray], Exported]:
    """Return a `jax.export.deserialize` that rejects this data as expired."""
    deserialize = jax.export.deserialize

    def deserialize_others(found: bytearray) -> Exported:
        if bytes(found) == data:
            raise ValueError("seems to be older than the 6-month window")
        return deserialize(found)

    return deserialize_others
