"""Version directories as they were before models lasted, and a JAX that refuses what is old."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax.export
from jax.export import Exported

from xlaserve.artifact import manifest


def without_stablehlo(directory: Path) -> Path:
    """Take the part that lasts out of a version directory, and return the directory."""
    described = manifest.read(directory)
    files = {n: record for n, record in described.files.items() if n != manifest.STABLEHLO}
    manifest.write(directory, dataclasses.replace(described, durable=None, files=files))
    (directory / manifest.STABLEHLO).unlink()
    return directory


def refusing(data: bytes) -> Callable[[bytearray], Exported]:
    """Return a `jax.export.deserialize` that refuses one file, as it does an expired one."""
    deserialize = jax.export.deserialize

    def deserialize_others(found: bytearray) -> Exported:
        if bytes(found) == data:
            raise ValueError("seems to be older than the 6-month window")
        return deserialize(found)

    return deserialize_others
