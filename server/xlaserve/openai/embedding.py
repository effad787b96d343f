"""Answers embedding requests: tokenization, batched executions, and the response."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from xlaserve.concurrency.host import HostThreads
from xlaserve.errors import ModelNotReady, Overloaded, QueueTimeout
from xlaserve.errors.access import TooManyRequests
from xlaserve.errors.language import ModelHasNoText
from xlaserve.http.messages import HttpRequest, HttpResponse
from xlaserve.http.threads import OffLoop
from xlaserve.language.text_limits import ENCODED_TIMES
from xlaserve.language.tokenizing import Tokens
from xlaserve.openai import embedding_answers
from xlaserve.openai.asking import Prompt, listed
from xlaserve.openai.bodies import EmbeddingFields
from xlaserve.openai.errors import CONTEXT_LENGTH, UNSUPPORTED, InvalidField
from xlaserve.openai.texts import computed
from xlaserve.runtime.embedding import batches
from xlaserve.runtime.embedding.batches import Ids, Part
from xlaserve.runtime.embedding.info import EmbeddingInfo
from xlaserve.serving.call import Call
from xlaserve.serving.engine import Engine
from xlaserve.serving.infer_call import AwaitedInfer
from xlaserve.serving.inference import InferInput, InferRequest, RequestedOutput
from xlaserve.serving.stations.station import Served
from xlaserve.tensors import Buffer, Tensor

_CHARACTERS_OF_TOKEN = 64
"""Maximum characters per token that the model accepts. Texts beyond it almost certainly have too
many tokens, and tokenizing them to find out would take long."""
_FP32_BYTES = 4
_IN_FLIGHT = 4
"""Concurrent executions per request, so that a long list does not block other requests."""
_TRIES = 3
"""Attempts to answer all inputs with the version that tokenized them."""


class _Reloaded(Exception):
    """Another version was loaded, which may have another tokenizer."""


@dataclass(frozen=True, slots=True)
class _Model:
    """An embedding model and the loaded instance that serves it."""

    name: str
    instance: Served
    info: EmbeddingInfo


class Embeddings:
    """Answers embedding requests. Must be used on the event loop."""

    def __init__(self, engine: Engine, threads: HostThreads, max_inputs: int) -> None:
        """`max_inputs` limits the inputs per request."""
        self._engine = engine
        self._threads = threads
        self._off_loop = OffLoop(threads)
        self._max_inputs = max_inputs

    async def answer(self, request: HttpRequest, fields: EmbeddingFields) -> HttpResponse:
        """Return the response with the embedding of each input.

        Raises InvalidField, ModelNotFound, ModelNotReady, ModelHasNoText, BudgetExhausted,
        TooManyRequests, and the errors of executions and of the tokenizer.
        """
        inputs = listed("input", fields.input)
        if len(inputs) > self._max_inputs:
            expected = f"at most {self._max_inputs} inputs (max_embedding_inputs)"
            raise InvalidField("input", expected, str(len(inputs)))
        request.call.model = fields.model
        for _ in range(_TRIES):
            try:
                return await self._answer(request, fields, inputs)
            except _Reloaded:
                continue
        raise ModelNotReady(fields.model, "", "LOADING", "it keeps being reloaded")

    async def _answer(
        self, request: HttpRequest, fields: EmbeddingFields, inputs: Sequence[Prompt]
    ) -> HttpResponse:
        with self._engine.require(fields.model) as described:
            _, instance = self._engine.resolve(fields.model, "")
            info = described.embedding
            if info is None:
                expected, got = "an embedding model", f"'{fields.model}', which is not one"
                raise InvalidField("model", expected, f"{got} ({described.platform})")
            size = _size(fields, info)
            encoded = await self._encoded(request, fields.model, inputs, info)
        most_rows = max(1, described.max_batch_size)
        parts = batches.parts_of([len(ids) for ids in encoded], info, most_rows)
        held = len(inputs) * info.size * (_FP32_BYTES + embedding_answers.NUMBER_BYTES)
        held += sum(part.input_bytes(info) for part in parts)
        request.grow(held, "the embeddings")
        try:
            found = await self._executed(
                request.call, _Model(fields.model, instance, info), parts, encoded
            )
            tokens = sum(map(len, encoded))
            request.call.tokens = lambda: (tokens, None)
            write = partial(_written, fields, found, size, tokens)
            return HttpResponse(parts=await self._off_loop.run(found.nbytes, write))
        except _Reloaded:
            request.grow(-held, "the embeddings")
            raise

    # --- Tokenization ---

    async def _encoded(
        self, request: HttpRequest, model: str, inputs: Sequence[Prompt], info: EmbeddingInfo
    ) -> Sequence[Ids]:
        """Tokenize each input, after reserving memory for the tokens.

        Raises InvalidField, ModelHasNoText, BudgetExhausted, and the tokenizer's errors.
        """
        most = info.max_tokens * _CHARACTERS_OF_TOKEN
        characters = 0
        for place, given in enumerate(inputs):
            if isinstance(given, str):
                if len(given) > most:
                    expected = f"at most {most} characters, {_CHARACTERS_OF_TOKEN} for each token"
                    raise InvalidField(
                        _field(inputs, place), expected, str(len(given)), code=CONTEXT_LENGTH
                    )
                characters += len(info.prompt) + len(given)
        if not isinstance(inputs[0], str):
            return [_checked(ids, _field(inputs, at), info) for at, ids in enumerate(inputs)]
        if info.text is None:
            raise ModelHasNoText(model, info.no_text)
        request.grow(ENCODED_TIMES * characters, "the tokens of the inputs")
        encode = partial(_encode, info.text, info.prompt, inputs)
        found = await computed(self._threads, info.text, request.call.caller, encode)
        ids = [_checked(one, _field(inputs, at), info) for at, one in enumerate(found)]
        kept = sum(one.nbytes for one in ids)
        request.grow(kept - ENCODED_TIMES * characters, "the tokens of the inputs")
        return ids

    # --- Executions ---

    async def _executed(
        self, parent: Call, model: _Model, parts: Sequence[Part], inputs: Sequence[Ids]
    ) -> Tensor:
        """Return the embeddings of all inputs, [inputs, size]. Raises the errors of executions."""
        found = np.empty((len(inputs), model.info.size), np.float32)
        left = iter(parts)
        work = partial(self._work, parent, model, left, inputs, found)
        if len(parts) == 1:
            await work()
            return found
        tasks = [asyncio.ensure_future(work()) for _ in range(min(_IN_FLIGHT, len(parts)))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return found

    async def _work(
        self,
        parent: Call,
        model: _Model,
        left: Iterator[Part],
        inputs: Sequence[Ids],
        found: Tensor,
    ) -> None:
        """Execute parts until none is left, as nested calls of the request's call."""
        info = model.info
        for part in left:
            if self._engine.resolve(model.name, "")[1] is not model.instance:
                raise _Reloaded
            tensors = batches.tensors(part, inputs, info)
            call = AwaitedInfer.within(parent)
            self._engine.begin(
                call,
                InferRequest(
                    model.name,
                    inputs=tuple(
                        InferInput(spec.name, spec.datatype, tensors[spec.name])
                        for spec in model.instance.info.inputs
                    ),
                    outputs=(RequestedOutput(info.output.name),),
                ),
            )
            try:
                response = await call.answered()
            except (Overloaded, QueueTimeout) as error:
                raise TooManyRequests(error) from error
            found[list(part.places)] = response.outputs[0].data


