"""Finds a plain `jax.export` file: alone, or in a directory without a manifest."""

from pathlib import Path

import msgspec

from xlaserve.artifact import manifest
from xlaserve.errors import InvalidModel
from xlaserve.files import files
from xlaserve.files.roots import ANYWHERE, Roots

EXPORTED_NAME = "model"
"""Name of the exported function in every artifact that xlaserve writes."""

SUFFIX = Path(manifest.ARTIFACT).suffix

NAMES = "names.json"
"""Optional file with tensor names: `{"inputs": ["image"], "outputs": ["scores"]}`."""

_LIMIT_BYTES = 1 << 20
_OF_EXPORTS = (manifest.FILE_NAME, manifest.STABLEHLO, manifest.WEIGHTS)


class Names(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Names of a function's arguments and results, in JAX's flattened order."""

    inputs: list[str] | None = None
    """Names of the inputs; None derives them from the function's pytrees."""
    outputs: list[str] | None = None


FROM_TREE = Names()


def find(path: Path) -> Path | None:
    """Return the artifact of a version, which is a file or a directory; None for other models.

    In a directory it is `model.jaxexp`, or the only file with that suffix. A directory that also
    has other files of `xlaserve export` is not a plain artifact: the parameters are in those files.
    """
    if path.is_file():
        return path if path.suffix == SUFFIX else None
    if any((path / name).exists() for name in _OF_EXPORTS):
        return None
    found = sorted(path.glob(f"*{SUFFIX}"))
    named = [file for file in found if file.name == manifest.ARTIFACT] or found
    return named[0] if len(named) == 1 else None


def read_names(directory: Path, roots: Roots = ANYWHERE) -> Names:
    """Return the contents of a version's `names.json`, if any; raises InvalidModel."""
    if not (directory / NAMES).exists():
        return FROM_TREE
    data = files.read_checked(directory, NAMES, limit_bytes=_LIMIT_BYTES, roots=roots)
    try:
        return msgspec.json.decode(data, type=Names)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidModel(f"{NAMES} is not valid: {error}") from error
