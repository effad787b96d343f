"""Routes and handlers of OpenAI's endpoints."""

import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Literal, TypeVar

import msgspec

from xlaserve.concurrency.host import HostThreads
from xlaserve.errors import InvalidParameter, ModelNotFound, ModelNotReady
from xlaserve.errors.panics import ENDS
from xlaserve.http.edge import translate
from xlaserve.http.events import EVENT_STREAM_TYPE
from xlaserve.http.json.json_text import count_octets
from xlaserve.http.messages import JSON_TYPE, HttpRequest, HttpResponse, HttpStream, json_response
from xlaserve.http.routing import Body, Route
from xlaserve.http.threads import OffLoop
from xlaserve.openai.answers import (
    ChatCompletion,
    ChatWriter,
    Completion,
    CompletionWriter,
    Whole,
    Writer,
)
from xlaserve.openai.asking import TextRequest, read_chat, read_completion
from xlaserve.openai.bodies import ChatRequest, CompletionRequest, EmbeddingRequest, read_embedding
from xlaserve.openai.calls import ChoiceCall
from xlaserve.openai.choices import Piece
from xlaserve.openai.embedding import Embeddings
from xlaserve.openai.embedding_answers import EmbeddingList
from xlaserve.openai.errors import ErrorBody, error_body, name_field
from xlaserve.openai.generating import Begun, Generations
from xlaserve.openai.response_answers import Response, ResponseWriter
from xlaserve.openai.response_asking import read_response
from xlaserve.openai.response_bodies import ResponseRequest
from xlaserve.residence.registry import Registry
from xlaserve.residence.server import NAME
from xlaserve.serving.access.sight import require_seen_now, seen_now
from xlaserve.serving.call import Headers, Operation, Peer
from xlaserve.serving.engine import Engine

T = TypeVar("T")

_STREAM_TYPE = f"{EVENT_STREAM_TYPE}; charset=utf-8"
_TAG = "OpenAI"
_ERRORS = (400, 401, 404, 408, 413, 429, 500, 501, 503)

_PARSED_TIMES = 6
"""Estimated memory of a parsed body's strings and objects, in multiples of its size."""
_NUMBER_BYTES = 48
_ECHOED_TIMES = 5
"""Estimated memory for the repeated request fields, as a multiple of their size: the stored copy,
the first two events, and the joined body."""

_CHAT_EXAMPLE = {"model": "story", "messages": [{"role": "user", "content": "Hello"}]}
_EMBEDDING_EXAMPLE = {"model": "sentences", "input": ["Hello", "Good day"]}
_RESPONSE_EXAMPLE = {"model": "story", "input": "Hello"}
_COMPLETION_EXAMPLE = {"model": "story", "prompt": "Once", "max_tokens": 16}


