"""Special tokens that tokenizer files assign a role."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_NAMES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Special tokens by role."""

    bos: int | None
    eos: tuple[int, ...]
    names: Mapping[str, Any]
    """Texts by their names in chat templates, such as `bos_token`."""


def read(
    config: Mapping[str, Any], generation: Mapping[str, Any], id_of: Callable[[str], int | None]
) -> SpecialTokens:
    """Return the special tokens of `tokenizer_config.json` and `generation_config.json`."""
    names: dict[str, Any] = {}
    for name in _NAMES:
        text = _text(config.get(name))
        if text is not None:
            names[name] = text
    bos, eos = (
        found if (found := id_of(names.get(name, ""))) is not None else None
        for name in ("bos_token", "eos_token")
    )
    written = _ids(generation.get("bos_token_id"))
    ends = _ids(generation.get("eos_token_id"))
    if eos is not None and eos not in ends:
        ends = (eos, *ends)
    return SpecialTokens(written[0] if bos is None and written else bos, ends, names)


def _text(value: Any) -> str | None:
    found = value.get("content") if isinstance(value, dict) else value
    return found if isinstance(found, str) else None


def _ids(value: Any) -> tuple[int, ...]:
    listed = value if isinstance(value, list) else [value]
    return tuple(one for one in listed if type(one) is int and one >= 0)
