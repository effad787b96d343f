"""A plain `jax.export` file: alone, or in a version directory without a manifest."""

from pathlib import Path

import msgspec

from xlaserve.artifact import manifest
from xlaserve.errors import InvalidModel
from xlaserve.files import files
from xlaserve.files.roots import ANYWHERE, Roots

EXPORTED_NAME = "model"
"""Name of every exported function."""

SUFFIX = Path(manifest.ARTIFACT).suffix

NAMES = "names.json"
"""Optional file of array names: `{"inputs": ["image"], "outputs": ["scores"]}`."""

_LIMIT_BYTES = 1 << 20
_OF_EXPORTS = (manifest.FILE_NAME, manifest.STABLEHLO, manifest.WEIGHTS)


class Names(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Names of a function's array arguments and results, in JAX's order."""

    inputs: list[str] | None = None
    """None for the names that its tree gives."""
    outputs: list[str] | None = None


FROM_TREE = Names()


def find(path: Path) -> Path | None:
    """Return the artifact at a path or in its version directory; None for other models.

    In a directory it is `model.jaxexp`, or the only file of that suffix. Beside other files of
    `xlaserve export` it is no model: its parameters are in them.
    """
    if path.is_file():
        return path if path.suffix == SUFFIX else None
    if any((path / name).exists() for name in _OF_EXPORTS):
        return None
    found = sorted(path.glob(f"*{SUFFIX}"))
    named = [file for file in found if file.name == manifest.ARTIFACT] or found
    return named[0] if len(named) == 1 else None


def read_names(directory: Path, roots: Roots = ANYWHERE) -> Names:
    """Return the names that a version declares for its plain file; raises InvalidModel."""
    if not (directory / NAMES).exists():
        return FROM_TREE
    data = files.read_checked(directory, NAMES, limit_bytes=_LIMIT_BYTES, roots=roots)
    try:
        return msgspec.json.decode(data, type=Names)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidModel(f"{NAMES} is not valid: {error}") from error
