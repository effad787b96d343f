"""Answers that follow a grammar: a JSON schema, a regular expression or Lark.

llguidance says which tokens may come next. What a client writes is neither fetched nor executed,
and a process of its own compiles it first, which ends where that takes too much: the fuel of the
library does not cover all of it.
"""

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
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
"""Below llguidance's own, by which a regular expression of nested repetitions took 5.5 s for the
first step; by these 0.3 s. A step goes on in a fraction of a millisecond."""

GROWTH = {2_000: 3 << 20, 15_000: 14 << 20, 50_000: 36 << 20}
"""The most bytes that the steps of an answer add to its grammar, by the states that it may have.

Measured, since llguidance tells no size: 2.4, 13.3 and 34.8 MB. The table is a state's transitions,
and each state may have expressions of its own."""
MOST_STATES = max(GROWTH)
_TOO_MANY = "too many states"
"""What llguidance says of a grammar that needs more."""

STEP_SECONDS = 0.002
"""What a step in a grammar may take of the processor, on average: others wait for it."""

MOST_STEPS_SECONDS = 0.1
"""What the steps of one answer may take beyond that."""

REMAINDERS_PER_SECOND = 2_000_000
"""States of a `multipleOf`, one for each remainder, that no processor compiles in a second: some
200,000 are. What needs more is refused before it is compiled."""

MOST_KNOWN = 1024
"""Grammars of a model of which is remembered whether they may be compiled."""

_STEP_NS, _MOST_STEPS_NS = (int(1e9 * one) for one in (STEP_SECONDS, MOST_STEPS_SECONDS))
_EXPECTED = "one that can be compiled and followed (model '{}')"
_SCRIPT = Path(__file__).with_name("grammar_process.py")


class Grammars:
    """Compiles grammars for the tokens of one model. `compile` may be called in any thread."""

    def __init__(
        self,
        model: str,
        tokenizer: str,
        vocab: int,
        stop_tokens: Sequence[int],
        limits: Limits = DEFAULT_TEXT_LIMITS.grammar,
    ) -> None:
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
        self._trial = Trial(model, Limited(_SCRIPT, limits, first, called="grammar", model=model))

    def begin(self) -> None:
        """Start the process that tries grammars, so that the first one need not wait. Blocks."""
        self._trial.begin()

    def close(self) -> None:
        """End the process that tries grammars, for good."""
        self._trial.close()

    def compile(
        self, parameter: str, text: str, charge: Callable[[int], None] = lambda size: None
    ) -> "Place":
        """Return the beginning of a grammar. Blocks, without the interpreter's lock.

        `parameter` is the kind of the text: `json_schema`, `regex` or `grammar`, which is one of
        Lark. `charge` is told the bytes that it may have before there is one, and of more before
        it has more, in the thread of its steps. Raises InvalidParameter.
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
            place = Place(self._model, parameter, begin, charge, first_bytes)
        except ValueError as error:
            raise _refused(self._model, parameter, str(error)) from error
        # The first step is the longest: it is not for the thread of the slots.
        place.fill(np.zeros(self._words, np.int32))
        return place


class Trial:
    """Finds out what compiling a grammar takes, where that can be ended."""

    def __init__(self, model: str, process: Limited) -> None:
        self._model = model
        self._process = process
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, tuple[str, str] | int] = OrderedDict()
        """Results by the digest of a grammar, the newest last: its bytes if it can be compiled,
        else what was expected and what came."""

    def begin(self) -> None:
        """Start the process. Blocks."""
        self._process.begin()

    def close(self) -> None:
        """End the process for good."""
        self._process.close()

    def check(self, parameter: str, text: str) -> int:
        """Return the bytes of a grammar behind its first step. Blocks.

        Raises InvalidParameter for one that takes too much, or is none, and TextProcessLost where
        nothing could be found out.
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
        """Return what is expected and what came, the bytes of a grammar that can be compiled."""
        asked = {"parameter": parameter, "text": text}
        try:
            try:
                found = self._process.ask(asked)
            except (OSError, TookTooMuch):
                # No fault of the grammar, which a process of its own tries: another is started.
                found = self._process.ask(asked)
        except (OSError, TookTooMuch) as error:
            raise TextProcessLost(self._model, str(error)) from error
        if "over" in found:
            within = f"{self._process.limits} (model '{self._model}')"
            return (
                f"one that is compiled within {within}: a simpler one, with smaller numbers, "
                "fewer alternatives, and fewer repetitions",
                found.get("because", "one that takes more"),
            )
        if "failed" in found:
            return _EXPECTED.format(self._model), _shown(found["failed"])
        return int(found["bytes"])


