"""Tokenization of client text, in which special tokens are plain text."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from xlaserve.errors import InvalidModel, repeatable
from xlaserve.errors.language import (
    NotText,
    SpelledSpecialToken,
    TextNotInstalled,
    TextProcessLost,
    TextTooLong,
    TokenizerFailed,
)
from xlaserve.language import decoders, files
from xlaserve.language.limited import Limited, TookTooMuch
from xlaserve.language.linear import is_linear
from xlaserve.language.marks import NORMALIZERS, Marks, unmarked
from xlaserve.language.text_limits import DEFAULT_TEXT_LIMITS, TextLimits
from xlaserve.language.turns import CallerThread

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_PROGRAM = ("-m", "xlaserve.language.tokenizer_process")

MOST_CHARACTERS = 8 << 20
"""Maximum length of a text."""
MOST_ADDED_CHARACTERS = 256
"""Maximum length of a special token."""
_RARE = "a\u0378\U000e0fff"
"""Characters that hardly any vocabulary contains."""


class Tokens:
    """The tokenizer of a model; thread-safe."""

    def __init__(
        self, found: Mapping[str, Any], model: str, limits: TextLimits = DEFAULT_TEXT_LIMITS
    ) -> None:
        """Parse the contents of a `tokenizer.json`; raises InvalidModel and TextNotInstalled."""
        self._model = model
        added = _added(found)
        special = {token["id"]: token["content"] for token in added if token.get("special")}
        self.special: Mapping[int, str] = special
        self.added = frozenset(token["content"] for token in added)
        """Tokens added to the model's vocabulary, special or not."""
        self.decoder = decoders.read(found.get("decoder"))
        written = _changed(found, added)
        self._tokenizer = _make(written, model)
        unknown = _unknown(found.get("model"))
        self._controls = {id_: text for id_, text in special.items() if text != unknown}
        """Special tokens except the one for unknown text."""
        self._limited: Limited | None = None
        self.thread: CallerThread | None = None
        """Thread for slow tokenizers, fair between callers; None if the tokenizer is fast."""
        if not is_linear(found):
            first = {"file": written, "controls": list(self._controls)}
            self._limited = Limited(
                _PROGRAM, limits.tokenizer, first, called="tokenizer", model=model
            )
            self.thread = CallerThread("tokens", model, limits.waiting)
        self._check_unknown(unknown, found.get("model"))
        try:
            self.marks = Marks(special.values())
        except RecursionError:
            raise InvalidModel(
                f"{files.TOKENIZER}: too many special tokens share prefixes"
            ) from None

    def id_of(self, token: str) -> int | None:
        """Return the id of a token, or None if there is no such token."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def text_of(self, token: int) -> str | None:
        """Return the vocabulary entry of a token; None for special and unknown ones."""
        if token in self.special or token < 0:
            return None
        found: str | None = self._tokenizer.id_to_token(token)
        return found

    def encode(self, text: str) -> list[int]:
        """Tokenize client text, with the special tokens that the tokenizer adds around it.

        Blocks, but releases the GIL. Raises InvalidRequest.
        """
        return self.encode_marked(self.marks.text(self._checked(text)), adds_special=True)

    def encode_marked(self, text: str, *, adds_special: bool = False) -> list[int]:
        """Tokenize a text in which unmarked special tokens are recognized.

        Blocks, but releases the GIL. Raises InvalidRequest.
        """
        self._checked(text)
        if self._limited is not None:
            return self._made_elsewhere(text, adds_special=adds_special)
        try:
            # `encode_batch`, because `encode` holds the GIL, which for a long text can take
            # seconds.
            (found,) = self._tokenizer.encode_batch([text], add_special_tokens=adds_special)
        except (UnicodeEncodeError, TypeError):
            # tokenizers reports lone surrogates as a TypeError.
            raise NotText(self._model) from None
        ids: list[int] = found.ids
        if not self._controls.keys().isdisjoint(ids):
            self._check_special(text, ids, found.special_tokens_mask, found.offsets)
        return ids

    def close(self) -> None:
        """End the subprocess and the thread of a slow tokenizer, for good."""
        if self.thread is not None and self._limited is not None:
            # The process first, since the thread finishes its queued calls.
            self._limited.close()
            self.thread.close()

    def _made_elsewhere(self, text: str, *, adds_special: bool) -> list[int]:
        """Tokenize in a subprocess with resource limits."""
        assert self._limited is not None
        asked = {"text": text, "adds_special": adds_special}
        try:
            try:
                found = self._limited.ask(asked)
            except (OSError, TookTooMuch):
                # A fork tokenizes the text, so the text is not to blame: retry in a new process.
                found = self._limited.ask(asked)
        except UnicodeEncodeError:
            raise NotText(self._model) from None
        except (OSError, TookTooMuch) as error:
            raise TextProcessLost(self._model, str(error)) from error
        if "over" in found:
            raise TokenizerFailed(self._model, f"it exceeds its limits of {self._limited.limits}")
        if "ids" not in found:
            raise TokenizerFailed(self._model, found["failed"])
        ids: list[int] = found["ids"]
        if "offsets" in found:
            self._check_special(text, ids, found["special_tokens_mask"], found["offsets"])
        return ids

    def _check_unknown(self, unknown: str | None, model: Any) -> None:
        """Raise InvalidModel if the unknown token is needed but not in the vocabulary."""
        vocab = model.get("vocab") if unknown is not None else None
        if unknown is None or not isinstance(vocab, dict) or unknown in vocab:
            return
        try:
            # A byte-level vocabulary, for example, can spell any text without it.
            self.encode_marked(_RARE)
        except BaseException as error:
            raise InvalidModel(
                f"{files.TOKENIZER}: expected unk_token in the vocabulary, got"
                f" '{repeatable(unknown)}': {str(error)[:400]}"
            ) from None

    def _checked(self, text: str) -> str:
        if len(text) > MOST_CHARACTERS:
            raise TextTooLong(self._model, MOST_CHARACTERS, len(text))
        return text

    def _check_special(
        self,
        text: str,
        ids: Sequence[int],
        mask: Sequence[int],
        offsets: Sequence[Sequence[int]],
    ) -> None:
        """Raise SpelledSpecialToken if other characters were tokenized as a special token.

        That happens if a vocabulary also has it as an ordinary token, or if a normalizer produces
        its characters from others.
        """
        controls = self._controls
        for token, added, (begin, end) in zip(ids, mask, offsets, strict=True):
            if (
                not added
                and token in controls
                and text[begin:end].strip() != controls[token].strip()
            ):
                raise SpelledSpecialToken(self._model, unmarked(text[begin:end]))


def parse(data: bytes | bytearray, model: str, limits: TextLimits = DEFAULT_TEXT_LIMITS) -> Tokens:
    """Parse a tokenizer.json; raises InvalidModel and TextNotInstalled."""
    return Tokens(files.parse_object(files.TOKENIZER, data), model, limits)


def _added(found: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    added = found.get("added_tokens") or []
    is_valid = isinstance(added, list) and all(
        isinstance(one, dict)
        and isinstance(one.get("id"), int)
        and isinstance(one.get("content"), str)
        for one in added
    )
    if not is_valid:
        raise InvalidModel(f"{files.TOKENIZER}: expected added_tokens with 'id' and 'content'")
    for one in added:
        try:
            one["content"].encode()
        except UnicodeEncodeError:
            raise InvalidModel(
                f"{files.TOKENIZER}: added token {one['id']}: expected text in Unicode, got half "
                "of a surrogate pair"
            ) from None
    if any(len(one["content"]) > MOST_ADDED_CHARACTERS for one in added if one.get("special")):
        raise InvalidModel(
            f"{files.TOKENIZER}: expected special tokens of at most {MOST_ADDED_CHARACTERS} "
            "characters"
        )
    return added


def _unknown(model: Any) -> str | None:
    """Return the token for unknown text, or None."""
    if not isinstance(model, dict):
        return None
    number, vocab = model.get("unk_id"), model.get("vocab")
    if isinstance(number, int) and isinstance(vocab, list) and 0 <= number < len(vocab):
        return str(vocab[number][0])
    unknown = model.get("unk_token")
    return unknown if isinstance(unknown, str) else None


def _changed(found: Mapping[str, Any], added: Sequence[Mapping[str, Any]]) -> str:
    """Return the tokenizer.json, modified so that its normalizer removes marks."""
    normalizers = [*NORMALIZERS]
    if found.get("normalizer") is not None:
        normalizers.append(found["normalizer"])
    changed = {
        **found,
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        # Match special tokens before normalization, which removes the marks.
        "added_tokens": [
            {**one, "normalized": bool(one.get("normalized")) and not one.get("special")}
            for one in added
        ],
        # Too long prompts are refused, not truncated.
        "truncation": None,
        "padding": None,
    }
    return json.dumps(changed)


def _make(written: str, model: str) -> "Tokenizer":
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise TextNotInstalled(model, "tokenizers") from None
    try:
        return Tokenizer.from_str(written)
    except BaseException as error:
        # A Rust panic does not derive from Exception.
        if isinstance(error, (KeyboardInterrupt, SystemExit, MemoryError)):
            raise
        raise InvalidModel(f"{files.TOKENIZER} is not valid: {str(error)[:400]}") from None
