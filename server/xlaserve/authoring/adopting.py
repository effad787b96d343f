"""Turns a `jax.export` file into a model that can be exported again."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.export import Exported

from xlaserve.artifact import artifact
from xlaserve.artifact.plain_artifact import FROM_TREE, SUFFIX, Names
from xlaserve.artifact.training_layers import training_layer
from xlaserve.authoring.export import Exportable
from xlaserve.authoring.lowering import KNOWN_PLATFORMS
from xlaserve.errors import InvalidModel
from xlaserve.runtime.exported import single_file


@dataclass(frozen=True, slots=True)
class Options:
    """Options for adopting a file, with the meaning that they have in `export_model`."""

    names: Names = FROM_TREE
    max_batch_size: int | None = None
    batch_independent: bool | None = None
    compiled_shapes: Mapping[str, Sequence[int]] | None = None
    max_on_demand_shapes: int = 0
    training_mode: bool = False
    """Whether layers in training mode are accepted."""


def read(path: Path, options: Options) -> Exportable:
    """Read a `jax.export` file as a model to be exported; raises InvalidModel.

    The function must run on this machine's platform, on one device and without side effects, and
    may only make custom calls that are known to be safe.
    """
    if path.suffix != SUFFIX or not path.is_file():
        raise InvalidModel(f"'{path}': expected a *{SUFFIX} file written by jax.export")
    exported = single_file.read_file(path)
    layer = None if options.training_mode else training_layer(exported.mlir_module_serialized)
    if layer is not None:
        raise InvalidModel(
            f"{path.name} looks like training mode: {layer.name} {layer.does}; {layer.advice} and"
            " write it again, or adopt it unchanged with --training-mode"
        )
    artifact.check_runs(exported, jax.export.default_export_platform(), path.name)
    inputs, outputs = single_file.tensor_names(exported, path.name, options.names)
    batch = single_file.batch_of(exported)
    return Exportable(
        _Flat(exported, outputs),
        {},
        {
            name: (_datatype(name, aval), _shape(aval, batch))
            for name, aval in zip(inputs, exported.in_avals, strict=True)
        },
        max_batch_size=options.max_batch_size,
        platforms=[name for name in exported.platforms if name in KNOWN_PLATFORMS],
        x64=any(aval.dtype.itemsize == 8 for aval in (*exported.in_avals, *exported.out_avals)),
        batch_independent=options.batch_independent,
        compiled_shapes=options.compiled_shapes,
        max_on_demand_shapes=options.max_on_demand_shapes,
    )


class _Flat:
    """Calls an exported function with flat inputs, and returns its outputs by name."""

    def __init__(self, exported: Exported, outputs: Sequence[str]) -> None:
        self._exported = exported
        self._outputs = outputs

    def __call__(self, params: object, *leaves: jax.Array) -> dict[str, jax.Array]:
        args, kwargs = jax.tree.unflatten(self._exported.in_tree, leaves)
        found = jax.tree.leaves(self._exported.call(*args, **kwargs))
        return dict(zip(self._outputs, found, strict=True))


def _datatype(name: str, aval: Any) -> str:
    return artifact.datatype_of_aval("input", name, aval).name


def _shape(aval: Any, batch: str | None) -> list[int | str]:
    """Return a shape as an author writes it: -1 for the batch, names for other dynamic sizes."""
    return [
        size if isinstance(size, int) else -1 if not axis and str(size) == batch else str(size)
        for axis, size in enumerate(aval.shape)
    ]