class Place:
    """A place in a grammar (a Constraint): what may follow what was taken. One thread calls it."""

    def __init__(
        self,
        model: str,
        parameter: str,
        begin: Callable[[int], Any],
        charge: Callable[[int], None],
        first_bytes: int,
    ) -> None:
        """`begin` returns the beginning of the grammar for so many states.

        Raises ValueError, and InvalidParameter where it has failed.
        """
        self._model = model
        self._parameter = parameter
        self._begin = begin
        self._charge = charge
        self._matcher: Any = None
        self._rooms = iter(GROWTH.items())
        self._charged_bytes = 0
        self._taken: list[int] = []
        self._spent_ns = 0
        """Of the processor, by the steps so far, beyond what each may take."""
        self._enter(first_bytes)

    def _enter(self, least_bytes: int) -> bool:
        """Begin again with room for more states behind what was taken; False if there is none.

        What begins with more bytes than a room has grows by as many: it is not begun there.
        """
        for states, most_bytes in self._rooms:
            if most_bytes >= least_bytes or states == MOST_STATES:
                self._charge(most_bytes - self._charged_bytes)
                self._charged_bytes = most_bytes
                self._matcher = None  # not two at a time
                self._matcher = self._begin(states)
                self._matcher.consume_tokens(self._taken)
                return True
        return False

    def _lacks_room(self) -> bool:
        """Tell whether it has failed for the states that it may have, and has more now."""
        matcher = self._matcher
        return matcher.is_error() and _TOO_MANY in matcher.get_error() and self._enter(0)

    def check(self) -> None:
        """Raise InvalidParameter once the grammar has failed."""
        if self._matcher.is_error():
            raise _refused(self._model, self._parameter, self._matcher.get_error())

    def fill(self, words: Tensor) -> None:
        """Set the bits of the tokens that may come next; raises InvalidParameter."""
        begun_ns = time.thread_time_ns()
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        while self._lacks_room():
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self.check()
        spent_ns = self._spent_ns + time.thread_time_ns() - begun_ns - _STEP_NS
        self._spent_ns = max(0, spent_ns)
        if spent_ns > _MOST_STEPS_NS:
            raise InvalidParameter(
                self._parameter,
                f"one whose steps take at most {STEP_SECONDS:g} seconds of the processor, and "
                f"{MOST_STEPS_SECONDS:g} beyond that together (model '{self._model}'): fewer ways "
                "to read the same text",
                "one whose steps take longer",
            )

    def take(self, token: int) -> bool:
        """Go on behind a token; True where no other may follow. Raises InvalidParameter."""
        begun_ns = time.thread_time_ns()
        self._taken.append(token)
        self._matcher.consume_token(token)
        while self._lacks_room():
            pass
        self._spent_ns += time.thread_time_ns() - begun_ns
        self.check()
        return bool(self._matcher.is_stopped())


def _shown(problem: str) -> str:
    return " ".join(problem.split())[:_SHOWN_CHARACTERS]


def _refused(model: str, parameter: str, problem: str) -> InvalidParameter:
    return InvalidParameter(parameter, _EXPECTED.format(model), _shown(problem))
