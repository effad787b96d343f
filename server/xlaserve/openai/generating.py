"""Starts generations: resolves the model, encodes the prompts, and submits the calls."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from xlaserve.concurrency.host import HostThreads
from xlaserve.errors import ModelNotReady
from xlaserve.http.messages import HttpRequest
from xlaserve.http.threads import OffLoop
from xlaserve.language.text_limits import ENCODED_TIMES
from xlaserve.openai.answers import PromptDetails, Usage
from xlaserve.openai.asking import Prompt, TextRequest
from xlaserve.openai.calls import ChoiceCall
from xlaserve.openai.choices import Choice
from xlaserve.openai.errors import CONTEXT_LENGTH, InvalidField
from xlaserve.openai.texts import ModelText, Texts
from xlaserve.runtime.generator.info import GenerationInfo
from xlaserve.serving.engine import Engine
from xlaserve.serving.inference import InferInput, InferRequest, RequestedOutput
from xlaserve.serving.stations.station import Served
from xlaserve.tensors import datatype_named

_INT32 = datatype_named("INT32")
_OUTPUTS = tuple(map(RequestedOutput, ("token", "logprob", "top_tokens", "top_logprobs")))
_CHARACTERS_OF_TOKEN = 64
"""Maximum prompt characters per position of the model. Longer prompts almost certainly have too
many tokens, and tokenizing them to find out would take long."""
_ECHOED_TIMES = 8
"""Bytes per character of a prompt that responses repeat: for the text and for its JSON."""
_ID_BYTES = 8
_TRIES = 3
"""Attempts to start generation with the version whose tokenizer encoded the prompt."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A request whose generations have been started."""

    calls: Sequence[ChoiceCall]
    choices: Sequence[Choice]
    prompt_tokens: int
    count: int
    """Choices per prompt."""
    echoes: Sequence[str] = ()
    """Texts of the prompts if responses begin with them, otherwise empty."""

    def echo(self, index: int) -> str:
        """Return the text with which a choice's response begins."""
        return self.echoes[index // self.count] if self.echoes else ""

    def tokens(self) -> tuple[int, int]:
        """Return the number of prompt tokens, and of tokens generated so far."""
        return self.prompt_tokens, sum(choice.tokens for choice in self.choices)

    def usage(self) -> Usage:
        """Return the token counts so far."""
        _, generated = self.tokens()
        # Count each prompt once. Later choices may hit entries that the first one has just cached,
        # so the minimum is the number that was cached before.
        cached = [choice.cached_tokens for choice in self.choices]
        groups = (cached[at : at + self.count] for at in range(0, len(cached), self.count))
        details = PromptDetails(sum(map(min, groups)))
        return Usage(self.prompt_tokens, generated, self.prompt_tokens + generated, details)


class Generations:
    """Starts the generations of requests."""

    def __init__(self, engine: Engine, threads: HostThreads, max_choices: int) -> None:
        """`max_choices` limits the choices per request."""
        self._engine = engine
        self._texts = Texts(threads)
        self._threads = OffLoop(threads)
        self._max_choices = max_choices

    async def begin(self, request: HttpRequest, parsed: TextRequest, name: str) -> Begun:
        """Start the generation of all choices; `name` is the id of the request.

        Raises InvalidField, ModelNotFound, ModelNotReady, BudgetExhausted, and the errors of the
        model's tokenizer and template. Errors of a generation are reported to its call.
        """
        if parsed.choices > self._max_choices:
            raise InvalidField(
                "n",
                f"at most {self._max_choices} choices over all prompts (max_choices)",
                str(parsed.choices),
            )
        call = request.call
        assert isinstance(call, ChoiceCall)
        call.model, call.id = parsed.model, name
        call.grow = request.grow
        for _ in range(_TRIES):
            with self._engine.require(parsed.model) as info:
                _, instance = self._engine.resolve(parsed.model, "")
                generation = info.generation
                if generation is None:
                    expected, kind = "a language model", f"is {info.platform}"
                    if info.embedding is not None:
                        expected += ", or a request to /v1/embeddings"
                        kind = "makes embeddings"
                    raise InvalidField("model", expected, f"'{parsed.model}', which {kind}")
                family = parsed.form.family(generation)
                text = self._texts.of(parsed.model, generation, request.call.caller)
                prompts = await self._encoded(request, parsed, text, generation)
                echoes = await self._echoes(request, parsed, text) if parsed.echoes else ()
            if self._is_current(parsed.model, instance):
                more = parsed.form.parameters(family, generation)
                whole = replace(parsed, parameters={**parsed.parameters, **more})
                # Create the choices before any call begins, so that invalid parameters leave no
                # call behind.
                choices = [
                    Choice(text.text, parsed.stop, parsed.tops, parsed.form.parser(family))
                    for _ in range(parsed.choices)
                ]
                calls = self._begun(call, whole, name, prompts)
                length = sum(map(len, prompts))
                return Begun(calls, choices, length, parsed.count, echoes)
        raise ModelNotReady(parsed.model, "", "LOADING", "it keeps being reloaded")

    def _is_current(self, model: str, instance: Served) -> bool:
        """Tell whether the instance still serves the model.

        Another version may have another tokenizer.
        """
        return self._engine.resolve(model, "")[1] is instance

    def _begun(
        self, call: ChoiceCall, parsed: TextRequest, name: str, prompts: Sequence[NDArray[np.int32]]
    ) -> Sequence[ChoiceCall]:
        calls = call.split(parsed.choices)
        for index, part in enumerate(calls):
            prompt = prompts[index // parsed.count]
            self._engine.begin(
                part,
                InferRequest(
                    parsed.model,
                    "",
                    name,
                    (InferInput("tokens", _INT32, prompt),),
                    _OUTPUTS,
                    parameters=parsed.parameters_of(index % parsed.count),
                ),
            )
        return calls

    async def _echoes(
        self, request: HttpRequest, parsed: TextRequest, text: ModelText
    ) -> Sequence[str]:
        """Return the texts of the prompts, after reserving memory for a copy in each choice."""
        given = parsed.prompts
        if isinstance(given[0], str):
            found = cast(Sequence[str], given)
        else:
            found = await text.decode(cast(Sequence[Sequence[int]], given))
        request.grow(_ECHOED_TIMES * parsed.count * sum(map(len, found)), "the prompts in answers")
        return found

    async def _encoded(
        self, request: HttpRequest, parsed: TextRequest, text: ModelText, info: GenerationInfo
    ) -> Sequence[NDArray[np.int32]]:
        """Encode each prompt, after reserving memory for its tokens.

        Raises InvalidField, BudgetExhausted, and the errors of the tokenizer or the template.
        """
        if not parsed.messages and not isinstance(parsed.prompts[0], str):
            return await self._checked(cast(Sequence[Sequence[int]], parsed.prompts), parsed, info)
        size = parsed.characters
        most = info.max_length * _CHARACTERS_OF_TOKEN * max(1, len(parsed.prompts))
        if size > most:
            raise InvalidField(
                parsed.prompt_field,
                f"at most {most} characters ({_CHARACTERS_OF_TOKEN} per token of the context)",
                str(size),
                code=CONTEXT_LENGTH,
            )
        if parsed.echoed_bytes > most:
            # The error names the fields that can be this long; other fields have limits.
            raise InvalidField(
                parsed.prompt_field,
                f"at most {most} bytes of JSON for the input, instructions, tools and text, which "
                f"the response repeats ({_CHARACTERS_OF_TOKEN} per token of the context)",
                str(parsed.echoed_bytes),
                code=CONTEXT_LENGTH,
            )
        request.grow(ENCODED_TIMES * size, "the tokens of a prompt")
        encoded: Sequence[Sequence[int]]
        if parsed.messages:
            encoded = [await text.chat(parsed.messages, parsed.form.tools, parsed.variables)]
        else:
            encoded = await text.encode([str(prompt) for prompt in parsed.prompts])
        found = await self._checked(encoded, parsed, info)
        kept = sum(prompt.nbytes for prompt in found)
        request.grow(kept - ENCODED_TIMES * size, "the tokens of a prompt")
        return found

    async def _checked(
        self, prompts: Sequence[Sequence[int]], parsed: TextRequest, info: GenerationInfo
    ) -> Sequence[NDArray[np.int32]]:
        """Validate token ids and return them as arrays, in a thread if they are many.

        Raises InvalidField.
        """
        size = _ID_BYTES * sum(map(len, prompts))
        return await self._threads.run(
            size, lambda: [_tokens(prompt, parsed, info) for prompt in prompts]
        )


def _tokens(prompt: Prompt, parsed: TextRequest, info: GenerationInfo) -> NDArray[np.int32]:
    """Return a prompt as token ids; raises InvalidField for an invalid one."""
    field = parsed.prompt_field
    if not 1 <= len(prompt) <= info.max_length:
        raise InvalidField(
            field,
            f"1 to {info.max_length} tokens (the model's context length)",
            f"{len(prompt)}",
            code=CONTEXT_LENGTH if len(prompt) else None,
        )
    tokens = np.array(prompt, np.int32)
    if tokens.max() >= info.vocab:
        expected = f"token ids of 0 to {info.vocab - 1}"
        raise InvalidField(field, expected, f"{int(tokens.max())}")
    return tokens
