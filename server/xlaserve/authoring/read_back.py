"""Verifies a newly written version directory by reading it, as a load would."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from xlaserve.artifact import artifact, manifest
from xlaserve.artifact import generator_record as generator
from xlaserve.artifact.sizes import LIMIT_ARTIFACT_BYTES
from xlaserve.errors import InvalidModel
from xlaserve.files import files
from xlaserve.files.files import FileRecord
from xlaserve.runtime.embedding import declared

_ANY_SIZE = 1 << 62


def check(directory: Path) -> None:
    """Verify that all files described in a version's manifests can be read.

    Programs are read and compared with their hashes; for other files, such as parameters, only the
    size is compared. Raises InvalidModel that names the file. Call it before the previous version
    is replaced.
    """
    found = [read for name, read in READERS.items() if (directory / name).exists()]
    if not found:
        raise InvalidModel(f"expected one of {', '.join(READERS)}, got none")
    for read in found:
        read(directory)


def _exported(directory: Path) -> None:
    described = manifest.read(directory)
    artifact.read(directory, described)
    if described.durable is not None and manifest.ARTIFACT in described.files:
        _program(directory, manifest.ARTIFACT, described.files[manifest.ARTIFACT])
    _sizes(directory, described.files)


def _generator(directory: Path) -> None:
    described = generator.read(directory)
    records = {name: file.record for name, file in described.files.items()}
    for name in (generator.DECODE, generator.CHUNK):
        _program(directory, name, records[name])
    _sizes(directory, records)


def _embeddings(directory: Path) -> None:
    name = declared.FILE_NAME
    declared.parse(
        bytes(files.read_checked(directory, name, limit_bytes=declared.LIMIT_BYTES)), name
    )


def _program(directory: Path, name: str, expected: FileRecord) -> None:
    limit = LIMIT_ARTIFACT_BYTES
    data = files.read_checked(directory, name, limit_bytes=limit, record=expected)
    artifact.deserialize(data, name=name)


def _sizes(directory: Path, records: Mapping[str, FileRecord]) -> None:
    for name, expected in records.items():
        files.check_size(name, files.size_of(directory, name, limit_bytes=_ANY_SIZE), expected)


READERS: Mapping[str, Callable[[Path], None]] = MappingProxyType(
    {
        manifest.FILE_NAME: _exported,
        generator.FILE_NAME: _generator,
        declared.FILE_NAME: _embeddings,
    }
)
"""Verifiers by manifest name; all that match a version directory run."""
