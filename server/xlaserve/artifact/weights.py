"""Reads and writes parameters as safetensors, aligned for XLA, one tensor at a time."""

import hashlib
import math
import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import ml_dtypes
import msgspec
import numpy as np

from xlaserve.errors import InvalidModel
from xlaserve.files import files
from xlaserve.files.files import FileRecord
from xlaserve.files.roots import ANYWHERE, Roots
from xlaserve.tensors import ALIGNMENT, Buffer, Shape, Tensor, aligned_bytes

DTYPES = MappingProxyType(
    {
        "BOOL": np.dtype(np.bool_),
        "U8": np.dtype("<u1"),
        "U16": np.dtype("<u2"),
        "U32": np.dtype("<u4"),
        "U64": np.dtype("<u8"),
        "I8": np.dtype("<i1"),
        "I16": np.dtype("<i2"),
        "I32": np.dtype("<i4"),
        "I64": np.dtype("<i8"),
        "F16": np.dtype("<f2"),
        "BF16": np.dtype(ml_dtypes.bfloat16),
        "F32": np.dtype("<f4"),
        "F64": np.dtype("<f8"),
        "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
        "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    }
)
"""The supported dtypes, by their safetensors name."""

MAX_HEADER_BYTES = 16 << 20
MAX_TENSORS = 65_536
MAX_NAME_LENGTH = 1024
MAX_RANK = 32
MAX_FILE_BYTES = 1 << 44

_LENGTH_BYTES = 8
_PART_BYTES = 1 << 20
_METADATA = "__metadata__"
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class WeightEntry:
    """A tensor's entry in the header of a weights file."""

    name: str
    dtype: "np.dtype[Any]"
    shape: Shape
    start: int
    """Offset of the data, counted from the end of the header."""
    stop: int

    @property
    def nbytes(self) -> int:
        """Return the size of the tensor in bytes."""
        return self.stop - self.start


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


# --- writing -----------------------------------------------------------------------------------


def write(path: Path, tensors: Mapping[str, Tensor]) -> FileRecord:
    """Write tensors to a temporary file, then rename it; equal tensors give equal bytes.

    Raises InvalidModel for a dtype that safetensors does not have.
    """
    # Safetensors allows no gaps between tensors. The header is padded so that the data starts at a
    # multiple of 64; tensors whose size is a multiple of 64 come first, and so stay aligned.
    ordered = sorted(tensors.items(), key=lambda item: (item[1].nbytes % ALIGNMENT != 0, item[0]))
    header: dict[str, _Entry] = {}
    start = 0
    for name, tensor in ordered:
        header[name] = _entry(name, tensor, start)
        start += tensor.nbytes
    return files.write_atomically(path, _file_parts(header, [tensor for _, tensor in ordered]))


def _entry(name: str, tensor: Tensor, start: int) -> _Entry:
    if name == _METADATA or not 0 < len(name) <= MAX_NAME_LENGTH:
        raise InvalidModel(f"parameter {name[:64]!r} cannot be stored under this name")
    dtype = dtype_name(name, tensor)
    return _Entry(dtype, list(tensor.shape), (start, start + tensor.nbytes))


_NAMES_TEXT = tuple(dtype.name for dtype in DTYPES.values())


def dtype_name(name: str, tensor: Tensor) -> str:
    """Return the safetensors name of a parameter's dtype; raises InvalidModel if there is none."""
    dtype = _NAMES.get(tensor.dtype)
    if dtype is None:
        expected = f"one of {', '.join(_NAMES_TEXT)}"
        raise InvalidModel(
            f"parameter '{name}' has dtype {tensor.dtype}, expected {expected}: store it as one"
            " of these and convert it in the function"
        )
    return dtype


def _file_parts(header: Mapping[str, _Entry], tensors: list[Tensor]) -> Iterator[Buffer]:
    text = msgspec.json.encode(header)
    text += b" " * (-(_LENGTH_BYTES + len(text)) % ALIGNMENT)
    yield len(text).to_bytes(_LENGTH_BYTES, "little")
    yield text
    for tensor in tensors:
        yield np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data


# --- reading -----------------------------------------------------------------------------------


def read_entries(directory: Path, name: str, roots: Roots = ANYWHERE) -> tuple[WeightEntry, ...]:
    """Read the header only; entries are sorted by offset. Raises InvalidModel."""
    with files.opened(directory, name, limit_bytes=MAX_FILE_BYTES, roots=roots) as (file, size):
        return _read_header(file, size, name, lambda _: None)


def read(
    directory: Path, name: str, record: FileRecord | None = None, roots: Roots = ANYWHERE
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors one by one, each in newly allocated memory that XLA can use without a copy.

    Only the current tensor is held. The hash is checked after the last one has been consumed:
    InvalidModel is raised then if the file differs from the record.
    """
    digest = hashlib.sha256()
    with files.opened(directory, name, limit_bytes=MAX_FILE_BYTES, roots=roots) as (file, size):
        files.check_size(name, size, record)
        for entry in _read_header(file, size, name, digest.update):
            data = aligned_bytes(entry.nbytes)
            files.read_into(file, data.data, name)
            digest.update(data.data)
            yield entry.name, _as_tensor(entry, data)
    files.check_hash(name, digest.hexdigest(), record)


def read_mapped(
    directory: Path, name: str, record: FileRecord | None = None, roots: Roots = ANYWHERE
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors one by one, as read-only views of the memory-mapped file.

    The file is read once for its hash. Its pages belong to the page cache, and are shared by all
    processes that map it. It is unmapped when the last view is freed. Modifying the file changes
    the tensors; truncating it crashes the process (SIGBUS).
    """
    digest = hashlib.sha256()
    with files.opened(directory, name, limit_bytes=MAX_FILE_BYTES, roots=roots) as (file, size):
        files.check_size(name, size, record)
        entries = _read_header(file, size, name, digest.update)
        while part := file.read(_PART_BYTES):
            digest.update(part)
        files.check_hash(name, digest.hexdigest(), record)
        mapping = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    header_bytes = size - sum(entry.nbytes for entry in entries)
    for entry in entries:
        data = np.ndarray(entry.nbytes, np.uint8, mapping, header_bytes + entry.start)
        yield entry.name, _as_tensor(entry, data)


def hashes(
    directory: Path, name: str, roots: Roots = ANYWHERE
) -> Iterator[tuple[WeightEntry, str]]:
    """Yield each tensor's entry and SHA-256, reading the file in small chunks."""
    with files.opened(directory, name, limit_bytes=MAX_FILE_BYTES, roots=roots) as (file, size):
        for entry in _read_header(file, size, name, lambda _: None):
            digest, left = hashlib.sha256(), entry.nbytes
            while left:
                part = files.read_exactly(file, min(left, _PART_BYTES), name)
                digest.update(part)
                left -= len(part)
            yield entry, digest.hexdigest()


def _as_tensor(entry: WeightEntry, data: "np.ndarray[Any, np.dtype[np.uint8]]") -> Tensor:
    if entry.dtype == np.bool_ and data.size and data.max() > 1:
        raise InvalidModel(f"parameter '{entry.name}' is BOOL but has bytes other than 0 and 1")
    return data.view(entry.dtype).reshape(entry.shape)


def _read_header(
    file: BinaryIO, size: int, name: str, update: Callable[[Buffer], None]
) -> tuple[WeightEntry, ...]:
    if size < _LENGTH_BYTES:
        raise InvalidModel(f"{name} is truncated: it has {size} bytes and no header")
    length = files.read_exactly(file, _LENGTH_BYTES, name)
    text_bytes = int.from_bytes(length, "little")
    if text_bytes > min(MAX_HEADER_BYTES, size - _LENGTH_BYTES):
        raise InvalidModel(
            f"{name} is not a safetensors file: it has {size} bytes, its header {text_bytes}"
        )
    text = files.read_exactly(file, text_bytes, name)
    update(length)
    update(text)
    return _entries(_parse(text, name), size - _LENGTH_BYTES - text_bytes, name)


def _parse(text: Buffer, name: str) -> dict[str, _Entry]:
    if bytes(text[:1]) != b"{":
        raise InvalidModel(f"{name} is not a safetensors file: its header is not a JSON object")
    try:
        fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        msgspec.json.decode(fields.pop(_METADATA, b"{}"), type=dict[str, str])
        return {key: msgspec.json.decode(raw, type=_Entry) for key, raw in fields.items()}
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidModel(f"{name} has a header that is not valid: {error}") from error


def _entries(header: dict[str, _Entry], data_bytes: int, name: str) -> tuple[WeightEntry, ...]:
    if len(header) > MAX_TENSORS:
        raise InvalidModel(f"{name} has {len(header)} tensors, more than {MAX_TENSORS}")
    entries = sorted(
        (_checked(key, entry, name) for key, entry in header.items()),
        key=lambda entry: (entry.start, entry.stop),
    )
    position = 0
    for entry in entries:
        if entry.start != position:
            raise InvalidModel(
                f"{name}: the data of '{entry.name}' starts at {entry.start}, expected {position}"
            )
        position = entry.stop
    if position != data_bytes:
        raise InvalidModel(f"{name} has {data_bytes} bytes of data, its header says {position}")
    return tuple(entries)


def _checked(key: str, entry: _Entry, name: str) -> WeightEntry:
    if not 0 < len(key) <= MAX_NAME_LENGTH:
        raise InvalidModel(
            f"{name}: expected tensor names of 1 to {MAX_NAME_LENGTH} characters, got {len(key)}"
        )
    dtype = DTYPES.get(entry.dtype)
    if dtype is None:
        raise InvalidModel(f"{name}: '{key}' has the unknown dtype '{entry.dtype[:32]}'")
    start, stop = entry.data_offsets
    shape = tuple(entry.shape)
    # Checked even if the tensor is empty: numpy rejects such shapes regardless.
    if len(shape) > MAX_RANK or any(s < 0 for s in shape):
        raise InvalidModel(f"{name}: '{key}' has an invalid shape")
    if math.prod(max(size, 1) for size in shape) > MAX_FILE_BYTES:
        raise InvalidModel(f"{name}: '{key}' has an invalid shape")
    if not 0 <= start <= stop or stop - start != math.prod(shape) * dtype.itemsize:
        raise InvalidModel(
            f"{name}: '{key}' needs {math.prod(shape) * dtype.itemsize} bytes, "
            f"its offsets are {start} and {stop}"
        )
    return WeightEntry(key, dtype, shape, start, stop)
