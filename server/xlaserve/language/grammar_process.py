"""Subprocess that compiles untrusted grammars within limits of time and memory.

Started by `grammars.py`; imports nothing else from the server.
"""

import ctypes
import json
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

import llguidance

from xlaserve.language import confining, multiples

_SPECIAL = b"\xff"
"""llguidance's prefix of special token names."""
_UNSATISFIABLE = "one that no text satisfies, such as a schema whose $ref refers to itself"


class Alphabet:
    """A minimal vocabulary for compiling grammars: single bytes and the model's special tokens.

    The cost of a grammar is in its own states; this vocabulary needs no time to set up.
    """

    def __init__(self, vocab: int, special: Mapping[str, str], stop: Sequence[int]) -> None:
        self.eos_token_id = stop[0]
        self.bos_token_id = None
        self.special_token_ids = [int(id_) for id_ in special]
        names = {int(id_): text.encode() for id_, text in special.items()}
        self._octets = vocab
        # Append a token for each byte to the model's tokens, so that any text can be tokenized.
        octets = (bytes([one]) for one in range(256))
        self.tokens = [*(names.get(id_, b"") for id_ in range(vocab)), *octets]

    def __call__(self, text: bytes) -> list[int]:
        """Return the tokens of a text that a grammar requires."""
        return [self._octets + one for one in text]


class _Allocated(ctypes.Structure):
    """The statistics of glibc's allocator (mallinfo(3)), which wrap at 4 GiB."""

    _fields_ = tuple(
        (name, ctypes.c_uint32)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def _problem(error: str) -> str:
    """Return the message of llguidance's error, without the dump of its parser's state."""
    message = error.partition("\n<")[0]
    return _UNSATISFIABLE if message == "NoExtensionBias" else message


def _too_many(text: str, most: int) -> str | None:
    """Return why a schema is certainly too large to compile, or None."""
    try:
        multiple = multiples.too_large(json.loads(text, parse_float=Decimal), most)
    except (ValueError, RecursionError):
        return None  # llguidance reports the error
    except ArithmeticError:
        return None  # Decimal cannot represent it: compile it within the time limit
    if multiple is None:
        return None
    return f"a multipleOf with more than {most} remainders, {multiple}"


def begin(first: Mapping[str, Any]) -> Callable[[Any], Mapping[str, Any]]:
    """Return a function that compiles a grammar and computes its first step."""
    matcher = llguidance.LLMatcher
    readers: dict[str, Callable[[str], str]] = {
        "json_schema": matcher.grammar_from_json_schema,
        "regex": matcher.grammar_from_regex,
        "grammar": matcher.grammar_from_lark,
    }
    alphabet = Alphabet(first["vocab"], first["special"], first["stop"])
    tokenizer = llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(alphabet), eos_token=first["stop"]
    )
    limits = llguidance.LLParserLimits(**first["grammar"])
    allocated = getattr(ctypes.CDLL(None), "mallinfo", None)  # only in glibc
    if allocated is not None:
        allocated.restype = _Allocated

    def allocated_bytes() -> int:
        if allocated is None:
            return 0
        found = allocated()
        return int(found.uordblks + found.hblkhd)

    def answer(asked: Mapping[str, Any]) -> Mapping[str, Any]:
        if asked["parameter"] == "json_schema":
            large = _too_many(asked["text"], first["most_remainders"])
            if large is not None:
                return {"over": "", "because": large}
        try:
            grammar = readers[asked["parameter"]](asked["text"])
        except ValueError as error:
            return {"failed": str(error)}
        before = allocated_bytes()
        made = matcher(tokenizer, grammar, log_level=0, limits=limits)
        if not made.is_error():
            made.compute_bitmask()
        if made.is_error():
            return {"failed": _problem(made.get_error())}
        made_bytes = (allocated_bytes() - before) % (1 << 32)
        # A negative difference is meaningless; the text is stored in any case.
        is_size = made_bytes < 1 << 31
        return {"text": "", "bytes": max(len(asked["text"]), made_bytes if is_size else 0)}

    return answer


if __name__ == "__main__":
    confining.serve(begin)
