"""Constrained decoding: answers that follow a JSON schema, regular expression or Lark grammar.

llguidance computes the allowed tokens. Grammars of clients are never fetched or executed. Each is
first compiled in a subprocess that can be killed, because llguidance's fuel does not limit all
work.
"""

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from xlaserve.errors import InvalidModel, InvalidParameter
from xlaserve.errors.language import TextNotInstalled, TextProcessLost
from xlaserve.language.limited import Limited, Limits, TookTooMuch
from xlaserve.language.text_limits import DEFAULT_TEXT_LIMITS
from xlaserve.tensors import Tensor

_SHOWN_CHARACTERS = 300
LIMITS: dict[str, Any] = {
    "max_grammar_size": 100_000,
    "initial_lexer_fuel": 100_000,
    "step_lexer_fuel": 20_000,
    "step_max_items": 10_000,
    "max_items_in_row": 1_000,
    "verbose_errors": False,
}
"""Lower than llguidance's defaults, with which a regular expression of nested repetitions took 5.5
s for its first step; with these 0.3 s. Later steps take a fraction of a millisecond.
"""

GROWTH = {2_000: 3 << 20, 15_000: 14 << 20, 50_000: 36 << 20}
"""Bytes to charge for the growth of a grammar during an answer, by its limit of lexer states.

llguidance reports no size. Measured growth: 2.4, 13.3 and 34.8 MB."""
MOST_STATES = max(GROWTH)
_TOO_MANY = "too many states"
"""llguidance's error for a grammar that needs more states."""

STEP_SECONDS = 0.002
"""Maximum average CPU time of a step in a grammar, during which other requests wait."""

MOST_STEPS_SECONDS = 0.1
"""CPU time by which all steps of one answer together may exceed `STEP_SECONDS` per step."""

REMAINDERS_PER_SECOND = 2_000_000
"""States of a `multipleOf`, one per remainder, that certainly take more than a second to compile;
about 200,000 compile in that time. Schemas that need more states are refused immediately.
"""

MOST_KNOWN = 1024
"""Number of grammars per model whose compilation results are cached."""

_STEP_NS, _MOST_STEPS_NS = (int(1e9 * one) for one in (STEP_SECONDS, MOST_STEPS_SECONDS))
_EXPECTED = "a grammar that can be compiled and followed (model '{}')"
_PROGRAM = ("-m", "xlaserve.language.grammar_process")


