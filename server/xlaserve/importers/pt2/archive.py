"""Reads .pt2 archives of torch.export: the program, and tensors as views of the file."""

import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.lib.stride_tricks import as_strided

from xlaserve.errors import InvalidModel
from xlaserve.files import files
from xlaserve.files.roots import ANYWHERE, Roots
from xlaserve.importers.pt2 import parsing, schema
from xlaserve.importers.pt2.datatypes import STRIDED, dtype_of
from xlaserve.importers.pt2.program import Program, Stored
from xlaserve.importers.pt2.zip_file import ZipFile
from xlaserve.tensors import Tensor

DEFAULT_LIMIT_BYTES = 8 * 2**30
MAX_PROGRAM_BYTES = 128 << 20
"""Size limit of a program's JSON."""

_MAX_CONFIG_BYTES = 64 << 20
_MAX_MARK_BYTES = 64
_MAX_DIMENSIONS = 32
_REPEATED_BYTES = 1 << 20
"""Tensors up to this size may be larger than their data in the file: `expand` repeats elements with
a stride of 0."""
_MAX_EMPTY = 2**40
"""Limit on the product of the nonzero sizes of an empty tensor."""

_MODELS, _JSON = "models/", ".json"
_PLACES = {"weights": "data/weights/", "constants": "data/constants/"}
_MARKS = {"archive_format": "pt2", "archive_version": "0", "byteorder": "little"}
_SAVE_AGAIN = (
    "convert it with torch.export.save(torch.export.load(path), path) of PyTorch 2.9 or newer"
)
_FOREIGN = {
    "serialized_exported_program.json": f"it has the layout of PyTorch 2.8 or older: {_SAVE_AGAIN}",
    "data.pkl": "it is a checkpoint of torch.save or a program of TorchScript, which are pickles: "
    "export the model with torch.export",
}
"""Files that identify other formats, with advice for the user."""


@dataclass(frozen=True, slots=True)
class Archive:
    """A program with its tensors."""

    program: Program
    tensors: Mapping[str, Tensor]
    """The module's tensors, by name of the graph input; views of the file."""


def open_file(
    path: Path, limit_bytes: int = DEFAULT_LIMIT_BYTES, roots: Roots = ANYWHERE
) -> Archive:
    """Read a .pt2 file; its tensors are views of the memory-mapped file. Raises InvalidModel.

    No code of the file is run: pickled parts are rejected. Truncating the file while its tensors
    are in use kills the process (SIGBUS).
    """
    with files.opened(path.parent, path.name, limit_bytes=limit_bytes, roots=roots) as (file, size):
        if not size:
            raise InvalidModel(f"{path.name} is empty")
        return read(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ), limit_bytes)


def read(data: "mmap.mmap | bytes", limit_bytes: int = DEFAULT_LIMIT_BYTES) -> Archive:
    """Read an archive from a mapping or from bytes; raises InvalidModel."""
    archive = _Reader(ZipFile(data), limit_bytes)
    program = parsing.parse(archive.program())
    return Archive(program, archive.tensors(program))


class _Reader:
    """Reads the files of an archive, relative to its root directory."""

    def __init__(self, zipped: ZipFile, limit_bytes: int) -> None:
        self._zip = zipped
        self._limit_bytes = limit_bytes
        self._root = _root(list(zipped.entries))
        for name, reason in _FOREIGN.items():
            if self._root + name in zipped.entries:
                raise InvalidModel(f"this .pt2 file cannot be read: {reason}")
        for name, expected in _MARKS.items():
            found = self._bytes(name, _MAX_MARK_BYTES, "").tobytes().decode(errors="replace")
            if found.strip() != expected:
                raise InvalidModel(f"{name}: expected '{expected}', got '{found}'")
        self._model = self._only_model()

    def program(self) -> memoryview:
        """Return the JSON of the program."""
        return self._bytes(f"{_MODELS}{self._model}{_JSON}", MAX_PROGRAM_BYTES, "its program")

    def tensors(self, program: Program) -> dict[str, Tensor]:
        """Return a program's tensors by input name."""
        weights, constants = self._payloads("weights"), self._payloads("constants")
        found: dict[str, Tensor] = {}
        raw: dict[str, memoryview] = {}
        for name, stored in program.stored.items():
            folder = "weights" if stored.name in weights else "constants"
            payload = (weights if folder == "weights" else constants).get(stored.name)
            if payload is None:
                raise InvalidModel(f"{stored} is missing from the archive")
            entry = self._entry_of(stored, folder, payload)
            if entry not in raw:
                raw[entry] = self._bytes(entry, self._limit_bytes, str(stored))
            found[name] = _tensor(str(stored), payload, raw[entry])
            _check_as_described(stored, found[name], program.graph.tensors.get(name))
        return found

    def _entry_of(self, stored: Stored, folder: str, payload: schema.Payload) -> str:
        path = payload.path_name
        if payload.use_pickle or payload.tensor_meta is None:
            raise InvalidModel(
                f"{stored} is a pickle ({path[:100]}), which would run code (a tensor subclass or"
                " an object): replace it with a plain tensor and export again"
            )
        if "/" in path or not path:
            raise InvalidModel(f"{stored}: expected a plain file name, got '{path[:100]}'")
        return _PLACES[folder] + path

    def _payloads(self, folder: str) -> Mapping[str, schema.Payload]:
        place = _PLACES[folder]
        if f"{self._root}{place}{self._model}.pt" in self._zip.entries:
            raise InvalidModel(f"its {folder} are a pickle, from PyTorch 2.8: {_SAVE_AGAIN}")
        name = f"{place}{self._model}_{folder}_config.json"
        data = self._bytes(name, _MAX_CONFIG_BYTES, f"the list of its {folder}")
        try:
            return msgspec.json.decode(data, type=schema.PayloadConfig).config
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidModel(f"{name} cannot be read: {str(error)[:200]}") from None

    def _only_model(self) -> str:
        start = self._root + _MODELS
        found = [
            name.removeprefix(start).removesuffix(_JSON)
            for name in self._zip.entries
            if name.startswith(start) and name.endswith(_JSON)
        ]
        if len(found) == 1:
            return found[0]
        if found:
            raise InvalidModel(f"it has several programs, {', '.join(found)[:200]}: expected one")
        if any(name.startswith(f"{self._root}data/aotinductor/") for name in self._zip.entries):
            raise InvalidModel(
                "it was compiled by AOTInductor and has no program: save the result of"
                " torch.export.export with torch.export.save"
            )
        raise InvalidModel(f"it has no program in {_MODELS}")

    def _bytes(self, name: str, limit_bytes: int, what: str) -> memoryview:
        entry = self._root + name
        if entry not in self._zip.entries:
            missing = f"{what} is missing: " if what else ""
            raise InvalidModel(f"not a torch.export file: {missing}it has no entry '{name}'")
        return self._zip.read(entry, limit_bytes)


