"""The generate extension: a request and its responses as flat JSON objects."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

from msgspec.structs import replace

from xlaserve.errors import NotOneAnswer
from xlaserve.errors.panics import ENDS
from xlaserve.http.edge import translate
from xlaserve.http.events import EVENT_STREAM_TYPE, EventCall
from xlaserve.http.json.json_tensors import JsonRules
from xlaserve.http.messages import HttpRequest, HttpResponse, HttpStream
from xlaserve.http.parsing import parsed_bytes
from xlaserve.http.routing import Body, Route
from xlaserve.http.threads import OffLoop
from xlaserve.http.v2.generate_json import has_text, read_generate_request, write_generate_answer
from xlaserve.http.v2.infer_response import most_json_bytes, output_bytes
from xlaserve.serving.call import Headers, Operation, Peer
from xlaserve.serving.engine import Engine
from xlaserve.serving.inference import InferResponse

_CONTENT_TYPE = f"{EVENT_STREAM_TYPE}; charset=utf-8"
_TAG = "inference"
_ERRORS = (400, 404, 408, 413, 500, 501, 503, 507)
_EXAMPLE = {"x": list(range(16))}
"""Matches the example model `identity`."""


class GenerateRoutes:
    """The handlers of `generate` and `generate_stream`."""

    def __init__(
        self,
        engine: Engine,
        threads: OffLoop,
        *,
        max_json_depth: int,
        json_rules: JsonRules,
        max_stream_bytes: int,
    ) -> None:
        """The model pauses when `max_stream_bytes` of responses are queued."""
        self._engine = engine
        self._threads = threads
        self._max_json_depth = max_json_depth
        self._json_rules = json_rules
        self._max_stream_bytes = max_stream_bytes

    def table(self) -> list[Route]:
        """Return the routes of these handlers."""
        takes = Body(dict[str, Any], example=_EXAMPLE)
        rows = []
        for model in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            rows += [
                Route(
                    "POST",
                    f"{model}/generate",
                    Operation.INFER,
                    self.generate,
                    "Generate one answer; fields are tensors",
                    _TAG,
                    Body(dict[str, Any]),
                    takes=takes,
                    errors=_ERRORS,
                    make_call=self.make_call,
                ),
                Route(
                    "POST",
                    f"{model}/generate_stream",
                    Operation.INFER,
                    self.generate_stream,
                    "Generate a stream of answers; fields are tensors",
                    _TAG,
                    Body(dict[str, Any], (EVENT_STREAM_TYPE,)),
                    takes=takes,
                    errors=_ERRORS,
                    make_call=self.make_call,
                ),
            ]
        return rows

    async def generate(self, request: HttpRequest) -> HttpResponse:
        """Answer once; raises NotOneAnswer if the model gave no response or several."""
        call, is_text = await self._begin(request, whole=True)
        found: InferResponse | None = None
        async with aclosing(call.answers()) as answers:
            async for response, _ in answers:
                if not response.outputs:
                    continue
                if found is not None:
                    raise NotOneAnswer(call.model, "more")
                found = response
        if found is None:
            raise NotOneAnswer(call.model, "none")
        return await self._write(call, found, is_text)

    async def generate_stream(self, request: HttpRequest) -> HttpResponse | HttpStream:
        """Send each response as an event when it arrives; errors are events too, as in Triton."""
        call, is_text = await self._begin(request)
        path = f"/v2/models/{call.model}/generate_stream"
        events = self._events(call, path, is_text)
        if call.has_ended:
            return HttpStream(_CONTENT_TYPE, events)
        try:
            first = await anext(events, None)
        except (ConnectionError, *ENDS):
            raise
        except BaseException as error:
            call.end(error)
            answer = translate(error, method="POST", path=path)
            return replace(answer, content_type=_CONTENT_TYPE, parts=[_event(answer)])
        return HttpStream(_CONTENT_TYPE, _opened(first, events))

    def make_call(self, names: Mapping[str, str], headers: Headers, peer: Peer) -> EventCall:
        """Create the call of a request, which may receive any number of responses."""
        return EventCall(names, headers, peer, self._max_stream_bytes)

    async def _begin(self, request: HttpRequest, *, whole: bool = False) -> tuple[EventCall, bool]:
        """Start a call; also tell whether its model takes and returns text."""
        name, version = request.names["model"], request.names.get("version", "")
        call = request.call
        assert isinstance(call, EventCall)
        call.wants_whole = whole
        with self._engine.require(name, version) as info:
            body = await request.read()
            request.grow(await parsed_bytes(self._threads, info, body), "the parsed body")
            depth = self._max_json_depth
            read = partial(read_generate_request, info, name, version, body, max_depth=depth)
            inference = await self._threads.run(len(body), read)
            is_text = has_text(info)
        call.grow = request.grow
        self._engine.begin(call, inference)
        return call, is_text

    async def _write(self, call: EventCall, response: InferResponse, is_text: bool) -> HttpResponse:
        write = partial(write_generate_answer, response, self._json_rules, is_text=is_text)
        size, made = output_bytes(response), most_json_bytes(response, rules=self._json_rules)
        # The call has already charged the tensors.
        return await self._threads.write(size, write, call.peer.account, made, is_counted=True)

    async def _events(
        self, call: EventCall, path: str, is_text: bool
    ) -> AsyncGenerator[bytes, None]:
        """Yield the events of a call, each after the previous one was sent.

        Raises the error of a call that fails before its first response, so that the HTTP response
        has the status of the error. A last response without outputs produces no event.
        """
        has_begun = False
        try:
            async with aclosing(call.answers()) as answers:
                async for response, _ in answers:
                    if response.outputs:
                        event = _event(await self._write(call, response, is_text))
                        with call.holding(event):
                            has_begun = True
                            yield event
        except ENDS:
            raise
        except BaseException as error:
            if not has_begun or isinstance(error, ConnectionError):
                raise
            call.end(error)
            yield _event(translate(error, method="POST", path=path))


async def _opened(
    first: bytes | None, events: AsyncGenerator[bytes, None]
) -> AsyncGenerator[bytes, None]:
    """Yield `first`, unless it is None, and then the remaining events."""
    async with aclosing(events):
        if first is not None:
            yield first
        async for event in events:
            yield event


def _event(answer: HttpResponse) -> bytes:
    """Serialize a response as an event; its JSON object contains no line break."""
    return b"".join((b"data: ", *answer.parts, b"\n\n"))
