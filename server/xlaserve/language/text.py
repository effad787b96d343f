"""Tokenizer and chat template of a language model version."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from xlaserve.errors.language import ModelHasNoTemplate, ModelHasNoText
from xlaserve.language import files, special, templates, tokenizing
from xlaserve.language.detokenizing import Detokenizer
from xlaserve.language.special import SpecialTokens
from xlaserve.language.templates import Template
from xlaserve.language.text_limits import DEFAULT_TEXT_LIMITS, TextLimits
from xlaserve.language.tokenizing import Tokens
from xlaserve.language.turns import CallerThread

__all__ = ["Detokenizer", "LanguageText"]

_BESIDE = (files.CONFIG, files.GENERATION, files.TEMPLATE)


class LanguageText:
    """Converts between text and tokens for one model version; thread-safe."""

    def __init__(
        self,
        tokens: Tokens,
        special_tokens: SpecialTokens,
        template: Template | None,
        model: str,
        digest: str = "",
        *,
        limits: TextLimits = DEFAULT_TEXT_LIMITS,
    ) -> None:
        self._tokens = tokens
        self._special = special_tokens
        self._template = template
        self._model = model
        self.thread = tokens.thread
        """Thread for tokenizing, fair between callers; None if any thread may do it."""
        self.chat_thread = tokens.thread or CallerThread("chats", model, limits.waiting)
        """Thread for chat templates, which render one prompt at a time."""
        self.digest = digest
        """SHA-256 of all files that were read: equal digests mean equal behavior."""

    @classmethod
    def read(
        cls,
        folder: Path,
        *,
        model: str = "",
        opened: files.Open = files.open_plain,
        tokenizer: bytes | bytearray | None = None,
        limits: TextLimits = DEFAULT_TEXT_LIMITS,
    ) -> "LanguageText":
        """Read tokenizer.json and the optional files next to it. Blocks.

        `model` is the name used in errors; `opened` opens files; `tokenizer` is the content of
        tokenizer.json if it has already been read. Raises ModelHasNoText if there is no tokenizer,
        InvalidModel, and TextNotInstalled.
        """
        if tokenizer is None:
            tokenizer = files.read(folder, files.TOKENIZER, opened)
        if tokenizer is None:
            raise ModelHasNoText(model)
        tokens = tokenizing.parse(tokenizer, model, limits)
        beside = {name: files.read(folder, name, opened) for name in _BESIDE}
        config, generation = (
            files.parse_object(name, data) if (data := beside[name]) is not None else {}
            for name in (files.CONFIG, files.GENERATION)
        )
        found = special.read(config, generation, tokens.id_of)
        written = beside[files.TEMPLATE]
        separate = None if written is None else files.parse_text(files.TEMPLATE, written)
        sources = templates.sources(config, separate)
        template = Template(sources, found.names, model, limits.template) if sources else None
        return cls(
            tokens, found, template, model, _digest([tokenizer, *beside.values()]), limits=limits
        )

    @property
    def bos(self) -> int | None:
        """Return the token that begins a text, or None."""
        return self._special.bos

    @property
    def eos(self) -> tuple[int, ...]:
        """Return the tokens that end an answer; empty if no file names any."""
        return self._special.eos

    @property
    def has_template(self) -> bool:
        """Tell whether the model has a chat template."""
        return self._template is not None

    def encode(self, text: str) -> list[int]:
        """Tokenize a text, with the special tokens that the tokenizer adds around it.

        Special tokens spelled in the text are treated as plain text. Blocks, but releases the GIL.
        Raises InvalidRequest if the text is invalid, too long, or cannot be tokenized.
        """
        return self._tokens.encode(text)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[int]:
        """Render messages with the chat template, and return the tokens of the prompt.

        Messages, tools and `variables` are plain JSON data. Special tokens spelled in them are
        treated as plain text. Blocks. Raises ModelHasNoTemplate, MessagesRefused and other
        InvalidRequests, and TemplateFailed.
        """
        if self._template is None:
            raise ModelHasNoTemplate(self._model)
        marks = self._tokens.marks
        return self._tokens.encode_marked(
            self._template.render(messages, tools, marks.data, variables)
        )

    def is_special(self, text: str) -> bool:
        """Tell whether a text is an added token.

        Grammars treat all added tokens as special, whether or not tokenizer.json does.
        """
        return text in self._tokens.added

    @property
    def tools_template(self) -> str | None:
        """Return the source of the template for messages with tools, or None."""
        return None if self._template is None else self._template.source_with_tools

    def detokenizer(self, stop: Sequence[str] = (), shown: Sequence[str] = ()) -> Detokenizer:
        """Return a detokenizer for one answer; raises InvalidParameter.

        Special tokens produce no text, except those in `shown`.
        """
        special = self._tokens.special
        seen = {id_: text for id_, text in special.items() if text in shown} if shown else {}
        found = self._tokens.text_of
        if seen:
            return Detokenizer(
                self._tokens.decoder, lambda id_: seen[id_] if id_ in seen else found(id_), stop
            )
        return Detokenizer(self._tokens.decoder, found, stop)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of tokens, without special ones; invalid bytes are replaced."""
        found = self.detokenizer()
        return "".join([*(found.push(token) for token in ids), found.end()])

    def close(self) -> None:
        """End the subprocesses and threads."""
        if self._template is not None:
            self._template.close()
        self._tokens.close()
        self.chat_thread.close()


def _digest(contents: Iterable[bytes | bytearray | None]) -> str:
    """Return a digest of files; a missing file differs from an empty one."""
    whole = hashlib.sha256()
    for data in contents:
        whole.update(b"-" if data is None else hashlib.sha256(data).digest())
    return whole.hexdigest()
