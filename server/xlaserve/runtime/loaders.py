"""The table of loaders, one per kind of model."""

import importlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from xlaserve.artifact import manifest, onnx_source, plain_artifact, replaced, sizes, target_sizes
from xlaserve.artifact.foreseen import Serving
from xlaserve.artifact.generator_record import FILE_NAME as GENERATOR_FILE
from xlaserve.artifact.target_sizes import TargetSizes
from xlaserve.errors import InvalidModel
from xlaserve.files.roots import ANYWHERE, Roots
from xlaserve.model_config import foreign
from xlaserve.model_config.config import ModelConfig
from xlaserve.model_config.fields import is_onnx
from xlaserve.runtime import absent
from xlaserve.runtime.devices import placement
from xlaserve.runtime.devices.placement import ONE_CPU, Devices, device_name
from xlaserve.runtime.devices.target_kinds import of_kind
from xlaserve.runtime.embedding import declared as embedding
from xlaserve.runtime.embedding.declared import Declared
from xlaserve.runtime.generator import configured as generation
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.loaded import LoadedModel, Stage
from xlaserve.runtime.programs.compilation import Compilation
from xlaserve.runtime.wrappers import ragged, reshaping, warmup


class _Load(Protocol):
    def __call__(self, path: Path, context: LoadContext) -> LoadedModel: ...


class _Wrap(Protocol):
    def __call__(
        self, inner: LoadedModel, directory: Path, context: LoadContext
    ) -> LoadedModel: ...


_SEQUENCES = "xlaserve.runtime.wrappers.sequence_model"
"""Module of the sequence wrapper; like the loaders, imported only after jax."""
_IMPORTED_LATE = (
    _SEQUENCES,
    sizes.ESTIMATING,
    "xlaserve.row_proofs.interface",
    "xlaserve.importers.onnx.reading",
)


@dataclass(frozen=True, slots=True)
class Loader:
    """Loader of one kind of model."""

    kind: str
    """The `backend` or `platform` in a configuration that selects this loader."""
    module: str
    """Name of the module with a function `load`, imported once the port is open: jax takes seconds
    to import.
    """
    sniff: Callable[[Path, ModelConfig], bool]
    """Detects this kind of model from a version directory or a single file."""
    predict_size: Callable[[Path, sizes.Parts, Roots, Serving], int]
    """Predicts the bytes per device, given the number of shards of each parameter."""
    files: tuple[str, ...] | None = ()
    """Permitted values of `default_model_filename`; None for any name."""
    predict_slots: Callable[[Path, ModelConfig, Roots, sizes.Parts], int] = (
        lambda path, config, roots, parts: 0
    )
    """Predicts additional bytes per device required by the configuration, such as for slots."""
    looked_for: str = ""
    """The file that identifies this kind, for error messages; empty if no file does."""


_ARTIFACT_SUFFIX = Path(manifest.ARTIFACT).suffix
_OF_EXPORTS = (manifest.ARTIFACT, manifest.FILE_NAME, manifest.STABLEHLO)


def _has_manifest(directory: Path, config: ModelConfig) -> bool:
    return (directory / manifest.FILE_NAME).exists()


def _is_artifact(path: Path, config: ModelConfig) -> bool:
    return path.is_file() and path.suffix == _ARTIFACT_SUFFIX


def _has_plain_artifact(path: Path, config: ModelConfig) -> bool:
    found = plain_artifact.find(path)
    return found is not None and config.default_model_filename in ("", found.name)


def _predict_plain(path: Path, parts: sizes.Parts, roots: Roots, serving: Serving) -> int:
    found = plain_artifact.find(path)
    assert found is not None
    return sizes.predict_single_file(found, parts, roots, serving)


def _nothing(path: Path, parts: sizes.Parts, roots: Roots, serving: Serving) -> int:
    return 0


def _has_code(directory: Path, config: ModelConfig) -> bool:
    name = config.default_model_filename or _CODE
    return name.endswith(_CODE_SUFFIX) and (directory / name).is_file()


def _has_onnx(path: Path, config: ModelConfig) -> bool:
    named = config.default_model_filename
    is_meant = named.endswith(onnx_source.SUFFIX) or not named or _is_said_to_be_onnx(config)
    found = None if _is_said_to_be_jax(config) or not is_meant else onnx_source.find(path, config)
    return found is not None and not found.is_pt2


