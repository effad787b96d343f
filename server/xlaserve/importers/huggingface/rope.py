"""Reads rotary position parameters and their scaling from config.json."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from xlaserve.errors import InvalidModel
from xlaserve.importers.huggingface.form import Rope

Frequencies = npt.NDArray[np.float32]
_LEAST, _MOST = 1e-9, 1e12
"""Accepted range of numbers, so that the computation stays finite."""


@dataclass(frozen=True, slots=True)
class _Scaling:
    """The fields and the function of one rope_type."""

    scaled: Callable[["_Rotary"], Rope]
    needed: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()
    """Fields that are lists with a number per rotated pair."""


@dataclass(frozen=True, slots=True)
class _Rotary:
    """The validated rotary parameters of one kind of layer."""

    plain: Frequencies
    """Frequencies before scaling."""
    theta: float
    rotated: int
    """Rotated elements per head."""
    numbers: Mapping[str, float]
    """Required numbers, and the optional ones that are present."""
    flags: Mapping[str, bool]
    lists: Mapping[str, Frequencies]
    most: float
    """Context length of the model."""


def read(config: Mapping[str, object], head_dim: int) -> Rope:
    """Return the rotary parameters that all layers share. Raises InvalidModel.

    transformers 5 writes `rope_parameters`; older releases write `rope_scaling` and `rope_theta`.
    """
    return _rope(*_found(config), head_dim, _most(config))


def read_both(config: Mapping[str, object], head_dim: int) -> tuple[Rope, Rope]:
    """Return the rotary parameters of layers with a window and of others. Raises InvalidModel.

    transformers 5 writes both to `rope_parameters`. Older releases write `rope_local_base_freq` for
    layers with a window, to which `rope_scaling` does not apply.
    """
    stated = config.get("rope_parameters")
    if stated is None:
        local: dict[str, object] = {"rope_theta": config.get("rope_local_base_freq")}
        place = "rope_local_base_freq"
        return _rope(place, local, head_dim, _most(config)), read(config, head_dim)
    kinds = ("sliding_attention", "full_attention")
    both = stated if isinstance(stated, dict) and stated.keys() == set(kinds) else None
    if both is None or not all(isinstance(one, dict) for one in both.values()):
        raise InvalidModel(
            f"config.json: rope_parameters: expected an object for each of {' and '.join(kinds)},"
            " got "
            f"{stated!r:.200}"
        )
    old_fields = sorted({"rope_theta", "rope_scaling", "rope_local_base_freq"} & config.keys())
    if old_fields:
        raise InvalidModel(
            f"config.json: expected either {old_fields[0]} or rope_parameters, got both"
        )
    local_rope, rope = (
        _rope(f"rope_parameters.{k}", both[k], head_dim, _most(config)) for k in kinds
    )
    return local_rope, rope


def _most(config: Mapping[str, object]) -> float:
    return _number(config, "max_position_embeddings", "all layers")


def _rope(place: str, found: Mapping[str, object], head_dim: int, most: float) -> Rope:
    kind = _kind(found)
    scaling = _SCALINGS.get(str(kind))
    if scaling is None:
        raise InvalidModel(
            f"config.json: {place} asks for rope_type '{str(kind)[:100]}', expected one of "
            f"{', '.join(_SCALINGS)}"
        )
    known = {*scaling.needed, *scaling.optional, *scaling.flags, *scaling.lists, *_ALWAYS}
    extra = sorted(found.keys() - known)
    if extra:
        raise InvalidModel(
            f"config.json: {place} of rope_type '{kind}' has unknown fields {extra[:8]}"
        )
    given = [name for name in scaling.optional if found.get(name) is not None]
    numbers = {name: _number(found, name, place) for name in (*scaling.needed, *given)}
    flags = {name: _flag(found, name, place) for name in scaling.flags if name in found}
    theta = _number(found, "rope_theta", place)
    part = _number(found, "partial_rotary_factor", place, 1.0)
    rotated = int(head_dim * part)
    if not 0 < rotated <= head_dim or rotated % 2:
        raise InvalidModel(
            f"config.json: partial_rotary_factor: expected to rotate an even number of the"
            f" {head_dim} elements of a head, got {part}"
        )
    exponents = np.arange(0, rotated, 2, dtype=np.float32) / np.float32(rotated)
    plain = (np.float32(1) / np.power(np.float32(theta), exponents)).astype(np.float32)
    lists = {name: _list(found, name, place, len(plain)) for name in scaling.lists}
    return scaling.scaled(_Rotary(plain, theta, rotated, numbers, flags, lists, most))


def _kind(found: Mapping[str, object]) -> object:
    kind = found.get("rope_type", found.get("type", "default"))
    return "longrope" if kind == "su" else kind  # the first Phi-3 checkpoints call it su


_ALWAYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})


def _found(config: Mapping[str, object]) -> tuple[str, dict[str, object]]:
    place = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    stated = config.get(place)
    if stated is None:
        stated = {}
    if not isinstance(stated, dict):
        raise InvalidModel(f"config.json: {place}: expected an object, got {stated!r:.100}")
    outside = {"rope_theta", "partial_rotary_factor"} & config.keys()
    if _kind(stated) == "longrope":
        outside |= {"original_max_position_embeddings"} & config.keys()
    return place, {**{name: config[name] for name in outside}, **stated}


def _number(
    found: Mapping[str, object], name: str, place: str, default: float | None = None
) -> float:
    value = found.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        expected = "a number above 0"
    elif not _LEAST <= value <= _MOST:
        expected = f"a number from {_LEAST} to {_MOST}"
    else:
        return float(value)
    raise InvalidModel(f"config.json: {name} of {place}: expected {expected}, got {value!r:.100}")


def _flag(found: Mapping[str, object], name: str, place: str) -> bool:
    value = found[name]
    if not isinstance(value, bool):
        raise InvalidModel(
            f"config.json: {name} of {place}: expected true or false, got {value!r:.100}"
        )
    return value


def _list(found: Mapping[str, object], name: str, place: str, size: int) -> Frequencies:
    value = found.get(name)
    if not isinstance(value, list) or len(value) != size:
        got = f"{len(value)}" if isinstance(value, list) else f"{value!r:.100}"
        raise InvalidModel(f"config.json: {name} of {place}: expected {size} numbers, got {got}")
    numbers = [_number({name: one}, name, place) for one in value]
    return np.array(numbers, np.float32)


def _turning(frequencies: Frequencies, scale: float = 1.0) -> Rope:
    return Rope(tuple(map(float, frequencies)), scale)


def _plain(rotary: _Rotary) -> Rope:
    return _turning(rotary.plain)


def _linear(rotary: _Rotary) -> Rope:
    return _turning(rotary.plain / np.float32(rotary.numbers["factor"]))


def _llama3(rotary: _Rotary) -> Rope:
    """Divide low frequencies by the factor, keep high ones, and interpolate between them."""
    plain, numbers = rotary.plain, rotary.numbers
    low, high = numbers["low_freq_factor"], numbers["high_freq_factor"]
    if low >= high:
        raise InvalidModel(f"config.json: low_freq_factor {low} is not below {high}")
    turns = numbers["original_max_position_embeddings"] * plain / np.float32(2 * math.pi)
    kept = np.clip((turns - np.float32(low)) / np.float32(high - low), 0, 1)
    divided = plain / np.float32(numbers["factor"])
    return _turning(((1 - kept) * divided + kept * plain).astype(np.float32))


def _yarn(rotary: _Rotary) -> Rope:
    """Keep high frequencies, divide low ones by the factor, and interpolate linearly between them.

    Queries and keys are scaled as well, which sharpens attention over long contexts.
    """
    numbers, pairs = rotary.numbers, len(rotary.plain)
    fast, slow = numbers.get("beta_fast", 32.0), numbers.get("beta_slow", 1.0)
    if slow >= fast:
        raise InvalidModel(f"config.json: beta_slow {slow} is not below beta_fast {fast}")
    if rotary.theta <= 1:
        raise InvalidModel(f"config.json: rope_theta: expected more than 1, got {rotary.theta}")

    def pair_of(turns: float) -> float:
        """Return the (fractional) index of the pair with this many turns in the original length."""
        length = numbers["original_max_position_embeddings"] / (turns * 2 * math.pi)
        return rotary.rotated * math.log(length) / (2 * math.log(rotary.theta))

    first, last = pair_of(fast), pair_of(slow)
    if rotary.flags.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary.rotated - 1)
    width = np.float32(last - first or 0.001)
    kept = 1 - np.clip((np.arange(pairs, dtype=np.float32) - np.float32(first)) / width, 0, 1)
    divided = rotary.plain / np.float32(numbers["factor"])
    mixed = (divided * (1 - kept) + rotary.plain * kept).astype(np.float32)
    return _turning(mixed, _sharpened(numbers))


def _longrope(rotary: _Rotary) -> Rope:
    """Divide each frequency by its factor from the short or the long list."""
    numbers = rotary.numbers
    original = numbers["original_max_position_embeddings"]
    if original <= 1 or not original.is_integer():
        raise InvalidModel(
            "config.json: original_max_position_embeddings: expected a whole number above 1, got "
            f"{original}"
        )
    grown = max(numbers.get("factor", rotary.most / original), 1.0)
    scale = math.sqrt(1 + math.log(grown) / math.log(original))
    short, long = (rotary.plain / rotary.lists[name] for name in _FACTORS)
    rope = _turning(short, numbers.get("attention_factor", scale))
    return replace(rope, original=int(original), long_frequencies=_turning(long).frequencies)


def _sharpened(numbers: Mapping[str, float]) -> float:
    if "attention_factor" in numbers:
        return numbers["attention_factor"]
    grown = math.log(max(numbers["factor"], 1.0)) / 10
    if "mscale" in numbers and "mscale_all_dim" in numbers:
        return (numbers["mscale"] * grown + 1) / (numbers["mscale_all_dim"] * grown + 1)
    return grown + 1


_FACTORS = ("short_factor", "long_factor")
_OF_LENGTH = ("factor", "original_max_position_embeddings")
_SCALINGS: Mapping[str, _Scaling] = MappingProxyType(
    {
        "default": _Scaling(_plain),
        "linear": _Scaling(_linear, ("factor",)),
        "llama3": _Scaling(_llama3, (*_OF_LENGTH, "low_freq_factor", "high_freq_factor")),
        "yarn": _Scaling(
            _yarn,
            _OF_LENGTH,
            ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow"),
            ("truncate",),
        ),
        "longrope": _Scaling(
            _longrope,
            ("original_max_position_embeddings",),
            ("factor", "attention_factor"),
            lists=_FACTORS,
        ),
    }
)
"""The supported rope_types."""
