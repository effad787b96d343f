"""Reads config.json of a Hugging Face model; unknown keys are errors."""

import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path

import msgspec

from xlaserve.errors import InvalidModel
from xlaserve.files import files

CONFIG = "config.json"
_MAX_BYTES = 1 << 20
_MOST = 1 << 31


def read(directory: Path) -> dict[str, object]:
    """Return the decoded config.json of a directory; raises InvalidModel."""
    with files.opened(directory, CONFIG, limit_bytes=_MAX_BYTES) as (file, _):
        text = file.read(_MAX_BYTES)
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except msgspec.MsgspecError as error:
        raise InvalidModel(f"{CONFIG}: expected an object: {error}") from error


def check_keys(
    config: Mapping[str, object],
    known: AbstractSet[str],
    only: Mapping[str, tuple[object, ...]],
    unused: AbstractSet[str] = frozenset(),
) -> None:
    """Raise InvalidModel for an unknown key, and for a value that `only` does not allow.

    Keys in `unused` may have any value.
    """
    unknown = sorted(config.keys() - known - only.keys())
    if unknown:
        shown = ", ".join(f"'{name[:100]}'" for name in unknown[:8])
        raise InvalidModel(f"{CONFIG}: {shown} is not supported and may change the computation")
    for name, allowed in only.items():
        if name in config and config[name] not in allowed and name not in unused:
            raise refused(name, f"{allowed[0]}", config[name])


def size(
    config: Mapping[str, object],
    name: str,
    default: int | None = None,
    *,
    least: int = 1,
    most: int = _MOST,
) -> int:
    """Return the integer value of a key; raises InvalidModel if it is out of bounds."""
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise refused(name, f"a whole number from {least} to {most}", value)
    return value


def positive(config: Mapping[str, object], name: str) -> float:
    """Return the value of a key, a number above 0; raises InvalidModel for others."""
    value = config.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
        return float(value)
    raise refused(name, "a number above 0", value)


def one_of(config: Mapping[str, object], name: str, known: Mapping[str, str]) -> str:
    """Look up the value of a key in `known`; raises InvalidModel for other values."""
    found = known.get(str(config.get(name)))
    if found is None:
        raise refused(name, f"one of {', '.join(known)}", config.get(name))
    return found


def refused(name: str, expected: str, got: object) -> InvalidModel:
    """Return the error for a key with an unsupported value."""
    return InvalidModel(f"{CONFIG}: {name}: expected {expected}, got {got!r:.200}")