def _has_pt2(path: Path, config: ModelConfig) -> bool:
    named = config.default_model_filename
    if _is_said_to_be_jax(config) or _is_said_to_be_onnx(config):
        return False
    if named and not named.endswith(onnx_source.PT2_SUFFIX):
        return False
    found = onnx_source.find(path, config)
    return found is not None and found.is_pt2


def _is_said_to_be_jax(config: ModelConfig) -> bool:
    return JAX_EXPORT in (config.backend, config.platform)


def _is_said_to_be_onnx(config: ModelConfig) -> bool:
    return is_onnx(config.backend) or is_onnx(config.platform)


def _never(directory: Path, config: ModelConfig) -> bool:
    return False


def _is_generator(path: Path, config: ModelConfig) -> bool:
    return (path / GENERATOR_FILE).exists()


JAX_EXPORT = "jax_export"
GENERATOR = "generator"
PYTHON = "python"
_CODE = "model.py"
_CODE_SUFFIX = ".py"

LOADERS = (
    Loader(
        JAX_EXPORT,
        "xlaserve.runtime.exported.jax_export",
        _has_manifest,
        sizes.predict_exported,
        _OF_EXPORTS,
        looked_for=manifest.FILE_NAME,
    ),
    Loader(
        JAX_EXPORT,
        "xlaserve.runtime.exported.single_file",
        _is_artifact,
        sizes.predict_single_file,
        None,
    ),
    Loader(
        GENERATOR,
        "xlaserve.generation.loading",
        _is_generator,
        generation.predict_size,
        predict_slots=generation.predict_slots,
        looked_for=GENERATOR_FILE,
    ),
    # The memory of Python code cannot be predicted.
    Loader(
        PYTHON,
        "xlaserve.python_models.loading",
        _has_code,
        _nothing,
        None,
        looked_for=_CODE,
    ),
    Loader(
        JAX_EXPORT,
        "xlaserve.importers.onnx.loading",
        _has_onnx,
        sizes.predict_onnx,
        None,
        looked_for=onnx_source.DEFAULT_FILE,
    ),
    Loader(
        JAX_EXPORT,
        "xlaserve.importers.pt2.loading",
        _has_pt2,
        sizes.predict_onnx,
        None,
        looked_for=onnx_source.PT2_FILE,
    ),
    # Detected last: the artifact may be stored next to another model's source.
    Loader(
        JAX_EXPORT,
        "xlaserve.runtime.exported.single_file",
        _has_plain_artifact,
        _predict_plain,
        None,
        looked_for=f"one *{_ARTIFACT_SUFFIX}",
    ),
    Loader("identity", "xlaserve.runtime.identity", _never, _nothing),
)
"""All loaders, in order of precedence. A new kind of model needs a row here and a module."""

FORMATS = ("jax", "onnx", "pytorch", "python")
"""Format names in manifests (`supportedModelFormats`): JAX exports and generators, `.onnx`, `.pt2`,
and `model.py`.
"""

_START_SECONDS = 60.0
"""Maximum time before readiness that the server waits for a compiler process to start (1.4 s of a
core). Until the server is ready, a mesh sends requests elsewhere; afterwards they would wait for
the process.
"""


def load_modules() -> None:
    """Import all loader modules, so that later package upgrades cannot affect a load. Blocks.

    Kinds with missing libraries are skipped; their first load reports the missing library.
    """
    for module in dict.fromkeys([*(row.module for row in LOADERS), *_IMPORTED_LATE]):
        with suppress(ImportError):
            importlib.import_module(module)


def prepare(compilation: Compilation, platform: str) -> None:
    """Do the model-independent work of the first load. Blocks.

    Imports the loader of exported models, and starts a compiler process unless a cache may already
    have the programs.
    """
    importlib.import_module(LOADERS[0].module)
    processes = compilation.processes
    if processes is not None and platform == "cpu" and compilation.has_no_programs:
        processes.start_ahead(_START_SECONDS)


def begin(compilation: Compilation, platform: str) -> None:
    """Start a compiler process while a client's uploaded model is being tried.

    The process imports JAX, which takes most of a load's time on a busy machine.
    """
    if compilation.processes is not None and platform == "cpu":
        compilation.processes.start_ahead(0)


