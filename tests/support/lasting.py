"""Version directories in the older format, and a `deserialize` that rejects expired exports."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax.export
import pytest
from jax.export import Exported

from support.written_programs import may_be_newer
from xlaserve.artifact import computation, manifest
from xlaserve.generation import exporting


@contextmanager
def written_by_jax_alone() -> Iterator[None]:
    """Write generators within this context as jax.export does, in the newest StableHLO."""
    with pytest.MonkeyPatch.context() as patch, may_be_newer():
        patch.setattr(exporting, "lasting", computation.of_artifact)
        yield


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
