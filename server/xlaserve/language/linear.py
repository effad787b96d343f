"""Detection of tokenizers that take linear time and memory, by their `tokenizer.json`."""

import base64
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

_WORDS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_NO_WORD = r"[^\r\n\p{L}\p{N}]?"
PATTERNS = frozenset(
    {
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        *(
            rf"{_WORDS}|{_NO_WORD}\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
            for digits in (r"\p{N}{1,3}", r"\p{N}")
        ),
        *(
            rf"{_NO_WORD}{_UPPER}*{_LOWER}+{words}|{_NO_WORD}{_UPPER}+{_LOWER}*{words}|{digits}"
            rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
            for words in ("", f"{_WORDS}?")
            for digits in (r"\p{N}{1,3}", r"\p{N}")
        ),
        r"\p{N}{1,3}",
        r"\p{N}",
        r"\d",
        r"\s+",
        r"\s",
        " {2,}",
        r"\w+|[^\w\s]+",
    }
)
"""Regular expressions of GPT-2, Llama 3, Qwen, GPT-4o and others. They visit each position of a
text only a few times.
"""

_SIGNS = frozenset("\\^$.|?*+()[]{}")
"""Metacharacters of regular expressions."""
_NORMALIZERS = frozenset(
    {
        "BertNormalizer",
        "ByteLevel",
        "Lowercase",
        "NFC",
        "NFD",
        "NFKC",
        "NFKD",
        "Nmt",
        "Prepend",
        "Strip",
        "StripAccents",
    }
)
_PRE_TOKENIZERS = frozenset(
    {
        "BertPreTokenizer",
        "ByteLevel",
        "CharDelimiterSplit",
        "Digits",
        "Metaspace",
        "Punctuation",
        "UnicodeScripts",
        "Whitespace",
        "WhitespaceSplit",
    }
)
MOST_GROWTH = 64
"""Maximum expansion by a normalizer: output bytes per input byte."""
MOST_AROUND_CHARACTERS = 1 << 14
"""Maximum length of a post-processor's JSON. A post-processor adds tokens around a text, possibly
with repetitions."""
MOST_TOKEN_CHARACTERS = 1 << 10
"""Maximum length of the longest token that is tried at each position of a text."""
MOST_WORD_CHARACTERS = 200
"""Maximum length of a word split by WordPiece, whose time may be cubic in the word's length."""


def is_linear(found: Mapping[str, Any]) -> bool:
    """Tell whether a tokenizer is known to be fast for any text.

    Only components in the tables here are; everything else may take arbitrarily long.
    """
    around = json.dumps(found.get("post_processor"))
    try:
        return (
            len(around) <= MOST_AROUND_CHARACTERS
            and math.prod(map(_growth, _parts(found.get("normalizer"), "normalizers")))
            <= MOST_GROWTH
            and all(map(_splits_quickly, _parts(found.get("pre_tokenizer"), "pretokenizers")))
            and _is_quick_model(found.get("model"))
        )
    # The file has an unexpected structure, which the tokenizer library reports.
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, RecursionError):
        return False


def _parts(part: Any, name: str) -> Iterable[Mapping[str, Any]]:
    """Yield the components of a possibly nested sequence."""
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
        return
    for one in part[name]:
        yield from _parts(one, name)


def _growth(part: Mapping[str, Any]) -> float:
    """Return the maximum expansion per input byte; infinity if unknown."""
    kind = part["type"]
    if kind in _NORMALIZERS:
        return 1.0 if len(part.get("prepend", "")) <= MOST_GROWTH else math.inf
    if kind == "Replace":
        pattern, content = part["pattern"], part["content"]
        if _is_quick_pattern(pattern.get("Regex")):
            return float(max(1, len(content.encode())))
        old = len(pattern.get("String", "").encode())
        return max(1.0, len(content.encode()) / old) if old else math.inf
    if kind == "Precompiled":
        written = base64.b64decode(part["precompiled_charsmap"])
        texts = written[4 + int.from_bytes(written[:4], "little") :]
        return 1.0 if max(map(len, texts.split(b"\0"))) <= MOST_GROWTH else math.inf
    return math.inf


def _splits_quickly(part: Mapping[str, Any]) -> bool:
    if part["type"] != "Split":
        return part["type"] in _PRE_TOKENIZERS
    pattern = part["pattern"]
    return bool(pattern.get("String")) or _is_quick_pattern(pattern.get("Regex"))


def _is_quick_pattern(pattern: str | None) -> bool:
    return bool(pattern) and (pattern in PATTERNS or _SIGNS.isdisjoint(pattern or ""))


def _is_quick_model(model: Any) -> bool:
    kind = model.get("type")
    if kind == "WordPiece":
        return bool(model.get("max_input_chars_per_word", 100) <= MOST_WORD_CHARACTERS)
    if kind == "Unigram":
        longest = max((len(token) for token, _ in model["vocab"]), default=0)
        return longest <= MOST_TOKEN_CHARACTERS
    return kind in ("BPE", "WordLevel")
