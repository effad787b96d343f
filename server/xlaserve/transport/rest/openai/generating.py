"""From a request to generations that have begun: model, tokens of the prompts, and calls."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from xlaserve.core.serving.engine import Engine
from xlaserve.core.serving.inference import InferInput, InferRequest, RequestedOutput
from xlaserve.core.serving.stations.station import Served
from xlaserve.core.threads.host import HostThreads
from xlaserve.errors import ModelNotReady
from xlaserve.models.generation.info import GenerationInfo
from xlaserve.tensors import datatype_named
from xlaserve.transport.rest.messages import HttpRequest
from xlaserve.transport.rest.openai.answers import PromptDetails, Usage
from xlaserve.transport.rest.openai.asking import Asked, Prompt
from xlaserve.transport.rest.openai.calls import ChoiceCall
from xlaserve.transport.rest.openai.choices import Choice
from xlaserve.transport.rest.openai.errors import CONTEXT_LENGTH, InvalidField
from xlaserve.transport.rest.openai.texts import ModelText, Texts

_INT32 = datatype_named("INT32")
_OUTPUTS = tuple(map(RequestedOutput, ("token", "logprob", "top_tokens", "top_logprobs")))
_ENCODED_TIMES = 160
"""Bytes that a tokenizer takes for each octet of a text, where each is a token by itself."""
_CHARACTERS_OF_TOKEN = 64
"""Characters that a text may have for each position of the model: to find out how many tokens a
longer one has would take long, and hardly any has so few."""
_TRIES = 3
"""Attempts to begin with the version that a prompt was encoded for."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A request whose generations have begun."""

    calls: Sequence[ChoiceCall]
    choices: Sequence[Choice]
    prompt_tokens: int
    count: int
    """Choices of each prompt."""

    def usage(self) -> Usage:
        """Return the numbers of tokens by now."""
        generated = sum(choice.tokens for choice in self.choices)
        # A prompt counts once: what one of its choices has computed was not there before.
        cached = [choice.cached_tokens for choice in self.choices]
        groups = (cached[at : at + self.count] for at in range(0, len(cached), self.count))
        details = PromptDetails(sum(map(min, groups)))
        return Usage(self.prompt_tokens, generated, self.prompt_tokens + generated, details)


class Generations:
    """Has the choices of requests generated."""

    def __init__(self, engine: Engine, threads: HostThreads, max_choices: int) -> None:
        """`max_choices` is the most answers to one request."""
        self._engine = engine
        self._texts = Texts(threads)
        self._max_choices = max_choices

    async def begin(self, request: HttpRequest, asked: Asked, name: str) -> Begun:
        """Have every choice generated; `name` is the id of the request.

        Raises InvalidField, ModelNotFound, ModelNotReady, BudgetExhausted, and what the tokenizer
        and the template of the model raise. What a generation fails with its call is given.
        """
        if asked.choices > self._max_choices:
            raise InvalidField(
                "n",
                f"at most {self._max_choices} choices of all prompts (max_choices)",
                str(asked.choices),
            )
        call = request.call
        assert isinstance(call, ChoiceCall)
        call.model, call.id = asked.model, name
        call.grow = request.grow
        for _ in range(_TRIES):
            with self._engine.require(asked.model) as info:
                _, instance = self._engine.resolve(asked.model, "")
                generation = info.generation
                if generation is None:
                    raise InvalidField(
                        "model", "a language model", f"'{asked.model}', which is {info.platform}"
                    )
                family = asked.form.family(generation)
                text = self._texts.of(asked.model, generation, request.call.caller)
                prompts = await self._encoded(request, asked, text, generation)
            if self._is_current(asked.model, instance):
                more = asked.form.parameters(family, generation)
                whole = replace(asked, parameters={**asked.parameters, **more})
                # Before anything has begun: what they refuse leaves nothing behind.
                choices = [
                    Choice(text.text, asked.stop, asked.tops, asked.form.parser(family))
                    for _ in range(asked.choices)
                ]
                calls = self._begun(call, whole, name, prompts)
                length = sum(map(len, prompts))
                return Begun(calls, choices, length, asked.count)
        raise ModelNotReady(asked.model, "", "LOADING", "it is reloaded again and again")

    def _is_current(self, model: str, instance: Served) -> bool:
        """Tell whether a request would be answered by an instance now.

        Another version may have another tokenizer.
        """
        return self._engine.resolve(model, "")[1] is instance

    def _begun(
        self, call: ChoiceCall, asked: Asked, name: str, prompts: Sequence[NDArray[np.int32]]
    ) -> Sequence[ChoiceCall]:
        calls = call.split(asked.choices)
        for index, part in enumerate(calls):
            prompt = prompts[index // asked.count]
            self._engine.begin(
                part,
                InferRequest(
                    asked.model,
                    "",
                    name,
                    (InferInput("tokens", _INT32, prompt),),
                    _OUTPUTS,
                    parameters=asked.parameters_of(index % asked.count),
                ),
            )
        return calls

    async def _encoded(
        self, request: HttpRequest, asked: Asked, text: ModelText, info: GenerationInfo
    ) -> Sequence[NDArray[np.int32]]:
        """Return the tokens of each prompt, for which there is memory.

        Raises InvalidField, BudgetExhausted, and what the tokenizer or the template raises.
        """
        if not asked.messages and not isinstance(asked.prompts[0], str):
            return [_tokens(prompt, asked, info) for prompt in asked.prompts]
        size = asked.characters
        most = info.max_length * _CHARACTERS_OF_TOKEN * max(1, len(asked.prompts))
        if size > most:
            raise InvalidField(
                asked.prompt_field,
                f"at most {most} characters, {_CHARACTERS_OF_TOKEN} for each position of the model",
                str(size),
                code=CONTEXT_LENGTH,
            )
        request.grow(_ENCODED_TIMES * size, "the tokens of a prompt")
        encoded: Sequence[Sequence[int]]
        if asked.messages:
            encoded = [await text.chat(asked.messages, asked.form.tools)]
        else:
            encoded = await text.encode([str(prompt) for prompt in asked.prompts])
        found = [_tokens(prompt, asked, info) for prompt in encoded]
        kept = sum(prompt.nbytes for prompt in found)
        request.grow(kept - _ENCODED_TIMES * size, "the tokens of a prompt")
        return found


def _tokens(prompt: Prompt, asked: Asked, info: GenerationInfo) -> NDArray[np.int32]:
    """Return a prompt as the model takes it; raises InvalidField for one that it cannot."""
    field = asked.prompt_field
    if not 1 <= len(prompt) <= info.max_length:
        raise InvalidField(
            field,
            f"1 to {info.max_length} tokens, which is what the model has positions for",
            f"{len(prompt)}",
            code=CONTEXT_LENGTH if len(prompt) else None,
        )
    tokens = np.array(prompt, np.int32)
    if tokens.max() >= info.vocab:
        expected = f"token ids of 0 to {info.vocab - 1}"
        raise InvalidField(field, expected, f"{int(tokens.max())}")
    return tokens