def _root(names: list[str]) -> str:
    """Return the directory that contains all entries, with a trailing slash, or an empty string."""
    first = {name.partition("/")[0] for name in names}
    if len(first) != 1 or not all("/" in name for name in names):
        return ""
    return f"{first.pop()}/"


def _check_as_described(stored: Stored, tensor: Tensor, described: object) -> None:
    expected = (getattr(described, "dtype", None), getattr(described, "sizes", None))
    if expected != (tensor.dtype, tensor.shape):
        raise InvalidModel(
            f"{stored}: the program expects {expected[0]} {list(expected[1] or ())}, the "
            f"archive has {tensor.dtype} {list(tensor.shape)}"
        )


def _tensor(what: str, payload: schema.Payload, data: memoryview) -> Tensor:
    """Return a view of an entry's bytes; raises InvalidModel if it is out of bounds."""
    meta = payload.tensor_meta
    assert meta is not None
    if meta.layout != STRIDED:
        raise InvalidModel(f"{what} has layout {meta.layout}, expected a strided one")
    try:
        dtype = dtype_of(meta.dtype)
    except InvalidModel as error:
        raise InvalidModel(f"{what}: {error}") from None
    shape = [_fixed(what, size) for size in meta.sizes]
    strides = [_fixed(what, size) for size in meta.strides]
    offset = _fixed(what, meta.storage_offset)
    if len(shape) != len(strides) or len(shape) > _MAX_DIMENSIONS:
        raise InvalidModel(f"{what} has {len(shape)} sizes and {len(strides)} strides")
    count = math.prod(shape)
    last = offset + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    end = (last + 1) * dtype.itemsize if count else 0
    if end > len(data) or len(data) % dtype.itemsize:
        raise InvalidModel(f"{what}: {dtype} {shape} needs {end} bytes, got {len(data)}")
    if not count:
        return _empty(what, shape, dtype)
    if count * dtype.itemsize > max(len(data), _REPEATED_BYTES):
        # Strides of 0 repeat elements, so a few bytes could become a tensor of any size.
        raise InvalidModel(f"{what}: {dtype} {shape} exceeds its {len(data)} bytes")
    if dtype == np.bool_ and np.frombuffer(data, np.uint8).max() > 1:
        raise InvalidModel(f"{what} is BOOL but has bytes other than 0 and 1")
    flat = np.frombuffer(data, dtype)[offset:]
    steps = [step * dtype.itemsize for step in strides]
    found: Tensor = as_strided(flat, shape, steps, writeable=False)
    return found


def _empty(what: str, shape: list[int], dtype: "np.dtype[Any]") -> Tensor:
    if math.prod(filter(None, shape)) > _MAX_EMPTY:
        raise InvalidModel(f"{what} has no elements, but sizes above the limit: {shape}")
    return np.zeros(shape, dtype)


def _fixed(what: str, size: schema.SymInt) -> int:
    if not isinstance(size.as_int, int) or size.as_int < 0:
        raise InvalidModel(f"{what} has negative or non-numeric sizes or strides")
    return size.as_int
