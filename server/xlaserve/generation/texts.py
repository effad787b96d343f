"""Text prompts and answers of a generator: tokenization, stop strings."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import structlog

from xlaserve.errors import InvalidModel, InvalidParameter, InvalidTensor
from xlaserve.errors.language import TextNotInstalled
from xlaserve.files.files import FileRecord, read_checked
from xlaserve.files.roots import Roots
from xlaserve.language import files
from xlaserve.language.stop_strings import MOST_CHARACTERS, MOST_STOPS
from xlaserve.language.text import LanguageText
from xlaserve.language.text_limits import DEFAULT_TEXT_LIMITS, ENCODED_TIMES, TextLimits
from xlaserve.language.turns import CallerThread
from xlaserve.model_config.config import ModelConfig
from xlaserve.runtime.generator.info import TEXT, TOKENS
from xlaserve.runtime.handling import ModelRequest
from xlaserve.runtime.loaded import Value
from xlaserve.tensors import Parameter, Tensor, TensorSpec, datatype_named

SPEC = TensorSpec(TEXT, datatype_named("BYTES"), (1,))

STOP = "stop"
"""Request parameter with stop strings."""

_MOST_STOP = 16 * MOST_STOPS * MOST_CHARACTERS
"""Maximum length of the parameter; in JSON, a character may take 12."""
_CHARACTERS = 64
"""Maximum characters of a prompt per position; longer prompts are mostly whitespace."""


@dataclass(frozen=True, slots=True)
class LoadedText:
    """The tokenizer and template of a generator, or the reason why it has none."""

    text: LanguageText | None
    """The tokenizer and template; None if the model only takes token ids."""
    no_text: str
    """Why the model accepts no text, as the end of a sentence that begins with its name; empty if
    it accepts text or has no tokenizer."""
    is_offered: bool
    """Whether `text` is an input and an output of V2 requests."""


def read_tokenizer(directory: Path, record: FileRecord | None, roots: Roots) -> bytearray | None:
    """Return the contents of tokenizer.json, or None; raises InvalidModel.

    `record` is its entry in the version's record, or None if there is no entry.
    """
    if record is None and not (directory / files.TOKENIZER).exists():
        return None
    limit = files.LIMITS[files.TOKENIZER]
    return read_checked(directory, files.TOKENIZER, limit_bytes=limit, record=record, roots=roots)


def read(
    directory: Path,
    config: ModelConfig,
    model: str,
    roots: Roots,
    tokenizer: bytearray | None,
    *,
    limits: TextLimits = DEFAULT_TEXT_LIMITS,
) -> LoadedText:
    """Create the tokenizer and template of a generator.

    If the configuration lists tensors, `text` is offered only if it is listed; the parameter `text`
    set to false disables it. If the tokenizer is unusable, raises InvalidModel if the parameter is
    explicitly true, and otherwise logs a warning.
    """
    wanted = config.parameters.get(TEXT, "true").strip().lower()
    if wanted not in ("true", "false"):
        raise InvalidModel(f"parameter '{TEXT}': expected true or false, got '{wanted[:64]}'")
    if wanted == "false":
        return LoadedText(None, f"has the parameter '{TEXT}' false", is_offered=False)
    if tokenizer is None:
        return LoadedText(None, "", is_offered=False)
    listed = [tensors for tensors in (config.inputs, config.outputs) if tensors]
    is_listed = all(any(one.name == TEXT for one in tensors) for tensors in listed)
    try:
        text = LanguageText.read(
            directory, model=model, opened=roots.open, tokenizer=tokenizer, limits=limits
        )
    except (InvalidModel, TextNotInstalled) as error:
        if TEXT in config.parameters:
            raise InvalidModel(f"{error} (parameter '{TEXT}' may be false)") from None
        # The model can still generate from token ids.
        structlog.get_logger("generation").warning(
            "generator without text support", model=model, reason=str(error)
        )
        return LoadedText(None, f"has no text support ({error})", is_offered=False)
    return LoadedText(text, "", is_listed)


class Prompts:
    """Tokenizes prompts on a separate thread, with fair scheduling between callers."""

    def __init__(self, model: str, text: LanguageText, max_length: int, waiting: int) -> None:
        self._model = model
        self._text = text
        self._most = _CHARACTERS * max_length
        self.thread = CallerThread("text", model, waiting)
        """The tokenizer thread; it starts with the first text prompt."""

    def held_bytes(self, value: Value) -> int:
        """Return the memory for tokenizing the input `text`; 0 if it will be refused."""
        octets = sum(map(len, value.tolist())) if isinstance(value, np.ndarray) else 0
        return ENCODED_TIMES * octets if octets <= self._most else 0

    def encode(self, value: Value) -> Tensor:
        """Tokenize the input `text` to INT32; raises InvalidRequest. Blocks."""
        (element,) = value if isinstance(value, np.ndarray) else value.numpy()
        try:
            text = element.decode() if isinstance(element, bytes) else str(element)
        except UnicodeDecodeError:
            got = "other bytes"
            raise InvalidTensor(self._model, "input", TEXT, "text in UTF-8", got) from None
        if len(text) > self._most:
            expected = f"at most {self._most} characters, {_CHARACTERS} for each position"
            raise InvalidTensor(self._model, "input", TEXT, expected, str(len(text)))
        return np.array(self._text.encode(text), np.int32)

    def close(self) -> None:
        """End the thread, and wait for it."""
        self.thread.close()


def check_prompt(model: str, request: ModelRequest) -> None:
    """Raise an InvalidRequest unless a request has exactly one of text and tokens."""
    count = sum(name in request.inputs for name in (TEXT, TOKENS))
    if count != 1:
        got = "both" if count else "neither"
        raise InvalidTensor(model, "input", TEXT, f"either it or '{TOKENS}'", got)


def stops(value: Parameter | None, text: LanguageText | None) -> Sequence[str]:
    """Parse the parameter `stop`: a stop string, or a JSON list of them.

    Raises InvalidParameter.
    """
    if value is None:
        return ()
    if text is None:
        raise InvalidParameter(STOP, "none, since the model does not support text", str(value)[:64])
    if not isinstance(value, str):
        raise InvalidParameter(STOP, "a string, or a list of them in JSON", str(value)[:64])
    if len(value) > _MOST_STOP:
        # Limited because parsing delays other requests.
        expected = f"at most {MOST_STOPS} strings of {MOST_CHARACTERS} characters"
        raise InvalidParameter(STOP, expected, f"{len(value)} characters")
    try:
        found = json.loads(value) if value.startswith("[") else value
    except (ValueError, RecursionError):
        # Not JSON: a single stop string that starts with a bracket.
        found = value
    listed = found if isinstance(found, list) else [found]
    if not all(isinstance(one, str) for one in listed):
        raise InvalidParameter(STOP, "a string, or a list of them in JSON", value[:64])
    return listed


def element(text: str) -> Tensor:
    """Return a text as a BYTES tensor of one element."""
    found = np.empty(1, object)
    found[0] = text.encode()
    return found
