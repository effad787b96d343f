"""The `generator.json` of a version directory, which describes an exported generator."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from xlaserve.artifact import written_by
from xlaserve.errors import InvalidModel
from xlaserve.files import files
from xlaserve.files.files import FileRecord
from xlaserve.files.roots import ANYWHERE, Roots

FILE_NAME = "generator.json"
DECODE = "decode.jaxexp"
CHUNK = "chunk.jaxexp"
WEIGHTS = "params.safetensors"

SLOTS, LENGTH = -1, -2
"""Placeholders in cache shapes for sizes that the configuration decides."""

KIND = "generator"
FORMAT_VERSION = 1
LIMIT_BYTES = 1 << 20

MOST_ARRAYS = 4096
MOST_VOCAB = 1 << 22
MOST_LENGTH = 1 << 24
_MOST_ELEMENTS = 1 << 48
_RANK = 8


class Array(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One array of the generator's cache."""

    dtype: str
    shape: list[int]
    """The shape, in which SLOTS and LENGTH are placeholders."""

    def sized(self, slots: int, length: int) -> tuple[int, ...]:
        """Return the shape for `slots` slots of `length` positions."""
        sizes = {SLOTS: slots, LENGTH: length}
        return tuple(sizes.get(size, size) for size in self.shape)


class File(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The size and hash of a file."""

    bytes: int
    sha256: str

    @property
    def record(self) -> FileRecord:
        """Return the record in the form that `files` checks."""
        return FileRecord(self.bytes, self.sha256)


class Record(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The fields of `generator.json`, in the order in which they are written."""

    format_version: int
    kind: str
    jax_version: str
    """JAX and xlaserve versions that wrote the export, encoded by `written_by.Writer`."""
    platforms: list[str]
    vocab: int
    max_length: int
    stop_tokens: list[int]
    parameters: list[str]
    """Names of the tensors in the weights file, in the argument order of both programs."""
    cache: list[Array]
    donated: dict[str, list[int]]
    """Indices of the arguments that each program may overwrite, by its file name. Calling an
    artifact drops this information, so the server specifies it again."""
    files: dict[str, File]


class _Start(msgspec.Struct):
    """The fields that must be checked before the others can be decoded."""

    format_version: int
    kind: str
    jax_version: str = ""


def read(directory: Path, roots: Roots = ANYWHERE) -> Record:
    """Read and validate the description of a generator; raises InvalidModel."""
    data = files.read_checked(directory, FILE_NAME, limit_bytes=LIMIT_BYTES, roots=roots)
    try:
        start = msgspec.json.decode(data, type=_Start)
        _check_start(start)
        record = msgspec.json.decode(data, type=Record)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidModel(f"{FILE_NAME} is not valid: {error}") from error
    for problem, is_there in _problems(record).items():
        if is_there:
            raise InvalidModel(f"{FILE_NAME} is not valid: {problem}")
    return record


def _check_start(start: _Start) -> None:
    if start.format_version != FORMAT_VERSION or start.kind != KIND:
        found = f"is of kind '{start.kind[:64]}' and format version {start.format_version}"
        reads = f"'{KIND}' and {FORMAT_VERSION}"
        raise InvalidModel(written_by.not_read(FILE_NAME, found, reads, start.jax_version))


def write(directory: Path, record: Record) -> None:
    """Write the description; equal descriptions give equal bytes."""
    text = msgspec.json.format(msgspec.json.encode(record), indent=2)
    files.write_atomically(directory / FILE_NAME, [text, b"\n"])


def _problems(record: Record) -> Mapping[str, bool]:
    shapes = [array.shape for array in record.cache]
    sized = [size for shape in shapes for size in shape if size not in (SLOTS, LENGTH)]
    return {
        f"vocab is not between 1 and {MOST_VOCAB}": not 1 <= record.vocab <= MOST_VOCAB,
        f"max_length is not between 2 and {MOST_LENGTH}": not 2 <= record.max_length <= MOST_LENGTH,
        "a stop token is outside the vocabulary": not all(
            0 <= one < record.vocab for one in record.stop_tokens
        ),
        f"the cache does not have 1 to {MOST_ARRAYS} arrays": not 1 <= len(shapes) <= MOST_ARRAYS,
        "a cache array does not have slots as its first axis": any(
            s[:1] != [SLOTS] for s in shapes
        ),
        "a cache array has an invalid shape": any(
            len(shape) > _RANK or shape.count(SLOTS) != 1 or shape.count(LENGTH) > 1
            for shape in shapes
        )
        or not all(1 <= size <= _MOST_ELEMENTS for size in sized),
        "it does not list the files of a generator": not {DECODE, CHUNK, WEIGHTS}
        <= set(record.files),
        "it donates arguments other than the cache and the counts": record.donated
        != {DECODE: [1, 2], CHUNK: [1]},
    }
