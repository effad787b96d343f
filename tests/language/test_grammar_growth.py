"""What a grammar adds while it is followed, beside what is charged for it."""

import ctypes
import json
import string
from collections.abc import Mapping
from itertools import product
from random import Random
from typing import Any

import llguidance
import numpy as np
import pytest

from xlaserve.language.grammar_process import Alphabet
from xlaserve.language.grammars import GROWTH, LIMITS

STOP = 0
STEPS = 4000
LETTERS = string.ascii_lowercase


class _Allocated(ctypes.Structure):
    """The statistics of glibc's allocator (mallinfo2(3))."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def allocated_bytes() -> int:
    found = ctypes.CDLL(None).mallinfo2
    found.restype = _Allocated
    told = found()
    return int(told.uordblks + told.hblkhd)


class Octets(Alphabet):
    """A token for each byte, behind the one that stops."""

    def __init__(self) -> None:
        super().__init__(1, {str(STOP): "</s>"}, [STOP])

    def __call__(self, text: bytes) -> list[int]:
        return [1 + one for one in text]


def _ends(count: int, middle: int) -> str:
    """Return words that end by one of many beginnings, each of which is a state with others."""
    pairs = list(product(LETTERS, LETTERS))[:count]
    return "|".join(f"[a-z]*{a}{b}[a-z]{{{middle}}}{a}" for a, b in pairs)


GROWING: Mapping[str, tuple[str, str]] = {
    "a large multiple": (json.dumps({"type": "integer", "multipleOf": 9973}), "0123456789"),
    "one of two letters, then some": ("[ab]*a[ab]{15}", "ab"),
    "26 ends": (_ends(26, 10), LETTERS),
    "300 ends": (_ends(300, 2), LETTERS),
    "676 ends": (_ends(676, 1), LETTERS),
}
"""What takes many states: its text, and the letters of an answer."""


@pytest.mark.parametrize("name", GROWING)
@pytest.mark.parametrize("states", GROWTH)
def test_no_grammar_adds_more_than_its_states_are_charged_with(name: str, states: int) -> None:
    text, letters = GROWING[name]
    matchers: Any = llguidance.LLMatcher
    is_schema = text.startswith("{")
    read = matchers.grammar_from_json_schema if is_schema else matchers.grammar_from_regex
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Octets()), eos_token=[STOP])
    limits = llguidance.LLParserLimits(**LIMITS, max_lexer_states=states)
    matcher = matchers(tokenizer, read(text), log_level=0, limits=limits)
    words = np.zeros(-(-tokenizer.vocab_size // 32), np.int32)
    matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    assert not matcher.is_error()
    first = most = allocated_bytes()
    random, wanted = Random(1), [1 + ord(one) for one in letters]
    for _ in range(STEPS):
        allowed = np.unpackbits(words.view(np.uint8), bitorder="little")
        matcher.consume_token(random.choice([one for one in wanted if allowed[one]]))
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if matcher.is_error():
            break
        most = max(most, allocated_bytes())

    assert 0 < most - first <= GROWTH[states]