class Grammars:
    """Compiles grammars for one model's tokens; `compile` is thread-safe."""

    def __init__(
        self,
        model: str,
        tokenizer: str,
        vocab: int,
        stop_tokens: Sequence[int],
        limits: Limits = DEFAULT_TEXT_LIMITS.grammar,
    ) -> None:
        """Read the text of a tokenizer.json. Blocks for about 15 us per token.

        Grammars end with one of `stop_tokens`. Raises InvalidModel and TextNotInstalled.
        """
        try:
            import llguidance
        except ImportError as error:
            raise TextNotInstalled(model, "llguidance") from error
        if not stop_tokens:
            raise InvalidModel("a grammar needs stop tokens, but the model has none")
        try:
            self._tokenizer = llguidance.LLTokenizer(
                tokenizer, n_vocab=vocab, eos_token=list(stop_tokens)
            )
        except ValueError as error:
            shown = str(error)[:_SHOWN_CHARACTERS]
            raise InvalidModel(f"tokenizer.json does not support grammars: {shown}") from error
        self._model = model
        self._matcher = llguidance.LLMatcher
        self._words = -(-vocab // 32)
        self._limits = {
            states: llguidance.LLParserLimits(**LIMITS, max_lexer_states=states)
            for states in GROWTH
        }
        made = self._tokenizer
        special = {i: made.decode_str([i]) for i in range(vocab) if made.is_special_token(i)}
        first = {
            "vocab": vocab,
            "special": special,
            "stop": list(stop_tokens),
            "grammar": {**LIMITS, "max_lexer_states": MOST_STATES},
            "most_remainders": int(REMAINDERS_PER_SECOND * limits.cpu_seconds),
        }
        self._trial = Trial(model, Limited(_PROGRAM, limits, first, called="grammar", model=model))

    def begin(self) -> None:
        """Start the subprocess, so that the first grammar need not wait for it. Blocks."""
        self._trial.begin()

    def close(self) -> None:
        """End the subprocess for good."""
        self._trial.close()

    def compile(
        self, parameter: str, text: str, charge: Callable[[int], None] = lambda size: None
    ) -> "Place":
        """Compile a grammar, and return its initial state. Blocks, but releases the GIL.

        `parameter` is `json_schema`, `regex` or `grammar` (Lark). `charge` is called with the
        maximum memory of the grammar in bytes, before any is allocated. Raises InvalidParameter.
        """
        readers: dict[str, Any] = {
            "json_schema": self._matcher.grammar_from_json_schema,
            "regex": self._matcher.grammar_from_regex,
            "grammar": self._matcher.grammar_from_lark,
        }

        def begin(states: int) -> Any:
            limits = self._limits[states]
            return self._matcher(self._tokenizer, grammar, log_level=0, limits=limits)

        first_bytes = self._trial.check(parameter, text)
        charge(first_bytes)
        try:
            grammar = readers[parameter](text)
        except ValueError as error:
            raise _refused(self._model, parameter, str(error)) from error
        sizes = {"first_bytes": first_bytes, "words": self._words}
        return Place(self._model, parameter, begin, charge, **sizes)


class Trial:
    """Compiles grammars in a subprocess to measure their cost, and caches the results."""

    def __init__(self, model: str, process: Limited) -> None:
        self._model = model
        self._process = process
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, tuple[str, str] | int] = OrderedDict()
        """Results by the hash of the grammar, newest last: its size in memory, or the expected and
        got texts of its error.
        """

    def begin(self) -> None:
        """Start the subprocess. Blocks."""
        self._process.begin()

    def close(self) -> None:
        """End the subprocess for good."""
        self._process.close()

    def check(self, parameter: str, text: str) -> int:
        """Return the bytes of a grammar in memory, after its first step. Blocks.

        Raises InvalidParameter if the grammar is invalid or too expensive, and TextProcessLost if
        the subprocess failed.
        """
        try:
            key = hashlib.sha256(f"{parameter}\n{text}".encode()).digest()
        except UnicodeEncodeError:
            got = "half of a surrogate pair"
            raise InvalidParameter(parameter, "text in Unicode", got) from None
        with self._lock:
            found = self._known.pop(key, None)
        if found is None:
            found = self._tried(parameter, text)
        with self._lock:
            self._known[key] = found
            if len(self._known) > MOST_KNOWN:
                self._known.popitem(last=False)
        if not isinstance(found, int):
            raise InvalidParameter(parameter, *found)
        return found

    def _tried(self, parameter: str, text: str) -> tuple[str, str] | int:
        """Return the size of a grammar, or the expected and got texts of its error."""
        asked = {"parameter": parameter, "text": text}
        try:
            try:
                found = self._process.ask(asked)
            except (OSError, TookTooMuch):
                # A fork compiles the grammar, so the grammar is not to blame: retry in a new
                # process.
                found = self._process.ask(asked)
        except (OSError, TookTooMuch) as error:
            raise TextProcessLost(self._model, str(error)) from error
        if "over" in found:
            within = f"{self._process.limits} (model '{self._model}')"
            return (
                f"a grammar that compiles within {within}: use smaller numbers, fewer"
                " alternatives and fewer repetitions",
                found.get("because", "a larger one"),
            )
        if "failed" in found:
            return _EXPECTED.format(self._model), _shown(found["failed"])
        return int(found["bytes"])