def _encode(text: Tokens, prompt: str, inputs: Sequence[Prompt]) -> Sequence[Sequence[int]]:
    return [text.encode(f"{prompt}{one}") for one in inputs]


def _checked(ids: Prompt, field: str, info: EmbeddingInfo) -> Ids:
    """Return token ids as an array; raises InvalidField for invalid ones."""
    if not 1 <= len(ids) <= info.max_tokens:
        raise InvalidField(
            field,
            f"1 to {info.max_tokens} tokens (the model's max_tokens)",
            f"{len(ids)}",
            code=CONTEXT_LENGTH if len(ids) else None,
        )
    found = np.array(ids, np.int64)
    if info.vocab is not None and found.max() >= info.vocab:
        raise InvalidField(field, f"token ids of 0 to {info.vocab - 1}", f"{int(found.max())}")
    return found


def _size(fields: EmbeddingFields, info: EmbeddingInfo) -> int:
    """Return the size of the embeddings; raises InvalidField if it is not supported."""
    size = info.size if fields.dimensions is None else fields.dimensions
    if not info.may_cut_to(size):
        cuts = f"1 to {info.size}"
        if info.cuts is not None:
            cuts = ", ".join(map(str, sorted({*info.cuts, info.size})))
        raise InvalidField(
            "dimensions", f"{cuts}, as the model declares", str(size), code=UNSUPPORTED
        )
    return size


def _field(inputs: Sequence[Prompt], place: int) -> str:
    return "input" if len(inputs) == 1 else f"input[{place}]"


def _written(fields: EmbeddingFields, found: Tensor, size: int, tokens: int) -> list[Buffer]:
    is_base64 = fields.encoding_format == "base64"
    return embedding_answers.write(
        fields.model, batches.cut(found, size), tokens, is_base64=is_base64
    )
