"""The contents of a version as texts and hashes, for listing and comparison."""

import hashlib
import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from xlaserve.artifact import generator_record as generator
from xlaserve.artifact import manifest, onnx_source, weights
from xlaserve.artifact.written_by import Writer
from xlaserve.errors import InvalidModel
from xlaserve.files import files
from xlaserve.files.roots import ANYWHERE, Roots
from xlaserve.model_config.config import ModelConfig
from xlaserve.tensors import describe

_CHUNK_BYTES = 1 << 20
_ANY_SIZE = 1 << 62
_MAX_FILES = 10_000
_WEIGHTS_SUFFIX = ".safetensors"
_ONNX = "onnx"


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor, file or field of a version or a configuration."""

    text: str
    """Datatype and shape, size, or value, in readable form."""
    sha256: str = ""
    """Hexadecimal SHA-256 of the item's bytes; empty if the text is complete."""


Items: TypeAlias = Mapping[str, Item]
"""Items by name, in display order."""

Kind: TypeAlias = str
"""`fact`, `input`, `output`, `parameter`, `file`, or `configuration`."""


@dataclass(slots=True)
class Contents:
    """Contents of a version."""

    items: dict[Kind, dict[str, Item]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """Why details are missing, in readable form."""

    def add(self, kind: Kind, name: str, text: object, sha256: str = "") -> None:
        """Add an item."""
        self.items.setdefault(kind, {})[name] = Item(str(text), sha256)


def read(version: Path, kind: str, config: ModelConfig, roots: Roots = ANYWHERE) -> Contents:
    """Return the contents of a version directory or model file of this kind; blocks.

    Reads every file completely, in chunks, and hashes each parameter separately. Raises
    InvalidModel for an unreadable file, or one outside of the roots.
    """
    found = Contents()
    found.add("fact", "kind", kind)
    reader = _READERS.get(kind)
    if reader is not None:
        reader(version, config, roots, found)
    paths = _files(version)
    for path in paths:
        if path.suffix == _WEIGHTS_SUFFIX:
            _add_parameters(path, roots, found)
    for path in paths:
        name = path.name if path == version else path.relative_to(version).as_posix()
        size, sha256 = _hash_file(path, roots)
        found.add("file", name, f"{size} bytes", sha256)
    return found


def hash_files(directory: Path, roots: Roots = ANYWHERE) -> Items:
    """Return the visible files directly in a directory with their hashes; raises InvalidModel."""
    paths = [path for path in _files(directory) if path.parent == directory]
    hashed = {path.name: _hash_file(path, roots) for path in paths}
    return {name: Item(f"{size} bytes", sha256) for name, (size, sha256) in hashed.items()}


def _files(version: Path) -> list[Path]:
    if not version.is_dir():
        return [version]
    found: list[Path] = []
    for root, directories, names in os.walk(version):
        directories[:] = sorted(name for name in directories if not name.startswith("."))
        found += [Path(root, name) for name in sorted(names) if not name.startswith(".")]
        if len(found) > _MAX_FILES:
            raise InvalidModel(f"more than {_MAX_FILES} files in '{version.name}'")
    return found


def _hash_file(path: Path, roots: Roots) -> tuple[int, str]:
    digest = hashlib.sha256()
    opened = files.opened(path.parent, path.name, limit_bytes=_ANY_SIZE, roots=roots)
    with opened as (file, size):
        left = size
        while left:
            part = files.read_exactly(file, min(left, _CHUNK_BYTES), path.name)
            digest.update(part)
            left -= len(part)
    return size, digest.hexdigest()


def _add_parameters(path: Path, roots: Roots, found: Contents) -> None:
    try:
        for entry, sha256 in weights.hashes(path.parent, path.name, roots):
            found.add("parameter", entry.name, describe(entry.dtype.name, entry.shape), sha256)
    except InvalidModel as error:
        # The parameters cannot be listed, but the hash of the whole file is still compared.
        found.notes.append(str(error))


# --- Kinds of models ---


def _read_exported(version: Path, config: ModelConfig, roots: Roots, found: Contents) -> None:
    if not (version / manifest.FILE_NAME).exists():
        found.notes.append("its tensors are part of the artifact and not compared separately")
        return
    described = manifest.read(version, roots)
    for kind, specs in (("input", described.inputs), ("output", described.outputs)):
        for spec in specs:
            found.add(kind, spec.name, spec)
    verdict = described.verdict
    facts: Mapping[str, object] = {
        "max_batch_size": described.max_batch_size,
        "platforms": ", ".join(described.platforms),
        "jax_version": described.jax_version,
        "written_by": described.written_by,
        "exported_at": described.exported_at,
        "rows": "" if verdict is None else verdict,
        "steps": "" if described.steps is None else described.steps,
        **described.defaults,
    }
    for name, value in facts.items():
        if value != "":
            found.add("fact", name, value)


def _read_generator(version: Path, config: ModelConfig, roots: Roots, found: Contents) -> None:
    record = generator.read(version, roots)
    writer = Writer.of(record.jax_version)
    facts = {
        "platforms": ", ".join(record.platforms),
        "jax_version": writer.jax,
        **({"written_by": writer.xlaserve} if writer.xlaserve else {}),
        "vocab": record.vocab,
        "max_length": record.max_length,
        "stop_tokens": ", ".join(map(str, record.stop_tokens)),
    }
    for name, value in facts.items():
        found.add("fact", name, value)


def _read_onnx(version: Path, config: ModelConfig, roots: Roots, found: Contents) -> None:
    source = onnx_source.find(version, config)
    assert source is not None
    if importlib.util.find_spec(_ONNX) is None:
        found.notes.append("tensors not compared: onnx is not installed (xlaserve[onnx])")
        return
    from xlaserve.importers.onnx import reading

    try:
        model = reading.read(source.path, roots=roots)
    except InvalidModel as error:
        found.notes.append(f"tensors not compared: {error}")
        return
    found.add("fact", "opset", model.opset)
    found.add("fact", "producer", model.producer)
    for given in model.graph.inputs:
        sizes = ",".join(str(size or "?") for size in given.shape)
        found.add("input", given.name, f"{given.datatype.name}[{sizes}]")
    for name in model.graph.outputs:
        found.add("output", name, "")
    for name, array in model.graph.constants.items():
        digest = hashlib.sha256(array.tobytes()).hexdigest()
        found.add("parameter", name, describe(array.dtype.name, array.shape), digest)


def _read_pt2(version: Path, config: ModelConfig, roots: Roots, found: Contents) -> None:
    source = onnx_source.find(version, config)
    assert source is not None
    from xlaserve.importers.pt2 import archive

    try:
        read = archive.open_file(source.path, roots=roots)
    except InvalidModel as error:
        found.notes.append(f"tensors not compared: {error}")
        return
    program = read.program
    found.add("fact", "torch_version", program.torch_version)
    for name in program.inputs:
        tensor = program.graph.tensors[name]
        sizes = ",".join(map(str, tensor.sizes))
        found.add("input", name, f"{tensor.dtype.name}[{sizes}]")
    for name in program.outputs:
        found.add("output", name, "")
    for name, array in read.tensors.items():
        digest = hashlib.sha256(array.tobytes()).hexdigest()
        shown = describe(array.dtype.name, array.shape)
        found.add("parameter", program.stored[name].name, shown, digest)


_READERS: Mapping[str, Callable[[Path, ModelConfig, Roots, Contents], None]] = MappingProxyType(
    {
        "jax_export": _read_exported,
        "generator": _read_generator,
        _ONNX: _read_onnx,
        "pt2": _read_pt2,
    }
)
"""Functions that read further details, by kind of model."""
