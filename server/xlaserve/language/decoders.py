"""Decoders of `tokenizer.json`, which convert tokens to text or bytes."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

from xlaserve.errors import InvalidModel

_FILE = "tokenizer.json"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

Piece: TypeAlias = str | bytes
"""Text, or bytes that may be an incomplete character."""

Step: TypeAlias = Callable[[Piece, bool], Piece]
"""Converts a token; the second argument says whether it is the first token of the text."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """Converts each token of a tokenizer separately, for streaming.

    The result is text, or bytes that must be concatenated with the neighboring ones.
    """

    steps: Sequence[Step]
    stripped: tuple[str, int] = ("", 0)
    """A character, and how many of it to strip from the start of the text."""
    word_end: str = ""
    """Suffix of tokens that end a word; empty if there is none."""
    keeps_runs: bool = False
    """Whether bytes come from byte tokens only (byte fallback): each invalid byte is replaced
    separately, and text tokens end a run of bytes.
    """

    def piece(self, token: str, *, is_first: bool) -> Piece:
        """Return the text or bytes of a token."""
        piece: Piece = token
        for step in self.steps:
            piece = step(piece, is_first)
        return piece


def read(found: Any) -> Decoder:
    """Return the decoder described in a `tokenizer.json`; raises InvalidModel.

    Refuses decoders that need the whole text, which cannot stream.
    """
    if found is None:
        return Decoder((_spaced,))
    parts = list(_flat(found, 0))
    kinds = [_kind(part) for part in parts]
    last = {kind: index for index, kind in enumerate(kinds)}
    joined = min((last[kind] for kind in ("Fuse", "ByteLevel") if kind in last), default=len(kinds))
    steps: list[Step] = []
    stripped, word_end = ("", 0), ""
    for index, part in enumerate(parts):
        kind = kinds[index]
        if kind == "Strip":
            stripped = _stripped(part, is_whole=index > joined)
        elif kind == "BPEDecoder" and len(parts) == 1:
            word_end = str(part.get("suffix") or "</w>")
        elif kind in _STEPS and index <= joined:
            steps += _STEPS[kind](part)
        elif kind != "Fuse":
            raise _unknown(kind)
    return Decoder(tuple(steps), stripped, word_end, "ByteFallback" in last)


def _flat(part: Any, depth: int) -> Iterator[Mapping[str, Any]]:
    if not isinstance(part, dict) or depth > 8:
        raise InvalidModel(f"{_FILE}: expected a decoder as an object, got {type(part).__name__}")
    if part.get("type") != "Sequence":
        yield part
        return
    inner = part.get("decoders")
    for one in inner if isinstance(inner, list) else [inner]:
        yield from _flat(one, depth + 1)


def _kind(part: Mapping[str, Any]) -> str:
    return str(part.get("type"))[:64]


def _unknown(kind: str) -> InvalidModel:
    known = ", ".join((*_STEPS, "BPEDecoder", "Fuse", "Strip", "Sequence"))
    return InvalidModel(f"{_FILE}: expected a streaming decoder, one of {known}, got '{kind}'")


def _stripped(part: Mapping[str, Any], *, is_whole: bool) -> tuple[str, int]:
    content, start = part.get("content"), part.get("start")
    is_valid = isinstance(content, str) and len(content) == 1 and isinstance(start, int)
    if not is_valid or part.get("stop") or not is_whole:
        raise _unknown("a Strip elsewhere than at the start")
    return str(content), int(start or 0)


# --- decoder steps --------------------------------------------------------------------------------


def _spaced(piece: Piece, is_first: bool) -> Piece:
    """Separate tokens by spaces, the default without a decoder."""
    return piece if is_first or isinstance(piece, bytes) else f" {piece}"


def _replace(part: Mapping[str, Any]) -> list[Step]:
    pattern, content = part.get("pattern"), part.get("content")
    old = pattern.get("String") if isinstance(pattern, dict) else None
    if not isinstance(old, str) or not old or not isinstance(content, str):
        raise _unknown("a Replace of a pattern that is not a string")

    def step(piece: Piece, is_first: bool) -> Piece:
        return piece.replace(old, content) if isinstance(piece, str) else piece

    return [step]


def _byte_fallback(_: Mapping[str, Any]) -> list[Step]:
    def step(piece: Piece, is_first: bool) -> Piece:
        found = _BYTE_TOKEN.fullmatch(piece) if isinstance(piece, str) else None
        return piece if found is None else bytes.fromhex(found[1])

    return [step]


def _metaspace(part: Mapping[str, Any]) -> list[Step]:
    mark = part.get("replacement") or "▁"
    prepends = part.get("prepend_scheme", "always") != "never"
    if "prepend_scheme" not in part:
        prepends = bool(part.get("add_prefix_space", True))

    def step(piece: Piece, is_first: bool) -> Piece:
        assert isinstance(piece, str)
        return piece.replace(mark, "" if is_first and prepends else " ")

    return [step]


_CONTRACTIONS = (
    *((f" {mark}", mark) for mark in (".", "?", "!", ",")),
    (" ' ", "'"),
    *((f" {end}", end) for end in ("n't", "'m")),
    (" do not", " don't"),
    *((f" {end}", end) for end in ("'s", "'ve", "'re")),
)
"""Replacements made by the cleanup of WordPiece."""


def _word_piece(part: Mapping[str, Any]) -> list[Step]:
    prefix, cleans = str(part.get("prefix", "##")), part.get("cleanup", True)

    def step(piece: Piece, is_first: bool) -> Piece:
        assert isinstance(piece, str)
        if not is_first:
            piece = piece[len(prefix) :] if piece.startswith(prefix) else f" {piece}"
        if cleans:
            for old, new in _CONTRACTIONS:
                piece = piece.replace(old, new)
        return piece

    return [step]


def _byte_characters() -> Mapping[str, int]:
    """Return the byte for each character of byte-level tokens, as in GPT-2.

    Printable Latin-1 characters stand for themselves; the other bytes are mapped from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    found = {chr(byte): byte for byte in printable}
    return MappingProxyType(found | {chr(256 + n): byte for n, byte in enumerate(others)})


_BYTES = _byte_characters()


def _byte_level(_: Mapping[str, Any]) -> list[Step]:
    def step(piece: Piece, is_first: bool) -> Piece:
        assert isinstance(piece, str)
        try:
            return bytes([_BYTES[letter] for letter in piece])
        except KeyError:
            # An added token, which is plain text.
            return piece.encode()

    return [step]


_STEPS: Mapping[str, Callable[[Mapping[str, Any]], list[Step]]] = MappingProxyType(
    {
        "Replace": _replace,
        "ByteFallback": _byte_fallback,
        "Metaspace": _metaspace,
        "WordPiece": _word_piece,
        "ByteLevel": _byte_level,
    }
)
