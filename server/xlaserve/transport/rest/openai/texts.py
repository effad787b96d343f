"""Tokenizers and templates of the models that are loaded, off the event loop."""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from xlaserve.core.threads.host import HostThreads
from xlaserve.language.text import LanguageText
from xlaserve.language_errors import ModelHasNoText
from xlaserve.models.generation.info import GenerationInfo


class ModelText:
    """The text of one loaded instance. Of the event loop."""

    def __init__(self, text: LanguageText, threads: HostThreads, rendering: asyncio.Lock) -> None:
        """`rendering` is held while the template renders, which does one after the other.

        Those that wait for that keep no threads from others.
        """
        self.text = text
        self._threads = threads
        self._rendering = rendering

    async def encode(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        """Return the tokens of each text; raises an InvalidRequest.

        In a thread, in the turns of the model: a tokenizer's regular expression may take seconds
        for a text of any length.
        """
        return await self._threads.run(partial(self._encode, texts), self.text)

    def _encode(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        return [self.text.encode(text) for text in texts]

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> Sequence[int]:
        """Return the tokens of messages; raises an InvalidRequest, or TemplateFailed."""
        async with self._rendering:
            return await self._threads.run(partial(self.text.chat, messages, tools), self.text)


class Texts:
    """Hands out the text of each loaded instance. Of the event loop."""

    def __init__(self, threads: HostThreads) -> None:
        self._threads = threads
        self._rendering: WeakKeyDictionary[LanguageText, asyncio.Lock] = WeakKeyDictionary()

    def of(self, model: str, generation: GenerationInfo) -> ModelText:
        """Return the text of an instance; raises ModelHasNoText."""
        text = generation.text
        if text is None:
            raise ModelHasNoText(model, generation.no_text)
        return ModelText(text, self._threads, self._rendering.setdefault(text, asyncio.Lock()))
