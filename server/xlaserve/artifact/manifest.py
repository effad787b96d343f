"""The `model.json` of a version directory: a model's signature and files."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType

import msgspec

from xlaserve.artifact import target_sizes, written_by
from xlaserve.artifact.steps import Steps
from xlaserve.artifact.target_sizes import Recorded, TargetSizes
from xlaserve.artifact.written_by import Writer
from xlaserve.errors import InvalidModel, UnknownDatatype
from xlaserve.files import files
from xlaserve.files.files import FileRecord
from xlaserve.files.roots import ANYWHERE, Roots
from xlaserve.model_config.buckets import MAX_BATCH_SIZE
from xlaserve.model_config.compiled_shapes import COMPILED_SHAPES, MAX_ON_DEMAND_SHAPES
from xlaserve.row_proofs.verdict import Independence, Verdict
from xlaserve.tensors import TensorSpec, datatype_named

FILE_NAME = "model.json"
"""File name of a manifest."""

ARTIFACT = "model.jaxexp"
"""File name of the serialized `jax.export.Exported`."""

STABLEHLO = "model.stablehlo"
"""File name of the StableHLO module, which stays readable for years."""

WEIGHTS = "params.safetensors"
"""File name of the parameters."""

KIND = "jax_export"
"""The only supported kind of manifest."""

FORMAT_VERSION = 6
"""Current format version. Added in 2: the StableHLO file; in 3: compiled shapes; in 4: row
verdicts; in 5: sizes per target; in 6: stepped models."""

LIMIT_BYTES = 1 << 20

MAX_NAME_LENGTH = 1024
MAX_RANK = 32
MAX_DIMENSION = (1 << 31) - 1


class Durable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The calling convention of the StableHLO file."""

    calling_convention: int
    """Version of the calling convention, as `jax.export` numbers it."""
    is_open: bool
    """Whether shapes or the platform are only fixed when the module is compiled."""
    arguments: tuple[str, ...]
    """Parameters, then inputs, as `float32[b, 784]` with symbolic dimensions."""
    results: tuple[str, ...]
    unused: tuple[int, ...]
    """Indices of the arguments that the module does not take."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of `model.json`."""

    inputs: tuple[TensorSpec, ...]
    """Inputs, in the order of the artifact's arguments."""
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int
    """Default that a model configuration may override; 0 if requests are not batched."""
    parameters: tuple[str, ...]
    """Names of the tensors in the weights file, in the order of the artifact's arguments."""
    parameters_bytes: int
    files: Mapping[str, FileRecord]
    platforms: tuple[str, ...]
    jax_version: str
    """JAX version of the export; other versions may be unable to read `model.jaxexp`."""
    exported_at: str
    """Time of the export, RFC 3339 in UTC."""
    written_by: str = ""
    """The xlaserve version that wrote the manifest, or an empty string in older files."""
    durable: Durable | None = None
    """The calling convention of the StableHLO file; None if there is no such file."""
    batch_independent: bool | None = None
    """The author's declaration whether each row is computed independently of the others. None
    leaves that to an analysis."""
    compiled_shapes: Mapping[str, tuple[int, ...]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    """Compiled sizes of dynamic dimensions other than the batch, by name."""
    max_on_demand_shapes: int = 0
    """Maximum number of other sizes that are compiled on demand."""
    verdict: Verdict | None = None
    """Result of the export's row-independence analysis, for information only, since each load runs
    its own. None without a batch dimension, and in older manifests."""

    sizes: Recorded = field(default_factory=lambda: MappingProxyType({}))
    """Memory per kind of device, by target name."""
    steps: Steps | None = None
    """Set for a model that runs in steps; None for one that answers in one execution."""

    @property
    def known(self) -> "tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]":
        """Return the inputs and outputs that clients see, without the internal ones of steps."""
        if self.steps is None:
            return self.inputs, self.outputs
        return self.steps.known(self.inputs), self.steps.known(self.outputs)

    @property
    def named_shapes(self) -> tuple[tuple[str, ...], ...]:
        """Return the input shapes as text, with the names of dynamic dimensions."""
        if self.durable is None:
            return tuple(tuple(map(str, spec.shape)) for spec in self.inputs)
        arguments = self.durable.arguments[len(self.parameters) :]
        sizes = (argument.partition("[")[2].rstrip("]") for argument in arguments)
        return tuple(tuple(one.split(", ")) if one else () for one in sizes)

    @property
    def is_open(self) -> bool:
        """Tell whether the first dimension of all inputs is dynamic."""
        return all(spec.shape[:1] == (-1,) for spec in self.inputs)

    @property
    def defaults(self) -> Mapping[str, str]:
        """Return the shape options as default `parameters` of a model configuration."""
        parameters: dict[str, str] = {}
        if self.batch_independent is not None:
            parameters["batch_independent"] = str(self.batch_independent).lower()
        if self.compiled_shapes:
            parameters[COMPILED_SHAPES] = msgspec.json.encode(dict(self.compiled_shapes)).decode()
        if self.max_on_demand_shapes:
            parameters[MAX_ON_DEMAND_SHAPES] = str(self.max_on_demand_shapes)
        return parameters


class _Tensor(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    datatype: str
    shape: list[int]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    bytes: int
    sha256: str


class _Verdict(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    independence: Independence
    output: str = ""
    operation: str = ""
    reason: str = ""
    location: str = ""
    loops_follow_rows: bool = False
    loops_follow_inputs: bool = False


class _Document(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The JSON fields of the manifest, in the order in which they are written."""

    format_version: int
    kind: str
    jax_version: str
    exported_at: str
    platforms: list[str]
    max_batch_size: int
    inputs: list[_Tensor]
    outputs: list[_Tensor]
    parameters_bytes: int
    parameters: list[str]
    files: dict[str, _File]
    durable: Durable | None = None
    batch_independent: bool | None = None
    compiled_shapes: dict[str, list[int]] = {}
    max_on_demand_shapes: int = 0
    verdict: _Verdict | None = None
    sizes: dict[str, TargetSizes] = {}
    steps: Steps | None = None


class _Kind(msgspec.Struct):
    """The fields that must be checked before the others can be decoded."""

    format_version: int
    kind: str
    jax_version: str = ""


def read(directory: Path, roots: Roots = ANYWHERE) -> Manifest:
    """Read and validate the manifest of a version directory; raises InvalidModel."""
    data = files.read_checked(directory, FILE_NAME, limit_bytes=LIMIT_BYTES, roots=roots)
    try:
        start = msgspec.json.decode(data, type=_Kind)
        _check_kind(start)
        document = msgspec.json.decode(data, type=_Document)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidModel(f"{FILE_NAME} is not valid: {error}") from error
    return _from_document(document)


def write(directory: Path, manifest: Manifest) -> FileRecord:
    """Write the manifest; equal manifests give equal bytes."""
    document = _to_document(manifest)
    _from_document(document)  # never write an invalid manifest
    text = msgspec.json.format(msgspec.json.encode(document), indent=2)
    return files.write_atomically(directory / FILE_NAME, [text, b"\n"])


def _check_kind(start: _Kind) -> None:
    if not 1 <= start.format_version <= FORMAT_VERSION:
        found = f"has format version {start.format_version}"
        reads = f"versions 1 to {FORMAT_VERSION}"
        raise InvalidModel(written_by.not_read(FILE_NAME, found, reads, start.jax_version))
    if start.kind != KIND:
        raise InvalidModel(f"{FILE_NAME} is of kind '{start.kind[:64]}', expected '{KIND}'")


def _from_document(document: _Document) -> Manifest:
    writer = Writer.of(document.jax_version)
    manifest = Manifest(
        inputs=_specs("input", document.inputs),
        outputs=_specs("output", document.outputs),
        max_batch_size=document.max_batch_size,
        parameters=_unique("parameter", document.parameters),
        parameters_bytes=document.parameters_bytes,
        files=MappingProxyType(
            {name: FileRecord(file.bytes, file.sha256) for name, file in document.files.items()}
        ),
        platforms=tuple(document.platforms),
        jax_version=writer.jax,
        exported_at=document.exported_at,
        written_by=writer.xlaserve,
        durable=document.durable,
        batch_independent=document.batch_independent,
        compiled_shapes=MappingProxyType(
            {name: tuple(sizes) for name, sizes in document.compiled_shapes.items()}
        ),
        max_on_demand_shapes=document.max_on_demand_shapes,
        verdict=_verdict(document.verdict),
        sizes=MappingProxyType(document.sizes),
        steps=document.steps,
    )
    _check_files(manifest)
    _check_durable(manifest)
    _check_batch(manifest)
    try:
        target_sizes.check(manifest.sizes, manifest.parameters_bytes)
        if manifest.steps is not None:
            manifest.steps.check(manifest.inputs, manifest.outputs, manifest.max_batch_size)
    except InvalidModel as error:
        raise _invalid(str(error)) from None
    return manifest


def _to_document(manifest: Manifest) -> _Document:
    return _Document(
        format_version=_version_of(manifest),
        kind=KIND,
        jax_version=Writer(manifest.jax_version, manifest.written_by).text,
        exported_at=manifest.exported_at,
        platforms=list(manifest.platforms),
        max_batch_size=manifest.max_batch_size,
        inputs=[_Tensor(s.name, s.datatype.name, list(s.shape)) for s in manifest.inputs],
        outputs=[_Tensor(s.name, s.datatype.name, list(s.shape)) for s in manifest.outputs],
        parameters_bytes=manifest.parameters_bytes,
        parameters=list(manifest.parameters),
        files={
            name: _File(record.size_bytes, record.sha256)
            for name, record in sorted(manifest.files.items())
        },
        durable=manifest.durable,
        batch_independent=manifest.batch_independent,
        compiled_shapes={name: list(sizes) for name, sizes in manifest.compiled_shapes.items()},
        max_on_demand_shapes=manifest.max_on_demand_shapes,
        verdict=None if manifest.verdict is None else _Verdict(**asdict(manifest.verdict)),
        sizes=dict(manifest.sizes),
        steps=manifest.steps,
    )


def _version_of(manifest: Manifest) -> int:
    """Return the lowest format version that can express a manifest, for older servers."""
    if manifest.steps is not None:
        return FORMAT_VERSION
    if manifest.sizes:
        return 5
    opened = manifest.is_open and not manifest.max_batch_size
    if opened or manifest.verdict is not None or manifest.batch_independent:
        return 4
    if manifest.defaults:
        return 3
    return 1 if manifest.durable is None else 2


def _verdict(verdict: _Verdict | None) -> Verdict | None:
    if verdict is None:
        return None
    found = Verdict(**msgspec.structs.asdict(verdict))
    for text in (found.output, found.operation, found.reason, found.location):
        if len(text) > MAX_NAME_LENGTH or not text.isprintable():
            raise _invalid("its verdict contains a text that is too long or not printable")
    return found


def _invalid(problem: str) -> InvalidModel:
    return InvalidModel(f"{FILE_NAME} is not valid: {problem}")


def _specs(kind: str, tensors: list[_Tensor]) -> tuple[TensorSpec, ...]:
    if not tensors:
        raise _invalid(f"it has no {kind}s")
    _unique(kind, [tensor.name for tensor in tensors])
    return tuple(_spec(kind, tensor) for tensor in tensors)


def _spec(kind: str, tensor: _Tensor) -> TensorSpec:
    try:
        datatype = datatype_named(tensor.datatype)
    except UnknownDatatype as error:
        raise _invalid(f"{kind} '{tensor.name}' has an {error}") from error
    shape = tuple(tensor.shape)
    if len(shape) > MAX_RANK or not all(-1 <= size <= MAX_DIMENSION for size in shape):
        raise _invalid(f"{kind} '{tensor.name}' has an invalid shape")
    return TensorSpec(tensor.name, datatype, shape)


def _unique(kind: str, names: Iterable[str]) -> tuple[str, ...]:
    seen: dict[str, None] = {}
    for name in names:
        if not 0 < len(name) <= MAX_NAME_LENGTH:
            raise _invalid(
                f"one {kind}: expected a name of 1 to {MAX_NAME_LENGTH} characters, got {len(name)}"
            )
        if name in seen:
            raise _invalid(f"{kind} '{name}' is duplicated")
        seen[name] = None
    return tuple(seen)


def _check_files(manifest: Manifest) -> None:
    expected = {ARTIFACT, WEIGHTS}
    found = set(manifest.files)
    if manifest.durable is not None:
        expected.add(STABLEHLO)
        found.add(ARTIFACT)  # optional, because the StableHLO file is loaded instead
    if found != expected:
        raise _invalid(f"expected the files {sorted(expected)}, got {sorted(manifest.files)[:8]}")
    if manifest.parameters_bytes < 0:
        raise _invalid("parameters_bytes is negative")


def _check_durable(manifest: Manifest) -> None:
    if (durable := manifest.durable) is None:
        return
    for kind, found, expected in (
        ("arguments", durable.arguments, len(manifest.parameters) + len(manifest.inputs)),
        ("results", durable.results, len(manifest.outputs)),
    ):
        if len(found) != expected:
            raise _invalid(f"durable has {len(found)} {kind}, expected {expected}")
    if not all(0 <= position < len(durable.arguments) for position in durable.unused):
        count = len(durable.arguments)
        raise _invalid(f"durable.unused has an index that is not among its {count} arguments")


def _check_batch(manifest: Manifest) -> None:
    if manifest.max_on_demand_shapes < 0:
        raise _invalid("max_on_demand_shapes is less than 0")
    if not 0 <= manifest.max_batch_size <= MAX_BATCH_SIZE:
        raise _invalid(f"max_batch_size is not between 0 and {MAX_BATCH_SIZE}")
    if not manifest.max_batch_size and not manifest.is_open:
        return
    for spec in (*manifest.inputs, *manifest.outputs):
        if spec.shape[:1] != (-1,):
            raise _invalid(
                f"'{spec.name}' is {spec}, but with batches the first dimension must be -1"
            )
