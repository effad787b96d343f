"""Answers that follow a grammar: JSON of a schema, text of a regular expression, a Lark grammar.

llguidance says which tokens may come next. What a client writes is compiled within limits, and
neither fetched nor executed.
"""

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np

from xlaserve.errors import InvalidModel, InvalidParameter
from xlaserve.language_errors import TextNotInstalled
from xlaserve.tensors import Tensor

_SHOWN_CHARACTERS = 300
_SHOWN_NUMBER = 32
LIMITS: dict[str, Any] = {
    "max_grammar_size": 100_000,
    "initial_lexer_fuel": 100_000,
    "step_lexer_fuel": 20_000,
    "step_max_items": 10_000,
    "max_items_in_row": 1_000,
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}
"""Below llguidance's own, by which a regular expression of nested repetitions took 5.5 s for the
first step; by these 0.3 s. A step goes on in a fraction of a millisecond."""

MOST_MULTIPLE = 10_000
"""The largest `multipleOf`, in units of its last decimal: 101 of 1.01.

llguidance has a state for each remainder, which none of its limits count: 10,000 take 40 ms,
100,000 a second, and 10,000,000 minutes and gigabytes."""

_MULTIPLE = re.compile(r'"multipleOf"\s*:\s*([-+0-9.eE]+)')


class Grammars:
    """Compiles grammars for the tokens of one model. `compile` may be called in any thread."""

    def __init__(self, model: str, tokenizer: str, vocab: int, stop_tokens: Sequence[int]) -> None:
        """Read the text of a tokenizer.json. Blocks: some 15 us for each token.

        A grammar ends with one of `stop_tokens`. Raises InvalidModel and TextNotInstalled.
        """
        try:
            import llguidance
        except ImportError as error:
            raise TextNotInstalled(model, "llguidance") from error
        if not stop_tokens:
            raise InvalidModel("a grammar needs stop tokens, which the model has none of")
        try:
            self._tokenizer = llguidance.LLTokenizer(
                tokenizer, n_vocab=vocab, eos_token=list(stop_tokens)
            )
        except ValueError as error:
            shown = str(error)[:_SHOWN_CHARACTERS]
            raise InvalidModel(f"tokenizer.json: no grammar can use it: {shown}") from error
        self._model = model
        self._matcher = llguidance.LLMatcher
        self._words = -(-vocab // 32)
        self._limits = llguidance.LLParserLimits(**LIMITS)

    def compile(self, parameter: str, text: str) -> "Place":
        """Return the beginning of a grammar. Blocks, without the interpreter's lock.

        `parameter` is the kind of the text: `json_schema`, `regex` or `grammar`, which is one of
        Lark. Raises InvalidParameter.
        """
        readers: dict[str, Any] = {
            "json_schema": self._matcher.grammar_from_json_schema,
            "regex": self._matcher.grammar_from_regex,
            "grammar": self._matcher.grammar_from_lark,
        }
        read = readers[parameter]
        self._check_multiples(parameter, text)
        try:
            matcher = self._matcher(self._tokenizer, read(text), log_level=0, limits=self._limits)
        except ValueError as error:
            raise _refused(parameter, str(error)) from error
        place = Place(parameter, matcher)
        place.check()
        # The first step is the longest: it is not for the thread of the slots.
        place.fill(np.zeros(self._words, np.int32))
        return place

    def _check_multiples(self, parameter: str, text: str) -> None:
        """Raise InvalidParameter for a `multipleOf` that would take too many states."""
        for found in _MULTIPLE.finditer(text):
            if _is_costly(found[1]):
                raise InvalidParameter(
                    parameter,
                    f"a 'multipleOf' of at most {MOST_MULTIPLE} in units of its last decimal "
                    f"(model '{self._model}'): a larger one takes too long to compile; leave it "
                    "out, and check the answer",
                    found[1][:_SHOWN_NUMBER],
                )


class Place:
    """A place in a grammar (a Constraint): what may follow what was taken. One thread calls it."""

    def __init__(self, parameter: str, matcher: Any) -> None:
        self._parameter = parameter
        self._matcher = matcher

    def check(self) -> None:
        """Raise InvalidParameter where nothing can be said any more."""
        if self._matcher.is_error():
            raise _refused(self._parameter, self._matcher.get_error())

    def fill(self, words: Tensor) -> None:
        """Set the bits of the tokens that may come next; raises InvalidParameter."""
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self.check()

    def take(self, token: int) -> bool:
        """Go on behind a token; True where no other may follow. Raises InvalidParameter."""
        self._matcher.consume_token(token)
        self.check()
        return bool(self._matcher.is_stopped())


def _is_costly(number: str) -> bool:
    try:
        found = abs(Decimal(number).normalize())
    except ArithmeticError:
        return False  # no number, or an infinite one: the library says so
    _, digits, exponent = found.as_tuple()
    is_whole = not isinstance(exponent, int) or exponent >= 0
    return (found if is_whole else Decimal((0, digits, 0))) > MOST_MULTIPLE


def _refused(parameter: str, problem: str) -> InvalidParameter:
    line = " ".join(problem.split())[:_SHOWN_CHARACTERS]
    return InvalidParameter(parameter, "one that can be compiled and followed", line)
