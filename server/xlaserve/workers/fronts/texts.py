"""Reads the tokenizers of the engine's models in a front end, from the same files."""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import structlog

from xlaserve.errors import XlaserveError
from xlaserve.errors.panics import ENDS
from xlaserve.language.text import LanguageText
from xlaserve.language.text_limits import DEFAULT_TEXT_LIMITS, TextLimits
from xlaserve.language.tokenizing import Tokens
from xlaserve.runtime.embedding import text_files
from xlaserve.runtime.generator.info import GenerationInfo
from xlaserve.runtime.loaded import ModelInfo
from xlaserve.workers.fronts import description

_log = structlog.get_logger("fronts")


class Wanted(NamedTuple):
    """An instance whose tokenizer is needed."""

    model: str
    handle: int
    described: bytes
    digest: str
    """Digest of the files that the engine read."""


class Texts:
    """Tokenizers by the handle of their instance. Used from the event loop only."""

    def __init__(self, limits: TextLimits = DEFAULT_TEXT_LIMITS) -> None:
        self._limits = limits
        self._found: dict[int, LanguageText | Tokens | str] = {}
        """The tokenizer, or the reason why there is none."""

    def missing(self, wanted: Iterable[Wanted]) -> list[Wanted]:
        """Return the instances whose tokenizers were not read yet."""
        return [one for one in wanted if one.digest and one.handle not in self._found]

    async def read(self, wanted: Iterable[Wanted]) -> None:
        """Read tokenizers in a thread; log and record failures."""
        for one in wanted:
            try:
                self._found[one.handle] = await asyncio.to_thread(_read, one, self._limits)
            except ENDS:
                raise
            except BaseException as error:
                self._found[one.handle] = _refused(one.model, repr(error))

    def with_text(self, handle: int, info: ModelInfo) -> ModelInfo:
        """Return a model description with the tokenizer of its instance."""
        found = self._found.get(handle)
        if found is None:
            return info
        if info.generation is not None and isinstance(found, LanguageText):
            return replace(info, generation=replace(info.generation, text=found))
        if info.generation is not None and isinstance(found, str):
            return replace(info, generation=replace(info.generation, no_text=found))
        if info.embedding is not None and isinstance(found, Tokens):
            return replace(info, embedding=replace(info.embedding, text=found))
        if info.embedding is not None and isinstance(found, str):
            return replace(info, embedding=replace(info.embedding, no_text=found))
        return info

    def keep(self, handles: Iterable[int]) -> None:
        """Drop the tokenizers of all other instances."""
        kept = set(handles)
        self._found = {handle: text for handle, text in self._found.items() if handle in kept}

    def clear(self) -> None:
        """Drop all tokenizers, because another engine assigns other handles."""
        self._found.clear()


def _read(wanted: Wanted, limits: TextLimits) -> LanguageText | Tokens | str:
    reason = "its files changed since the engine read them"
    try:
        info, _ = description.read(wanted.described)
        if info.embedding is not None and info.embedding.files is not None:
            again = info.embedding.files
            found = text_files.read(again.version, wanted.model, again.roots, limits)
            if found.tokens is not None and found.files == again:
                return found.tokens
            return _refused(wanted.model, found.problem or reason)
        assert info.generation is not None
        text = _text(wanted.model, info.generation, limits)
        if text.digest == wanted.digest:
            return text
    except XlaserveError as error:
        reason = str(error)
    return _refused(wanted.model, reason)


def _refused(model: str, reason: str) -> str:
    _log.warning("model without text support", model=model, reason=reason)
    return f"has no text support with front ends ({reason})"


def _text(model: str, generation: GenerationInfo, limits: TextLimits) -> LanguageText:
    opened = generation.roots.open
    return LanguageText.read(generation.directory, model=model, opened=opened, limits=limits)
