"""Generation parameters of a request: sampling, stopping and grammars."""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from xlaserve.errors import InvalidParameter
from xlaserve.generation.constraint import GRAMMARS, Grammar
from xlaserve.runtime.generator.info import GenerationInfo
from xlaserve.tensors import Parameter

MOST_LOGPROBS = 20
"""Maximum number of most likely tokens returned with each token (logprobs)."""
MOST_GRAMMAR_CHARACTERS = 1 << 16
"""Maximum length of a grammar, in characters."""

_SHOWN_CHARACTERS = 64
_MOST_LISTED = 1024
_MOST_SEED = (1 << 63) - 1
_WORD = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class GenerationParameters:
    """Validated generation parameters of one request."""

    max_tokens: int
    min_tokens: int
    seed: int
    top_k: int
    reals: tuple[float, ...]
    """Real-valued parameters, in the order of `sampling.REALS`."""
    logprobs: int
    stops: frozenset[int]
    bias: Mapping[int, float]
    grammar: Grammar | None = None

    @property
    def seed_words(self) -> tuple[int, int]:
        """Return the seed as two int32 words of a random key."""
        high, low = self.seed >> 32, self.seed & _WORD
        return high, low - (1 << 32) if low >> 31 else low


@dataclass(frozen=True, slots=True)
class _Row:
    expected: str
    fits: Callable[[Parameter], bool]
    default: Parameter


def _whole(least: int, most: int, default: int) -> _Row:
    def fits(value: Parameter) -> bool:
        return type(value) is int and least <= value <= most

    return _Row(f"an integer of {least} to {most}", fits, default)


def _real(least: float, most: float, default: float, *, above: bool = False) -> _Row:
    def fits(value: Parameter) -> bool:
        is_number = type(value) in (int, float)
        return is_number and least <= value <= most and not (above and value == least)  # type: ignore[operator]

    begin = "more than" if above else "a number of"
    return _Row(f"{begin} {least:g}{', at most' if above else ' to'} {most:g}", fits, default)


_TEXT = _Row("comma-separated numbers", lambda value: isinstance(value, str), "")
_MOST = (1 << 31) - 1

_ROWS: Mapping[str, _Row] = MappingProxyType(
    {
        "max_tokens": _whole(1, _MOST, _MOST),
        "min_tokens": _whole(0, _MOST, 0),
        "temperature": _real(0, 100, 0.0),
        "top_k": _whole(0, _MOST, 0),
        "top_p": _real(0, 1, 1.0, above=True),
        "min_p": _real(0, 1, 0.0),
        "repetition_penalty": _real(0, 100, 1.0, above=True),
        "presence_penalty": _real(-100, 100, 0.0),
        "frequency_penalty": _real(-100, 100, 0.0),
        "seed": _whole(0, _MOST_SEED, -1),
        "logprobs": _whole(0, MOST_LOGPROBS, 0),
        "stop_token_ids": _TEXT,
        "ignore_eos": _Row("true or false", lambda value: isinstance(value, bool), False),
        "logit_bias": _TEXT,
        **dict.fromkeys(
            GRAMMARS,
            _Row(
                f"a text of at most {MOST_GRAMMAR_CHARACTERS} characters",
                lambda value: isinstance(value, str) and len(value) <= MOST_GRAMMAR_CHARACTERS,
                "",
            ),
        ),
    }
)
"""Known parameters of a request; unknown ones are ignored."""

_REALS = (
    *("temperature", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)

_Parameters: TypeAlias = Mapping[str, Parameter]


def read(parameters: _Parameters, info: GenerationInfo) -> GenerationParameters:
    """Validate the generation parameters of a request; raises InvalidParameter.

    A request without a seed gets a random one.
    """
    found = {name: _checked(name, row, parameters) for name, row in _ROWS.items()}
    whole = {name: value for name, value in found.items() if isinstance(value, int)}
    seed = whole["seed"] if whole["seed"] >= 0 else secrets.randbits(63)
    stops = _tokens("stop_token_ids", str(found["stop_token_ids"]), info.vocab)
    if not found["ignore_eos"]:
        stops |= set(info.stop_tokens)
    return GenerationParameters(
        whole["max_tokens"],
        whole["min_tokens"],
        seed,
        min(whole["top_k"], info.vocab),
        tuple(float(found[name]) for name in _REALS),
        min(whole["logprobs"], info.vocab),
        frozenset(stops),
        _bias(str(found["logit_bias"]), info.vocab),
        _grammar(found),
    )


def _grammar(found: _Parameters) -> Grammar | None:
    """Return the requested grammar or None; refuse parameters that contradict it."""
    given = [Grammar(name, str(found[name])) for name in GRAMMARS if found[name]]
    if not given:
        return None
    if len(given) > 1:
        raise InvalidParameter(given[1].parameter, f"none beside '{given[0].parameter}'", "one")
    for name in ("min_tokens", "ignore_eos"):
        if found[name]:
            raise InvalidParameter(name, f"none beside '{given[0].parameter}'", str(found[name]))
    return given[0]


def _checked(name: str, row: _Row, parameters: _Parameters) -> Parameter:
    value = parameters.get(name)
    if value is None:
        return row.default
    if not row.fits(value):
        raise InvalidParameter(name, row.expected, str(value)[:_SHOWN_CHARACTERS])
    return value


def _listed(name: str, text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    if len(parts) > _MOST_LISTED:
        raise InvalidParameter(name, f"at most {_MOST_LISTED} entries", str(len(parts)))
    return parts


def _token(name: str, text: str, vocab: int) -> int:
    # Check the length first: int() is slow for very long digit strings.
    token = int(text) if text.isascii() and text.isdigit() and len(text) <= len(str(vocab)) else -1
    if not 0 <= token < vocab:
        raise InvalidParameter(name, f"token ids of 0 to {vocab - 1}", text[:_SHOWN_CHARACTERS])
    return token


def _tokens(name: str, text: str, vocab: int) -> set[int]:
    return {_token(name, part, vocab) for part in _listed(name, text)}


def _bias(text: str, vocab: int) -> Mapping[int, float]:
    found: dict[int, float] = {}
    for part in _listed("logit_bias", text):
        token, _, written = part.partition(":")
        try:
            bias = float(written)
        except ValueError:
            bias = float("nan")
        if not -100 <= bias <= 100:
            got = part[:_SHOWN_CHARACTERS]
            raise InvalidParameter("logit_bias", "id:bias with a bias of -100 to 100", got)
        found[_token("logit_bias", token.strip(), vocab)] = bias
    return found