def _loaded(path: Path, context: LoadContext) -> LoadedModel:
    context.check_cancelled()
    context.on_stage(Stage("reading"))
    row = _loader_for(path, context.config)
    declaration = None
    if row.kind != PYTHON:  # The code of a Python model may give this parameter another meaning.
        declaration = embedding.read(
            path, context.config, context.model, context.roots, context.text_limits
        )
        context = replace(context, embedding=declaration)
    function: _Load = importlib.import_module(row.module).load
    if row.kind != PYTHON and ragged.asks(context.config):
        model = _ragged(function, path, context)
    else:
        model = function(path, context)
    if context.config.is_decoupled and not model.info.is_decoupled:
        model.close()
        raise InvalidModel(
            "model_transaction_policy.decoupled: expected false, since the model returns one"
            " answer per request, got true"
        )
    if declaration is not None:
        _check_embedding(model, declaration, context.config)
    if context.config.is_reshaped:
        model = _reshaped(model, context)
    if context.config.sequence_batching is None:
        if context.config.warmup:
            _warm_up(model, path, context)
        return model
    wrap: _Wrap = importlib.import_module(_SEQUENCES).wrap
    return wrap(model, path, context)


def load(path: Path, context: LoadContext) -> LoadedModel:
    """Load a version directory or a single-file model: compile and warm it. Blocks.

    Raises InvalidModel, OutOfMemory, or the exception of `context.check_cancelled`, and leaves
    nothing in memory then. Once the model is loaded, files that a migration has replaced are
    removed.
    """
    model = _loaded(path, context)
    replaced.forget(path)
    return model


def _check_embedding(model: LoadedModel, declaration: Declared, config: ModelConfig) -> None:
    """Raise InvalidModel if the model declares embeddings but its kind cannot compute them."""
    if model.info.embedding is None:
        got = f"a model of {model.info.platform}"
    elif config.is_reshaped:
        got = "a configuration with reshape"
    elif config.sequence_batching is not None:
        got = "a configuration with sequence_batching"
    elif ragged.asks(config):
        got = "a configuration with allow_ragged_batch"
    else:
        return
    model.close()
    raise InvalidModel(
        f"{declaration.place}: expected a computation that gives one embedding for each row of "
        f"tokens, got {got}"
    )


def _ragged(function: _Load, path: Path, context: LoadContext) -> LoadedModel:
    config = context.config
    model = function(path, replace(context, config=ragged.inner(config)))
    try:
        return ragged.wrap(context.model, model, config)
    except BaseException:
        model.close()
        raise


def _reshaped(model: LoadedModel, context: LoadContext) -> LoadedModel:
    try:
        return reshaping.wrap(model, context.config)
    except BaseException:
        model.close()
        raise


def _warm_up(model: LoadedModel, path: Path, context: LoadContext) -> None:
    context.on_stage(Stage("warming"))
    try:
        warmup.run(model, path, context)
    except BaseException:
        model.close()
        raise


def recognised(path: Path, config: ModelConfig) -> str:
    """Detect the kind of a version (its loader's kind, `onnx` or `pt2`); raises InvalidModel."""
    row = _loader_for(path, config)
    if row.sniff is _has_pt2:
        return "pt2"
    return "onnx" if row.sniff is _has_onnx else row.kind


def begin_estimating() -> None:
    """Make `predict_size` estimate temporaries from now on; imports JAX."""
    importlib.import_module(sizes.ESTIMATING)


