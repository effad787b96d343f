"""Finds the ONNX or torch.export model of a version directory, and hashes its files.

Needs neither JAX nor the onnx package, so that a cached conversion loads without them.
"""

import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path, PurePosixPath

from xlaserve.artifact import manifest
from xlaserve.errors import InvalidModel
from xlaserve.files import files
from xlaserve.files.marks import mark_of
from xlaserve.files.roots import ANYWHERE, Roots
from xlaserve.model_config.config import ModelConfig
from xlaserve.process import own_code

DEFAULT_FILE = "model.onnx"
"""Default file name of a model; `default_model_filename` overrides it."""

SUFFIX = ".onnx"

PT2_FILE = "model.pt2"
"""File name of a torch.export program, used if there is no ONNX model."""

PT2_SUFFIX = ".pt2"
SUFFIXES = (SUFFIX, PT2_SUFFIX)

_WRITERS = (
    "authoring/cpu/channels_last.py",
    "authoring/cpu/convolutions.py",
    "authoring/export.py",
    "authoring/lowering.py",
    "artifact/manifest.py",
    "authoring/cpu/optimizing.py",
    "artifact/weights.py",
)
_PACKAGES = ("xlaserve", "jax", "onnx")
_CHUNK_BYTES = 1 << 20
_ANY_SIZE = 1 << 62

Sizes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class OnnxSource:
    """An ONNX or torch.export model, with its configured input shapes."""

    path: Path
    """The model's file; external data is in the same directory."""
    is_alone: bool
    """Whether the version is a single file instead of a directory."""
    sizes: Sizes
    """Configured shape of each input, -1 for a dynamic dimension; empty if none are configured."""
    is_unbatched: bool
    """Whether the configuration has `max_batch_size: 0`."""

    @property
    def is_pt2(self) -> bool:
        """Tell whether the file is a torch.export program, by its suffix."""
        return self.path.suffix == PT2_SUFFIX


def find(version: Path, config: ModelConfig) -> OnnxSource | None:
    """Return the ONNX or torch.export model of a version, or None if there is none.

    Raises InvalidModel for a `default_model_filename` outside the directory.
    """
    path = _path(version, config)
    if path is None:
        return None
    return OnnxSource(path, path == version, _sizes(config), config.is_unbatched)


def is_unconverted(version: Path, config: ModelConfig) -> bool:
    """Tell whether a version is an ONNX or torch.export model that has not been imported."""
    was_imported = (version / manifest.FILE_NAME).exists()
    return not was_imported and find(version, config) is not None


def _path(version: Path, config: ModelConfig) -> Path | None:
    if version.is_file():
        return version if version.suffix in SUFFIXES else None
    path = version / inside(config.default_model_filename or DEFAULT_FILE)
    if not config.default_model_filename and not os.path.lexists(path):
        path = version / PT2_FILE
    # For onnxruntime, this may be a directory with the model and its external data.
    is_directory = path.is_dir() and not path.is_symlink()
    found = path / DEFAULT_FILE if is_directory else path
    # A broken link or a non-file is reported when it is opened.
    return found if os.path.lexists(found) else None


def inside(name: str) -> str:
    """Return the file name; raises InvalidModel if it is outside the version directory."""
    parts = PurePosixPath(name).parts
    if name.startswith("/") or ".." in parts or "\0" in name or not parts:
        raise InvalidModel(
            f"default_model_filename: expected a file of the version directory, got '{name[:200]}'"
        )
    return name


def _sizes(config: ModelConfig) -> Sizes:
    """Return the configured shape of each input."""
    batch = (-1,) if config.max_batch_size else ()
    return {
        tensor.name: (*batch, *_given(config, tensor.name, tensor.dims)) for tensor in config.inputs
    }


def _given(config: ModelConfig, name: str, dims: tuple[int, ...]) -> tuple[int, ...]:
    for tensor in config.message.input if config.message else ():
        if tensor.name == name and tensor.reshape.shape:
            return tuple(tensor.reshape.shape)
    return dims


def key(
    source: OnnxSource,
    *,
    limit_bytes: int,
    roots: Roots = ANYWHERE,
    check_cancelled: Callable[[], None] = lambda: None,
) -> str:
    """Hash the model's files, its configuration and the converter. Blocks.

    Raises InvalidModel for a file that cannot be read, or that is outside the roots.
    """
    digest = hashlib.sha256()
    options = (sorted(source.sizes.items()), source.is_unbatched, source.path.name)
    digest.update(repr((options, _converter())).encode())
    digest.update(_hash(source.path, limit_bytes, roots, check_cancelled))
    for file in _beside(source.path, deep=not source.is_alone):
        digest.update(f"{file.relative_to(source.path.parent)}\0".encode(errors="surrogateescape"))
        # The neighbors of a single file may be other, large models: use their metadata.
        digest.update(
            repr(_mark(file)).encode()
            if source.is_alone
            else _hash(file, _ANY_SIZE, roots, check_cancelled)
        )
    return digest.hexdigest()


def marks(source: OnnxSource) -> object:
    """Return the metadata of the model's files; raises InvalidModel if the model is missing."""
    path = source.path
    try:
        mark = mark_of(path.stat())
    except OSError as error:
        raise InvalidModel(f"{path.name} cannot be read: {error.strerror}") from error
    return mark, [(str(file), _mark(file)) for file in _beside(path, deep=not source.is_alone)]


def _beside(path: Path, *, deep: bool) -> Iterator[Path]:
    """Yield other files that may contain the model's external data."""
    for root, directories, names in os.walk(path.parent):
        directories[:] = sorted(directories) if deep else ()
        for name in sorted(names):
            file = Path(root, name)
            if file != path and file.suffix not in SUFFIXES:
                yield file


def _mark(file: Path) -> tuple[int, ...]:
    try:
        return mark_of(file.lstat())
    except OSError:
        return ()


def _hash(path: Path, limit_bytes: int, roots: Roots, check_cancelled: Callable[[], None]) -> bytes:
    digest = hashlib.sha256()
    directory, name = path.parent, path.name
    with files.opened(directory, name, limit_bytes=limit_bytes, roots=roots) as (file, size):
        left = size
        while left:
            check_cancelled()
            chunk = files.read_exactly(file, min(left, _CHUNK_BYTES), name)
            digest.update(chunk)
            left -= len(chunk)
    return digest.digest()


def _converter() -> tuple[str, ...]:
    """Return the versions of the converter and its packages, and a hash of its code."""
    return (*map(_version, _PACKAGES), _code_hash())


@cache
def _code_hash() -> str:
    code = hashlib.sha256()
    # The .pt2 importer uses parts of the ONNX importer.
    for source in own_code.sources((*_WRITERS, "importers/onnx", "importers/pt2")):
        code.update(source)
    return code.hexdigest()


def _version(package: str) -> str:
    # Of what is imported, not of what an upgrade has installed since.
    if found := getattr(sys.modules.get(package), "__version__", ""):
        return str(found)
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