class OpenAiRoutes:
    """The handlers of OpenAI's endpoints."""

    def __init__(
        self,
        engine: Engine,
        registry: Registry,
        threads: HostThreads,
        *,
        max_json_depth: int,
        max_stream_bytes: int,
        max_choices: int,
        max_embedding_inputs: int,
    ) -> None:
        """`max_stream_bytes` limits the response data that waits for a slow client, per request.

        `max_choices` limits the choices, `max_embedding_inputs` the inputs of an embedding request.
        """
        self._models = OpenAiModels(registry)
        self._threads = OffLoop(threads)
        self._generations = Generations(engine, threads, max_choices)
        self._embeddings = Embeddings(engine, threads, max_embedding_inputs)
        self._max_json_depth = max_json_depth
        self._max_stream_bytes = max_stream_bytes

    def table(self) -> list[Route]:
        """Return the routes."""
        return [row for prefix in ("/v1", "/openai/v1") for row in self._rows(prefix)]

    def _rows(self, prefix: str) -> list[Route]:
        row = partial(Route, tag=_TAG, error=ErrorBody)
        get = partial(row, "GET", operation=Operation.METADATA)
        post = partial(row, "POST", operation=Operation.INFER)
        text = partial(post, errors=_ERRORS, make_call=self.make_call)
        either = (JSON_TYPE, EVENT_STREAM_TYPE)
        return [
            get(
                f"{prefix}/models",
                handle=self.list,
                summary="OpenAI: list the language models",
                answer=Body(OpenAiModelList),
            ),
            get(
                f"{prefix}/models/{{model}}",
                handle=self.get,
                summary="OpenAI: show a language model",
                answer=Body(OpenAiModel),
                errors=(404,),
            ),
            text(
                f"{prefix}/completions",
                handle=self.complete,
                summary="OpenAI: complete a text",
                answer=Body(Completion, either),
                takes=Body(CompletionRequest, example=_COMPLETION_EXAMPLE),
            ),
            text(
                f"{prefix}/chat/completions",
                handle=self.chat,
                summary="OpenAI: complete a chat",
                answer=Body(ChatCompletion, either),
                takes=Body(ChatRequest, example=_CHAT_EXAMPLE),
            ),
            text(
                f"{prefix}/responses",
                handle=self.respond,
                summary="OpenAI: create a response",
                answer=Body(Response, either),
                takes=Body(ResponseRequest, example=_RESPONSE_EXAMPLE),
            ),
            post(
                f"{prefix}/embeddings",
                handle=self.embed,
                summary="OpenAI: create embeddings",
                answer=Body(EmbeddingList),
                takes=Body(EmbeddingRequest, example=_EMBEDDING_EXAMPLE),
                errors=(*_ERRORS, 507),
            ),
        ]

    def make_call(self, names: Mapping[str, str], headers: Headers, peer: Peer) -> ChoiceCall:
        """Create the call of a request; its model is not known until the body is parsed."""
        return ChoiceCall(names, headers, peer, self._max_stream_bytes)

    # --- Models ---

    async def list(self, request: HttpRequest) -> HttpResponse:
        """List the text generation and embedding models that the caller may see."""
        return json_response(self._models.list())

    async def get(self, request: HttpRequest) -> HttpResponse:
        """Return one text generation or embedding model."""
        return json_response(self._models.get(request.names["model"]))

    # --- Generation and embeddings ---

    async def complete(self, request: HttpRequest) -> HttpResponse | HttpStream:
        """Continue each prompt; respond with one body or with streamed chunks."""
        parsed = await self._read(request, read_completion)
        name, created = f"cmpl-{secrets.token_hex(12)}", int(time.time())
        writer = CompletionWriter(
            name, parsed.model, created, tops=parsed.tops, includes_usage=parsed.includes_usage
        )
        return await self._answer(request, parsed, name, writer)

    async def chat(self, request: HttpRequest) -> HttpResponse | HttpStream:
        """Answer a chat; respond with one body or with streamed chunks."""
        parsed = await self._read(request, read_chat)
        name, created = f"chatcmpl-{secrets.token_hex(12)}", int(time.time())
        writer = ChatWriter(
            name,
            parsed.model,
            created,
            has_logprobs=parsed.tops is not None,
            includes_usage=parsed.includes_usage,
        )
        return await self._answer(request, parsed, name, writer)

    async def respond(self, request: HttpRequest) -> HttpResponse | HttpStream:
        """Answer a list of items; respond with one body or with streamed events."""
        parsed, echo = await self._read(request, read_response)
        request.grow(_ECHOED_TIMES * len(echo), "the request in its response")
        name = f"resp_{secrets.token_hex(24)}"
        grow, has_logprobs = request.grow, parsed.tops is not None
        writer = ResponseWriter(name, int(time.time()), echo, grow, has_logprobs=has_logprobs)
        return await self._answer(request, parsed, name, writer)

    async def embed(self, request: HttpRequest) -> HttpResponse:
        """Return the embedding of each input."""
        return await self._embeddings.answer(request, await self._read(request, read_embedding))

    async def _read(self, request: HttpRequest, read: Callable[..., T]) -> T:
        body = await request.read()
        size = len(body)
        # Also reserve memory for the parsed objects; the number of commas approximates their
        # number.
        numbers = await self._threads.run(size, partial(count_octets, body, b",")) + 1
        request.grow(_PARSED_TIMES * size + _NUMBER_BYTES * numbers, "the parsed body")
        depth = self._max_json_depth
        return await self._threads.run(size, partial(read, body, max_depth=depth))

    async def _answer(
        self, request: HttpRequest, parsed: TextRequest, name: str, writer: Writer
    ) -> HttpResponse | HttpStream:
        try:
            begun = await self._generations.begin(request, parsed, name)
            request.call.tokens = begun.tokens
            if not parsed.streams:
                return await self._whole(begun, request, parsed, writer)
        except InvalidParameter as error:
            name_field(error, parsed.fields)
            raise
        return HttpStream(_STREAM_TYPE, self._events(begun, parsed, writer))

    # --- Responses ---

    async def _whole(
        self, begun: Begun, request: HttpRequest, parsed: TextRequest, writer: Writer
    ) -> HttpResponse:
        found = [Whole([Piece(begun.echo(index))]) for index, _ in enumerate(begun.calls)]
        size = parsed.echoed_bytes
        async with aclosing(ChoiceCall.merged(begun.calls)) as answers:
            async for index, response, _ in answers:
                choice = begun.choices[index]
                if choice.finish_reason is not None:
                    continue
                # Counted twice, for the piece and for its serialized form.
                request.grow(2 * choice.token_bytes, "the answer")
                size += choice.token_bytes
                found[index].pieces.append(choice.take(response))
                if choice.finish_reason is not None:
                    begun.calls[index].finish(time.perf_counter_ns())
        write = partial(writer.whole, found, begun.usage())
        return HttpResponse(parts=[await self._threads.run(size, write)])

    async def _events(
        self, begun: Begun, parsed: TextRequest, writer: Writer
    ) -> AsyncGenerator[bytes, None]:
        """Yield the events of a request; the next one is produced after the previous one was sent.

        Raises an error that occurs before the first event, so that the response gets its status.
        """
        has_begun: set[int] = set()
        has_sent = False
        try:
            async with aclosing(ChoiceCall.merged(begun.calls)) as answers:
                async for index, response, _ in answers:
                    choice = begun.choices[index]
                    if choice.finish_reason is not None:
                        continue
                    piece = choice.take(response)
                    if choice.finish_reason is not None:
                        begun.calls[index].finish(time.perf_counter_ns())
                    is_first = index not in has_begun
                    has_begun.add(index)
                    if is_first:
                        piece = piece._replace(text=begun.echo(index) + piece.text)
                    events = writer.events(index, piece, is_first=is_first)
                    if events:
                        has_sent = True
                        yield b"".join(events)
            yield b"".join(writer.end(begun.usage()))
        except ENDS:
            raise
        except BaseException as error:
            name_field(error, parsed.fields)
            if not has_sent or isinstance(error, ConnectionError):
                raise
            for one in begun.calls:
                one.end(error)
            answer = translate(error, method="POST", path=parsed.path, shape=error_body)
            yield b"".join(writer.fail(b"".join(answer.parts)))