def predict_size(
    path: Path,
    config: ModelConfig | None = None,
    devices: Devices = ONE_CPU,
    roots: Roots = ANYWHERE,
    *,
    processes: int = 1,
    in_background: bool = False,
    patience_seconds: float | None = None,
) -> dict[str, int]:
    """Predict the bytes that a model needs on each device, from file headers alone.

    Uses the compiler's sizes from the manifest if it has them for this kind of device. Each of the
    `processes` that map the parameters accounts for its share. `in_background`: the load defers
    most batch sizes. After `patience_seconds`, temporaries are assumed to be as large as the
    outputs.

    Raises InvalidModel, also if the configuration requests a missing device.
    """
    config = config or ModelConfig()
    wanted = placement.read(config, devices.platform)
    # On a server with GPUs a model may be configured for the CPU.
    present = devices.count if wanted.platform == devices.platform else 1
    seats = list(wanted.seats(present))
    used = set(seats)
    row, sharding = _loader_for(path, config), wanted.sharding
    parts = partial(sharding.parts, devices=len(used)) if sharding else sizes.whole
    states = row.predict_slots(path, config, roots, parts)
    if config.sequence_batching is not None:
        states += config.sequence_batching.states_bytes(config.max_batch_size)
    labels = {min(used): config.labels_bytes}
    if sharding is None and wanted.platform == devices.platform and processes == 1:
        recorded = _recorded(row, path, config, devices, roots)
        if recorded is not None:
            return {
                device_name(wanted.platform, index): recorded.on_device(seats.count(index))
                + states * seats.count(index)
                + labels.get(index, 0)
                for index in sorted(used)
            }
    found: dict[str, int] = {}
    for index in sorted(used):
        serving = Serving(
            wanted.platform, config, seats.count(index), in_background, patience_seconds
        )
        size = row.predict_size(path, lambda name: processes * parts(name), roots, serving)
        size += states * serving.replicas + labels.get(index, 0)
        found[device_name(wanted.platform, index)] = size
    return found


def _recorded(
    row: Loader, path: Path, config: ModelConfig, devices: Devices, roots: Roots
) -> TargetSizes | None:
    """Return the manifest's sizes for this kind of device, or None if they do not apply."""
    target = of_kind(devices.platform, devices.kind)
    if target is None or row.sniff is not _has_manifest or not row.sniff(path, config):
        return None
    described = manifest.read(path, roots)
    if not target_sizes.holds(config, described.max_batch_size):
        return None
    return described.sizes.get(target.name)


def _kind(config: ModelConfig) -> str:
    """Return the kind that a configuration names, or an empty string if it names none."""
    kinds = tuple(dict.fromkeys(row.kind for row in LOADERS))
    found = set()
    for place, name in (("backend", config.backend), ("platform", config.platform)):
        # The configuration of an imported model still names the format that it was imported from.
        kind = JAX_EXPORT if is_onnx(name) else name
        if kind not in ("", *kinds):
            known = ", ".join(f"'{kind}'" for kind in kinds)
            raise InvalidModel(
                f"unknown {place} '{name}' in the configuration, expected {known}"
                f"{foreign.advice(kind)}"
            )
        found.add(kind)
    found.discard("")
    if len(found) > 1:
        raise InvalidModel(
            f"the configuration has backend '{config.backend}' and platform '{config.platform}', "
            "expected one kind of model"
        )
    return found.pop() if found else ""


def _loader_for(path: Path, config: ModelConfig) -> Loader:
    kind = _kind(config)
    if config.default_model_filename:
        onnx_source.inside(config.default_model_filename)
    rows = [row for row in LOADERS if kind in ("", row.kind)]
    for row in rows:
        if row.sniff(path, config):
            _check_file_name(row, config)
            return row
    if path.is_file():
        raise InvalidModel(
            f"'{path.name}' is not a model: a single-file model is a jax.export artifact,"
            f" *{_ARTIFACT_SUFFIX}, an ONNX model, *{onnx_source.SUFFIX}, or a torch.export"
            f" program, *{onnx_source.PT2_SUFFIX}"
        )
    if found := foreign.recognise(path):
        raise InvalidModel(found)
    if _is_said_to_be_onnx(config):
        name = config.default_model_filename or onnx_source.DEFAULT_FILE
        raise InvalidModel(absent.text(path, (), name))
    if kind:
        _check_file_name(rows[0], config)
        return rows[0]
    looked_for = [row.looked_for for row in LOADERS if row.looked_for]
    raise InvalidModel(absent.text(path, looked_for, config.default_model_filename))


def _check_file_name(row: Loader, config: ModelConfig) -> None:
    """Raise InvalidModel if the configuration names a file that the loader would ignore."""
    name, files = config.default_model_filename, row.files
    was_imported = row.sniff is _has_manifest and name.endswith(onnx_source.SUFFIXES)
    if name and files is not None and name not in files and not was_imported:
        shown = f"one of {', '.join(files)}" if len(files) > 1 else "".join(files) or "none"
        raise InvalidModel(
            f"default_model_filename: expected {shown}, as for {row.kind} models, got"
            f" '{name[:200]}'"
        )
