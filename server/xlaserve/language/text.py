"""The text of one version of a language model: its tokenizer and its chat template."""

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
    """Tokenizer and chat template of one model version. Its methods may be called in any thread."""

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
        """The thread that takes its texts, in callers' turns; None where any may."""
        self.chat_thread = tokens.thread or CallerThread("chats", model, limits.waiting)
        """The thread that takes messages: a template writes one text after the other."""
        self.digest = digest
        """SHA-256 of the files that it was read from; two that have the same write alike."""

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
        """Read tokenizer.json, and what is there of the files beside it. Blocks.

        `model` is the name that errors say, `opened` opens files, and `tokenizer` is the content of
        tokenizer.json where that was read before. Raises ModelHasNoText for a
        folder without a tokenizer, InvalidModel, and TextNotInstalled.
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
        """Return the token that begins a text, None where the model has none."""
        return self._special.bos

    @property
    def eos(self) -> tuple[int, ...]:
        """Return the tokens that end an answer; none where no file says them."""
        return self._special.eos

    @property
    def has_template(self) -> bool:
        """Tell whether it takes messages."""
        return self._template is not None

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, with those that the tokenizer puts around one.

        Special tokens in the text are plain text. Blocks, without the interpreter's lock. Raises
        InvalidRequest for what is no text, too long, or cannot be spelled.
        """
        return self._tokens.encode(text)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[int]:
        """Return the tokens of messages as the chat template writes them, up to the next answer.

        Messages, tools and `variables` for the template are plain data of JSON. Special tokens in
        them are plain text. Blocks.
        Raises ModelHasNoTemplate, MessagesRefused and others of InvalidRequest, and TemplateFailed.
        """
        if self._template is None:
            raise ModelHasNoTemplate(self._model)
        marks = self._tokens.marks
        return self._tokens.encode_marked(
            self._template.render(messages, tools, marks.data, variables)
        )

    def is_special(self, text: str) -> bool:
        """Tell whether a text is a token that was added to the vocabulary.

        Grammars take all of those as special tokens, whatever tokenizer.json calls them.
        """
        return text in self._tokens.added

    @property
    def tools_template(self) -> str | None:
        """Return the text of the template for messages with tools; None where it has none."""
        return None if self._template is None else self._template.source_with_tools

    def detokenizer(self, stop: Sequence[str] = (), shown: Sequence[str] = ()) -> Detokenizer:
        """Return what makes text of the tokens of one answer; raises InvalidParameter.

        Special tokens have no text, but for those of `shown`.
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
        """Return the text of tokens, without special ones; broken bytes are replaced."""
        found = self.detokenizer()
        return "".join([*(found.push(token) for token in ids), found.end()])

    def close(self) -> None:
        """End the processes of the tokenizer and the template."""
        if self._template is not None:
            self._template.close()
        self._tokens.close()
        self.chat_thread.close()


def _digest(contents: Iterable[bytes | bytearray | None]) -> str:
    """Return one digest of files; one that is not there differs from one that is empty."""
    whole = hashlib.sha256()
    for data in contents:
        whole.update(b"-" if data is None else hashlib.sha256(data).digest())
    return whole.hexdigest()
