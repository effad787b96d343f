"""Single-file models: a `jax.export` artifact without a manifest or parameters.

The artifact is the only source of information, and there is no hash to check it against: a
truncated file is detected, but a flipped bit may go unnoticed or crash JAX's parser. As for other
models, the server must prove that the rows of a batch are independent.
"""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Callable
from pathlib import Path

import jax
from jax.export import Exported, is_symbolic_dim

from xlaserve.artifact import artifact, plain_artifact, shapes, trees
from xlaserve.artifact.artifact import BATCH_DIMENSION
from xlaserve.artifact.manifest import FILE_NAME as MANIFEST
from xlaserve.artifact.plain_artifact import EXPORTED_NAME, Names
from xlaserve.artifact.signature import Signature, agreed
from xlaserve.artifact.sizes import LIMIT_ARTIFACT_BYTES
from xlaserve.errors import InvalidModel
from xlaserve.files import files
from xlaserve.files.roots import ANYWHERE, Roots
from xlaserve.model_config.buckets import DEFAULT_MAX_BATCH_SIZE
from xlaserve.model_config.config import ModelConfig
from xlaserve.runtime.devices import placement, sites
from xlaserve.runtime.devices.device_parameters import DeviceParameters
from xlaserve.runtime.exported.jax_export import JaxExportModel, compiled
from xlaserve.runtime.exported.version_files import VersionFiles
from xlaserve.runtime.failures import invalid_model
from xlaserve.runtime.load_context import LoadContext


def load(path: Path, context: LoadContext) -> JaxExportModel:
    """Load, compile and warm a single-file model. Call `jax_runtime.start` first.

    Raises InvalidModel, OutOfMemory, or the exception of `context.check_cancelled`.
    """
    version = read(path, context.config, context.device, context.roots)
    layout = sites.layout(version.placement)
    version.check_layout(layout)
    with invalid_model(context.model, path.name):
        return compiled(version.computation, DeviceParameters(), version.signature, layout, context)


def read(path: Path, config: ModelConfig, platform: str, roots: Roots = ANYWHERE) -> VersionFiles:
    """Read an artifact, or the artifact in a version directory, for this platform.

    Raises InvalidModel.
    """
    names = plain_artifact.FROM_TREE
    if path.is_dir():
        names = plain_artifact.read_names(path, roots)
    file = plain_artifact.find(path)
    if file is None:
        raise InvalidModel(f"expected one *{plain_artifact.SUFFIX} in '{path.name}'")
    exported = read_file(file, roots)
    wanted = placement.read(config, platform)
    artifact.check_runs(exported, wanted.platform, file.name)
    with invalid_model(path.stem, file.name):
        found = signature_of(exported, file.name, names, sized=shapes.is_sized(config))
        return VersionFiles(config, agreed(found, config), wanted, artifact.keyed(exported))


def read_file(path: Path, roots: Roots = ANYWHERE) -> Exported:
    """Read a `jax.export` file without unknown calls; raises InvalidModel."""
    limit = LIMIT_ARTIFACT_BYTES
    data = files.read_checked(path.parent, path.name, limit_bytes=limit, roots=roots)
    return artifact.deserialize(data, name=path.name)


def signature_of(
    exported: Exported, name: str, names: Names = plain_artifact.FROM_TREE, *, sized: bool = False
) -> Signature:
    """Derive the signature from an artifact's arguments and results; raises InvalidModel.

    Tensors are named by `names`, or by their paths in the argument trees. There is a batch if all
    arrays have the same symbolic first dimension. With `sized`, other dimensions may be symbolic,
    with the sizes from a configuration.
    """
    _check_no_parameters(exported, name)
    batch = batch_of(exported)
    inputs, outputs = tensor_names(exported, name, names)
    return Signature(
        artifact.specs_of("input", inputs, exported.in_avals, batch, sized=sized),
        artifact.specs_of("output", outputs, exported.out_avals, batch, sized=sized),
        DEFAULT_MAX_BATCH_SIZE if batch else 0,
    )


def tensor_names(exported: Exported, file: str, names: Names) -> tuple[list[str], list[str]]:
    """Return the names of the inputs and the outputs; raises InvalidModel."""
    return (
        _named(file, "input", names.inputs, lambda: trees.names_of_arguments(exported.in_tree)),
        _named(file, "output", names.outputs, lambda: trees.names_of_results(exported.out_tree)),
    )


def _named(
    file: str, kind: str, given: list[str] | None, of_tree: Callable[[], list[str]]
) -> list[str]:
    try:
        found = of_tree()
        if given is None:
            return found
        trees.check_names(kind, given)
    except InvalidModel as error:
        raise InvalidModel(f"{file}: {error}") from error
    if len(given) != len(found):
        raise InvalidModel(
            f"{file}: expected the names of {len(found)} {kind}s, {', '.join(found)} in this"
            f" order, got {', '.join(given)}"
        )
    return given


def _check_no_parameters(exported: Exported, file: str) -> None:
    """Raise InvalidModel for the computation of an `xlaserve export` without its parameters."""
    arguments = jax.tree.unflatten(exported.in_tree, range(len(exported.in_avals)))
    match arguments:
        case (([*_], [*_]), {}) if exported.fun_name == EXPORTED_NAME and not arguments[1]:
            raise InvalidModel(
                f"{file} was written by `xlaserve export` with its parameters in other files: copy"
                f" the whole version directory, with {MANIFEST}"
            )


def batch_of(exported: Exported) -> str | None:
    """Return the name of the batch dimension, or None if the inputs have none."""
    first = [aval.shape[0] for aval in exported.in_avals if aval.shape]
    symbols = [str(size) for size in first if is_symbolic_dim(size)]
    # An expression such as 2*b is not a batch dimension; the signature refuses its tensor.
    return next(filter(str.isidentifier, symbols), BATCH_DIMENSION if symbols else None)
