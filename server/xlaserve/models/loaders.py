"""The table of loaders: which kinds of model there are, and what loads each."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from xlaserve.errors import InvalidModel
from xlaserve.models import manifest, placement, sizes, target_sizes
from xlaserve.models.config import ModelConfig
from xlaserve.models.config_fields import is_onnx
from xlaserve.models.loaded import Generating, LoadContext, LoadedModel, Stage
from xlaserve.models.placement import ONE_CPU, Devices, device_name
from xlaserve.models.roots import ANYWHERE, Roots
from xlaserve.models.target_sizes import TargetSizes
from xlaserve.models.targets.kinds import of_kind


class _Load(Protocol):
    def __call__(self, path: Path, context: LoadContext) -> LoadedModel: ...


@dataclass(frozen=True, slots=True)
class Loader:
    """One kind of model."""

    kind: str
    """The `backend` or `platform` by which a configuration may ask for it."""
    module: str
    """Has a function `load`; imported when the first model of the kind is loaded, since jax takes
    seconds to import and the port opens before."""
    sniff: Callable[[Path], bool]
    """Tells from the files of a version directory, or from a file, whether it is of this kind."""
    predict_size: Callable[[Path, sizes.Parts, Roots], int]
    """Returns the bytes on each device, told into how many parts parameters are split."""


_ARTIFACT_SUFFIX = Path(manifest.ARTIFACT).suffix


def _has_manifest(directory: Path) -> bool:
    return (directory / manifest.FILE_NAME).exists()


def _is_artifact(path: Path) -> bool:
    return path.is_file() and path.suffix == _ARTIFACT_SUFFIX


def _has_code(directory: Path) -> bool:
    return (directory / _CODE).is_file()


def _never(directory: Path) -> bool:
    return False


JAX_EXPORT = "jax_export"
_CODE = "model.py"

LOADERS = (
    Loader(JAX_EXPORT, "xlaserve.models.jax_export", _has_manifest, sizes.predict_exported),
    Loader(JAX_EXPORT, "xlaserve.models.single_file", _is_artifact, sizes.predict_single_file),
    # What its code will take, nobody can tell.
    Loader("python", "xlaserve.models.python.loading", _has_code, lambda path, parts, roots: 0),
    Loader("identity", "xlaserve.models.identity", _never, lambda directory, parts, roots: 0),
)
"""In the order in which they are tried. A new kind of model is a row here and a module."""


def load(path: Path, context: LoadContext) -> LoadedModel:
    """Load a version directory, or a model that is one file, compiled and warmed. Blocks.

    Raises InvalidModel, OutOfMemory, or what `context.check_cancelled` raises; nothing stays in
    memory then.
    """
    context.check_cancelled()
    context.on_stage(Stage("reading"))
    row = _loader_for(path, context.config)
    function: _Load = importlib.import_module(row.module).load
    model = function(path, context)
    if context.config.is_decoupled and not isinstance(model, Generating):
        model.close()
        raise InvalidModel(
            "model_transaction_policy.decoupled: expected false, since the model gives one answer "
            "to each request, got true"
        )
    return model


def predict_size(
    path: Path,
    config: ModelConfig | None = None,
    devices: Devices = ONE_CPU,
    roots: Roots = ANYWHERE,
) -> dict[str, int]:
    """Return how many bytes the model will need on each device, from its headers alone.

    Where its manifest has what the compiler said for devices of this kind, that is it.

    Raises InvalidModel, also where the configuration asks for a device that is not there.
    """
    config = config or ModelConfig()
    wanted = placement.read(config, devices.platform)
    # A model may go to the CPU of a server with GPUs.
    present = devices.count if wanted.platform == devices.platform else 1
    seats = list(wanted.seats(present))
    used = set(seats)
    row, sharding = _loader_for(path, config), wanted.sharding
    if sharding is None and wanted.platform == devices.platform:
        recorded = _recorded(row, path, config, devices, roots)
        if recorded is not None:
            return {
                device_name(wanted.platform, index): recorded.on_device(seats.count(index))
                for index in sorted(used)
            }
    parts = partial(sharding.parts, devices=len(used)) if sharding else sizes.whole
    size = row.predict_size(path, parts, roots)
    return {device_name(wanted.platform, index): size for index in sorted(used)}


def _recorded(
    row: Loader, path: Path, config: ModelConfig, devices: Devices, roots: Roots
) -> TargetSizes | None:
    """Return what the manifest says for devices of this kind, where a load compiles just that."""
    target = of_kind(devices.platform, devices.kind)
    if target is None or row.sniff is not _has_manifest or not row.sniff(path):
        return None
    described = manifest.read(path, roots)
    if not target_sizes.holds(config, described.max_batch_size):
        return None
    return described.sizes.get(target.name)


def _kind(config: ModelConfig) -> str:
    """Return the kind that a configuration asks for; empty where it leaves that to the files."""
    kinds = tuple(dict.fromkeys(row.kind for row in LOADERS))
    found = set()
    for place, said in (("backend", config.backend), ("platform", config.platform)):
        # What an import was made of is still what the configuration beside it says.
        kind = JAX_EXPORT if is_onnx(said) else said
        if kind not in ("", *kinds):
            known = ", ".join(f"'{kind}'" for kind in kinds)
            raise InvalidModel(f"unknown {place} '{said}' in the configuration, expected {known}")
        found.add(kind)
    found.discard("")
    if len(found) > 1:
        raise InvalidModel(
            f"the configuration has backend '{config.backend}' and platform '{config.platform}', "
            "expected one kind of model"
        )
    return found.pop() if found else ""


def _loader_for(path: Path, config: ModelConfig) -> Loader:
    asked = _kind(config)
    rows = [row for row in LOADERS if asked in ("", row.kind)]
    for row in rows:
        if row.sniff(path):
            return row
    if path.is_file():
        raise InvalidModel(
            f"'{path.name}' is no model: one that is a single file is an artifact of jax.export, "
            f"*{_ARTIFACT_SUFFIX}"
        )
    if asked:
        return rows[0]
    raise InvalidModel(f"{manifest.FILE_NAME} is missing")