class Place:
    """The state of an answer within a grammar (a Constraint). Used by one thread at a time."""

    def __init__(
        self,
        model: str,
        parameter: str,
        begin: Callable[[int], Any],
        charge: Callable[[int], None],
        *,
        first_bytes: int,
        words: int,
    ) -> None:
        """Start a grammar with `begin(states)`, whose first bytes the trial measured.

        Its masks have this many words. Blocks; raises InvalidParameter.
        """
        self._model = model
        self._parameter = parameter
        self._begin = begin
        self._charge = charge
        self._matcher: Any = None
        self._rooms = [
            (states, most_bytes)
            for states, most_bytes in GROWTH.items()
            if most_bytes >= first_bytes or states == MOST_STATES
        ]
        """Limits of states that it may still be given, ascending, each with its charge."""
        self._charged_bytes = 0
        self._taken: list[int] = []
        self._spent_ns = 0
        """CPU time of the steps so far that exceeds their average budget."""
        self._words = words
        self.grow()
        self.check()

    def grow(self) -> None:
        """Start again with the next higher limit of states, and replay the tokens taken. Blocks.

        Not on the generation thread, where every other request would wait: it compiles the grammar,
        and the mask behind that takes longest. For the same reason it is not part of the time that
        the steps of the answer may take. Raises InvalidParameter.
        """
        words = np.zeros(self._words, np.int32)
        try:
            while self._rooms and (self._matcher is None or self._lacks_room()):
                states, most_bytes = self._rooms.pop(0)
                self._charge(most_bytes - self._charged_bytes)
                self._charged_bytes = most_bytes
                self._matcher = None  # not two at a time
                self._matcher = self._begin(states)
                self._matcher.consume_tokens(self._taken)
                self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        except ValueError as error:
            raise _refused(self._model, self._parameter, str(error)) from error

    def _lacks_room(self) -> bool:
        """Tell whether the grammar has reached its limit of states."""
        matcher = self._matcher
        return matcher.is_error() and _TOO_MANY in matcher.get_error()

    @property
    def _is_full(self) -> bool:
        return bool(self._rooms) and self._lacks_room()

    def check(self) -> None:
        """Raise InvalidParameter if the grammar has failed."""
        if self._matcher.is_error():
            raise _refused(self._model, self._parameter, self._matcher.get_error())

    def fill(self, words: Tensor) -> bool:
        """Set the bits of the tokens allowed next; False if the grammar has to `grow` first.

        Raises InvalidParameter.
        """
        if self._is_full:
            return False
        begun_ns = time.thread_time_ns()
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._is_full:
            return False
        self.check()
        spent_ns = self._spent_ns + time.thread_time_ns() - begun_ns - _STEP_NS
        self._spent_ns = max(0, spent_ns)
        if spent_ns > _MOST_STEPS_NS:
            raise InvalidParameter(
                self._parameter,
                f"a grammar whose steps take at most {STEP_SECONDS:g} CPU seconds each, plus"
                f" {MOST_STEPS_SECONDS:g} in total (model '{self._model}'): make it less ambiguous",
                "a slower one",
            )
        return True

    def take(self, token: int) -> bool:
        """Consume a token; return True if no other may follow. Raises InvalidParameter.

        If the grammar has to grow before it is known whether one may, returns False; the next mask
        then has only tokens that end the answer.
        """
        begun_ns = time.thread_time_ns()
        self._taken.append(token)
        self._matcher.consume_token(token)
        self._spent_ns += time.thread_time_ns() - begun_ns
        if self._is_full:
            return False
        self.check()
        return bool(self._matcher.is_stopped())


def _shown(problem: str) -> str:
    return " ".join(problem.split())[:_SHOWN_CHARACTERS]


def _refused(model: str, parameter: str, problem: str) -> InvalidParameter:
    return InvalidParameter(parameter, _EXPECTED.format(model), _shown(problem))
