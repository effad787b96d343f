"""Runs the tokenizers and chat templates of loaded models off the event loop."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from xlaserve.concurrency.host import HostThreads
from xlaserve.errors.language import ModelHasNoText, TextProcessLost
from xlaserve.language.text import LanguageText
from xlaserve.language.tokenizing import Tokens
from xlaserve.language.turns import CallerThread
from xlaserve.runtime.generator.info import GenerationInfo

T = TypeVar("T")


async def computed(
    threads: HostThreads, text: LanguageText | Tokens, caller: str, call: Callable[[], T]
) -> T:
    """Run a tokenizer call in a thread and return its result.

    Tokenizers with a regular expression that may take seconds, regardless of the text's length,
    have their own thread, which is fair between callers. Others use the server's host threads,
    which are fair between models.
    """
    if text.thread is None:
        return await threads.run(call, text)
    return await _in_turn(text.thread, caller, call)


async def _in_turn(thread: CallerThread, caller: str, call: Callable[[], T]) -> T:
    try:
        future = thread.submit(caller, call)
    except RuntimeError as error:
        raise TextProcessLost("", "the model is being unloaded") from error
    return await asyncio.wrap_future(future)


class ModelText:
    """Tokenizer and chat template of a loaded instance, for one caller.

    Must be used on the event loop.
    """

    def __init__(self, text: LanguageText, threads: HostThreads, caller: str) -> None:
        self.text = text
        self._threads = threads
        self._caller = caller

    async def encode(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        """Return the tokens of each text; raises InvalidRequest."""
        encode = partial(self._encode, texts)
        return await computed(self._threads, self.text, self._caller, encode)

    def _encode(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        return [self.text.encode(text) for text in texts]

    async def decode(self, prompts: Sequence[Sequence[int]]) -> Sequence[str]:
        """Return the text of each token sequence, without special tokens."""
        decode = self.text.decode
        return await self._threads.run(lambda: [decode(prompt) for prompt in prompts], self.text)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
    ) -> Sequence[int]:
        """Return the tokens of a formatted chat; raises InvalidRequest or TemplateFailed."""
        chat = partial(self.text.chat, messages, tools, variables)
        return await _in_turn(self.text.chat_thread, self._caller, chat)


class Texts:
    """Creates a ModelText per request. Must be used on the event loop."""

    def __init__(self, threads: HostThreads) -> None:
        self._threads = threads

    def of(self, model: str, generation: GenerationInfo, caller: str) -> ModelText:
        """Return an instance's tokenizer and template for a caller; raises ModelHasNoText."""
        text = generation.text
        if text is None:
            raise ModelHasNoText(model, generation.no_text)
        return ModelText(text, self._threads, caller)
