"""A model that is one file: a `jax.export` artifact without a manifest and without parameters.

All that is known of it is what the artifact says. There is no hash to check it against: a cut file
is noticed, a flipped bit may go unnoticed, or end the process inside the parser of JAX. That the
rows of a batch do not depend on one another has to be proved, as of any other model.
"""

# Much of jax is typed, but not all that is called here.
# mypy: disallow-untyped-calls=False

from collections.abc import Sequence
from pathlib import Path

import jax
from jax.core import ShapedArray
from jax.export import Exported, is_symbolic_dim

from xlaserve.errors import InvalidModel
from xlaserve.models import artifact, files, placement, shapes, sites
from xlaserve.models.artifact import BATCH_DIMENSION
from xlaserve.models.buckets import DEFAULT_MAX_BATCH_SIZE
from xlaserve.models.config import ModelConfig
from xlaserve.models.device_parameters import DeviceParameters
from xlaserve.models.failures import invalid_model
from xlaserve.models.jax_export import JaxExportModel, compiled
from xlaserve.models.loaded import LoadContext
from xlaserve.models.manifest import MAX_NAME_LENGTH
from xlaserve.models.roots import ANYWHERE, Roots
from xlaserve.models.signature import Signature, agreed
from xlaserve.models.sizes import LIMIT_ARTIFACT_BYTES
from xlaserve.models.version_files import VersionFiles
from xlaserve.tensors import TensorSpec


def load(path: Path, context: LoadContext) -> JaxExportModel:
    """Load, compile and warm an artifact; `jax_runtime.start` comes before the first.

    Raises InvalidModel, OutOfMemory, or what `context.check_cancelled` raises.
    """
    version = read(path, context.config, context.device, context.roots)
    layout = sites.layout(version.placement)
    version.check_layout(layout)
    with invalid_model(context.model, path.name):
        return compiled(version.computation, DeviceParameters(), version.signature, layout, context)


def read(path: Path, config: ModelConfig, platform: str, roots: Roots = ANYWHERE) -> VersionFiles:
    """Read an artifact for a server of this platform; raises InvalidModel."""
    data = files.read_checked(path.parent, path.name, limit_bytes=LIMIT_ARTIFACT_BYTES, roots=roots)
    exported = artifact.deserialize(data, name=path.name)
    wanted = placement.read(config, platform)
    artifact.check_runs(exported, wanted.platform, path.name)
    with invalid_model(path.stem, path.name):
        found = signature_of(exported, path.name, sized=shapes.is_sized(config))
        return VersionFiles(config, agreed(found, config), wanted, artifact.keyed(exported))


def signature_of(exported: Exported, name: str, *, sized: bool = False) -> Signature:
    """Return what an artifact says of its arguments and results; raises InvalidModel.

    It takes arrays, `input_0` and so on, or one dict of arrays, which has their names; it returns
    an array or several, `output_0` and so on, or a dict. There is a batch where all of them have
    the same symbolic first dimension; another one may be symbolic where `sized`, with sizes of a
    configuration.
    """
    args, _ = jax.tree.unflatten(exported.in_tree, range(len(exported.in_avals)))
    given = args[0] if len(args) == 1 and isinstance(args[0], dict) else args
    returned = jax.tree.unflatten(exported.out_tree, range(len(exported.out_avals)))
    batch = _batch(exported)
    return Signature(
        _tensors(name, "input", given, exported.in_avals, batch, sized=sized),
        _tensors(name, "output", returned, exported.out_avals, batch, sized=sized),
        DEFAULT_MAX_BATCH_SIZE if batch else 0,
    )


def _tensors(
    file: str,
    kind: str,
    tree: object,
    avals: Sequence[ShapedArray],
    batch: str | None,
    *,
    sized: bool,
) -> tuple[TensorSpec, ...]:
    if isinstance(tree, dict):
        named = tree
    else:
        arrays = tree if isinstance(tree, tuple | list) else (tree,)
        named = {f"{kind}_{index}": array for index, array in enumerate(arrays)}
    if not named or list(named.values()) != list(range(len(avals))):
        raise InvalidModel(f"{file}: expected arrays, or one dict of arrays, as its {kind}s")
    for name in named:
        if not 0 < len(name) <= MAX_NAME_LENGTH:
            raise InvalidModel(f"{file}: one {kind} has a name of {len(name)} characters")
    return artifact.specs_of(kind, list(named), avals, batch, sized=sized)


def _batch(exported: Exported) -> str | None:
    """Return the name of the dimension that may be the batch; None where inputs have none."""
    first = [aval.shape[0] for aval in exported.in_avals if aval.shape]
    symbols = [str(size) for size in first if is_symbolic_dim(size)]
    # An expression such as 2*b is no batch: its tensor is refused, whatever the name is.
    return next(filter(str.isidentifier, symbols), BATCH_DIMENSION if symbols else None)