class OpenAiModel(msgspec.Struct, kw_only=True):
    """A model in OpenAI's format."""

    id: str
    object: Literal["model"] = "model"
    created: int
    """Unix time of the export, in seconds."""
    owned_by: str = NAME
    max_model_len: int
    """Maximum tokens of prompt and response together; for embeddings, of one input."""


class OpenAiModelList(msgspec.Struct):
    """A list of models."""

    data: list[OpenAiModel]
    object: Literal["list"] = "list"


class OpenAiModels:
    """Looks up models that generate text or embeddings."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def list(self) -> OpenAiModelList:
        """Return the ready models visible to the current caller."""
        self._registry.standing.require_listed("of this server")
        sees = seen_now()
        names = [model.name for model in self._registry.models() if sees(model.name)]
        found = [self._found(name) for name in names]
        return OpenAiModelList([model for model in found if model is not None])

    def get(self, name: str) -> OpenAiModel:
        """Return a model; raises ModelNotFound, or StillStarting."""
        require_seen_now(name)
        found = self._found(name)
        if found is None:
            # Models of other kinds are reported as missing.
            raise self._registry.standing.absent(name)
        return found

    def _found(self, name: str) -> OpenAiModel | None:
        try:
            _, instance = self._registry.resolve(name)
        except (ModelNotFound, ModelNotReady):
            return None
        info = instance.info
        if info.generation is not None:
            return _model(name, info.generation.written_at, info.generation.max_length)
        if info.embedding is not None:
            return _model(name, info.embedding.written_at, info.embedding.max_tokens)
        return None


def _model(name: str, created: int, most: int) -> OpenAiModel:
    return OpenAiModel(id=name, created=created, max_model_len=most)
