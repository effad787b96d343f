"""The process that tries grammars: what compiling one takes of time and memory ends here.

Started by `grammars.py` as a script of its own, which needs nothing of the server.
"""

import ctypes
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llguidance

if TYPE_CHECKING:
    from xlaserve.language import confining, multiples
else:
    sys.path.append(str(Path(__file__).parent))
    import confining
    import multiples

_SPECIAL = b"\xff"
"""What llguidance puts before the name of a special token."""
_UNSATISFIABLE = "one that no text satisfies, such as a schema whose $ref refers to itself"


class Alphabet:
    """The tokens of a model as far as a grammar names them: bytes, and special ones by id.

    What a grammar costs lies in its own states, and these take no time to begin with.
    """

    def __init__(self, vocab: int, special: Mapping[str, str], stop: Sequence[int]) -> None:
        self.eos_token_id = stop[0]
        self.bos_token_id = None
        self.special_token_ids = [int(id_) for id_ in special]
        names = {int(id_): text.encode() for id_, text in special.items()}
        self._octets = vocab
        # Bytes behind all others: what lacks a token for one of them is refused by the server.
        octets = (bytes([one]) for one in range(256))
        self.tokens = [*(names.get(id_, b"") for id_ in range(vocab)), *octets]

    def __call__(self, text: bytes) -> list[int]:
        """Return the tokens of what a grammar leaves no choice about."""
        return [self._octets + one for one in text]


class _Allocated(ctypes.Structure):
    """The statistics of glibc's allocator, whose numbers begin again at 4 GiB (mallinfo(3))."""

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
    """Return what of a schema is too large to compile, where that can be read off."""
    try:
        multiple = multiples.too_large(json.loads(text, parse_float=Decimal), most)
    except (ValueError, RecursionError):
        return None  # the library has the last word
    except ArithmeticError:
        return None  # a number that Decimal does not have, which takes what time there is
    if multiple is None:
        return None
    return f"a multipleOf with more than {most} remainders, {multiple}"


def begin(first: Mapping[str, Any]) -> Callable[[Any], Mapping[str, Any]]:
    """Return what compiles a grammar, and makes the first step of it, for the tokens of a model."""
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
    allocated = getattr(ctypes.CDLL(None), "mallinfo", None)  # glibc alone has it
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
        # Less than before is no size, and the text itself is held in any case.
        is_size = made_bytes < 1 << 31
        return {"text": "", "bytes": max(len(asked["text"]), made_bytes if is_size else 0)}

    return answer


if __name__ == "__main__":
    confining.serve(begin)
