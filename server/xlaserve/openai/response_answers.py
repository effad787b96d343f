"""Response bodies and events of the Responses API."""

import secrets
import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import msgspec

from xlaserve.openai.answers import ChatToken, Usage, Whole, logprobs_of
from xlaserve.openai.choices import CallPiece, Piece, TokenLogprob
from xlaserve.openai.errors import ErrorBody
from xlaserve.tensors import Buffer

_KEPT_BYTES = 256
_KEPT_TIMES = 6
"""Estimated memory for a text until the last event, as a multiple of its size: the stored text, and
copies in the final events."""

_Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class ResponseText(msgspec.Struct):
    """A text part of an output message."""

    text: str
    type: Literal["output_text"] = "output_text"
    annotations: list[Any] = []
    logprobs: list[ChatToken] = []


class ResponseMessage(msgspec.Struct, tag_field="type", tag="message"):
    """An output message."""

    id: str
    content: list[ResponseText]
    status: _Status = "in_progress"
    role: Literal["assistant"] = "assistant"


class ResponseCall(msgspec.Struct, tag_field="type", tag="function_call"):
    """A function call."""

    id: str
    call_id: str
    name: str
    arguments: str = ""
    """The arguments as the model wrote them, which should be JSON."""
    status: _Status = "in_progress"


class InputDetails(msgspec.Struct):
    """Details about the input tokens."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct):
    """Details about the output tokens."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseError(msgspec.Struct):
    """The error of a failed response."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class Incomplete(msgspec.Struct):
    """The reason for an incomplete response."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ReasoningEcho(msgspec.Struct):
    """The reasoning options of the request."""

    effort: str | None
    summary: str | None = None


class TextEcho(msgspec.Struct):
    """The text format of the request."""

    format: Any
    verbosity: Literal["low", "medium", "high"] = "medium"


class Echo(msgspec.Struct):
    """The request fields that a response repeats."""

    model: str
    instructions: str | None
    max_output_tokens: int | None
    parallel_tool_calls: bool
    reasoning: ReasoningEcho
    temperature: float
    top_p: float
    text: TextEcho
    tool_choice: Any
    tools: Sequence[Any]
    top_logprobs: int
    metadata: dict[str, str]


class _State(msgspec.Struct, kw_only=True):
    """The fields of a response that are not in Echo."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    """Unix time in seconds."""
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    error: ResponseError | None = None
    incomplete_details: Incomplete | None = None
    output: list[ResponseMessage | ResponseCall] = []
    usage: ResponseUsage | None = None
    background: bool = False
    previous_response_id: None = None
    store: bool = False
    """Responses are never stored."""
    truncation: Literal["disabled"] = "disabled"


Response = msgspec.defstruct(
    "Response",
    [(one.name, one.type) for one in msgspec.structs.fields(Echo)],
    bases=(_State,),
    kw_only=True,
    module=__name__,
    namespace={"__doc__": "A response."},
)


@dataclass(slots=True)
class _Open:
    """An output item that may receive more content."""

    item: ResponseMessage | ResponseCall
    index: int
    """Index of the item in the output."""
    parts: list[str] = field(default_factory=list)
    """Fragments of the text, or of the arguments."""
    logprobs: list[ChatToken] = field(default_factory=list)


_Event: TypeAlias = tuple[str, dict[str, Any]]
"""The type of an event and its fields, except the sequence number."""


class _Output:
    """Builds the output items of a response; each method returns the events for its changes."""

    def __init__(self, *, has_logprobs: bool) -> None:
        self.items: list[ResponseMessage | ResponseCall] = []
        self._open: _Open | None = None
        self._calls = 0
        self._has_logprobs = has_logprobs
        self._tokens: list[TokenLogprob] = []
        """Tokens whose text has not been emitted yet."""

    def take(self, piece: Piece) -> list[_Event]:
        """Add a piece: first arguments of calls begun earlier, then text, then new calls."""
        if piece.token is not None and self._has_logprobs:
            self._tokens.append(piece.token)
        begun = self._calls
        events: list[_Event] = []
        for call in piece.calls:
            if call.number < begun:
                events += self._arguments(call)
        if piece.text:
            events += self._text(piece.text)
        for call in piece.calls:
            if call.number >= begun:
                events += self._begin_call(call) if call.name is not None else []
                events += self._arguments(call)
        return events

    def end(self, status: _Status) -> list[_Event]:
        """End the last item with this status; an empty response gets an empty text."""
        events = [] if self.items else self._text("")
        if isinstance(self._open and self._open.item, ResponseMessage) and self._tokens:
            events += self._text("")
        return events + self._close(status)

    def _text(self, text: str) -> list[_Event]:
        events: list[_Event] = []
        opened = self._open
        if opened is None or isinstance(opened.item, ResponseCall):
            events += self._close("completed")
            item = ResponseMessage(f"msg_{secrets.token_hex(24)}", [])
            opened = self._begin(item)
            events.append(_added(opened))
            events.append(
                ("response.content_part.added", {**_at(opened), "part": ResponseText("")})
            )
        logprobs = logprobs_of(self._tokens)
        self._tokens.clear()
        opened.parts.append(text)
        opened.logprobs += logprobs
        delta = {**_at(opened), "delta": text, "logprobs": logprobs}
        return [*events, ("response.output_text.delta", delta)]

    def _begin_call(self, call: CallPiece) -> list[_Event]:
        events = self._close("completed")
        self._tokens.clear()
        item = ResponseCall(f"fc_{secrets.token_hex(24)}", call.id or "", call.name or "")
        self._calls += 1
        return [*events, _added(self._begin(item))]

    def _arguments(self, call: CallPiece) -> list[_Event]:
        self._tokens.clear()
        opened = self._open
        assert opened is not None  # a call is open until the next item begins
        opened.parts.append(call.arguments)
        if not call.arguments:
            return []
        delta = {"item_id": opened.item.id, "output_index": opened.index, "delta": call.arguments}
        return [("response.function_call_arguments.delta", delta)]

    def _begin(self, item: ResponseMessage | ResponseCall) -> _Open:
        self._open = _Open(item, len(self.items))
        self.items.append(item)
        return self._open

    def _close(self, status: _Status) -> list[_Event]:
        opened = self._open
        if opened is None:
            return []
        self._open = None
        item, text = opened.item, "".join(opened.parts)
        item.status = status
        done = ("response.output_item.done", {"output_index": opened.index, "item": item})
        if isinstance(item, ResponseCall):
            item.arguments = text
            place = {"item_id": item.id, "output_index": opened.index}
            fields = {**place, "name": item.name, "arguments": text}
            return [("response.function_call_arguments.done", fields), done]
        part = ResponseText(text, logprobs=opened.logprobs)
        item.content = [part]
        fields = {**_at(opened), "text": text, "logprobs": opened.logprobs}
        return [
            ("response.output_text.done", fields),
            ("response.content_part.done", {**_at(opened), "part": part}),
            done,
        ]


def _at(opened: _Open) -> dict[str, Any]:
    return {"item_id": opened.item.id, "output_index": opened.index, "content_index": 0}


def _added(opened: _Open) -> _Event:
    # Copy the item, because the same piece may extend and end it before serialization.
    return "response.output_item.added", {"output_index": opened.index, "item": copy(opened.item)}


class ResponseWriter:
    """Serializes responses."""

    def __init__(
        self,
        name: str,
        created: int,
        echo: bytes,
        grow: Callable[[int, str], None],
        *,
        has_logprobs: bool,
    ) -> None:
        """`echo` is the JSON of an Echo, which may be long and so is serialized only once.

        `grow` reserves memory for the parts of a streamed response that are kept until its end.
        """
        self._name = name
        self._created = created
        self._echo = memoryview(echo)[:-1]
        """Without the closing brace: the other fields of a response follow."""
        self._grow = grow
        self._output = _Output(has_logprobs=has_logprobs)
        self._has_logprobs = has_logprobs
        self._finish_reason = ""
        self._number = 0
        """Sequence number of the next event."""

    def whole(self, choices: Sequence[Whole], usage: Usage) -> bytes:
        """Return the body of a response that is not streamed."""
        (choice,) = choices
        for piece in choice.pieces:
            self._output.take(piece)
        self._finish_reason = choice.finish_reason
        self._output.end(self._status)
        return b"".join(self._ended(usage))

    def events(self, index: int, piece: Piece, *, is_first: bool) -> Sequence[bytes]:
        """Return the events for a piece."""
        self._reserve(piece)
        written: list[bytes] = []
        if is_first:
            begun = self._response()
            names = ("response.created", "response.in_progress")
            written = [self._response_event(name, begun) for name in names]
        self._finish_reason = piece.finish_reason or ""
        return [*written, *(self._event(*event) for event in self._output.take(piece))]

    def end(self, usage: Usage) -> Sequence[bytes]:
        """Return the events that end the last item and the response."""
        written = [self._event(*event) for event in self._output.end(self._status)]
        return [*written, self._response_event(f"response.{self._status}", self._ended(usage))]

    def fail(self, body: bytes) -> Sequence[bytes]:
        """Return the error event and the event that ends the response as failed."""
        error = msgspec.json.decode(body, type=ErrorBody).error
        code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"] = "server_error"
        if error.type in ("requests", "invalid_request_error"):
            code = "rate_limit_exceeded" if error.type == "requests" else "invalid_prompt"
        failed = self._response(status="failed", error=ResponseError(code, error.message))
        fields = {"code": error.code, "message": error.message, "param": error.param}
        return [self._event("error", fields), self._response_event("response.failed", failed)]

    @property
    def _status(self) -> Literal["completed", "incomplete"]:
        return "incomplete" if self._finish_reason == "length" else "completed"

    def _reserve(self, piece: Piece) -> None:
        texts = [piece.text, *(call.arguments for call in piece.calls)]
        size = sum(len(text.encode(errors="surrogatepass")) for text in texts)
        if piece.token is not None and self._has_logprobs:
            size += len(msgspec.json.encode(logprobs_of([piece.token])))
        self._grow(_KEPT_BYTES + _KEPT_TIMES * size, "the answer")

    def _ended(self, usage: Usage) -> Sequence[Buffer]:
        reported = ResponseUsage(
            usage.prompt_tokens,
            InputDetails(usage.prompt_tokens_details.cached_tokens),
            usage.completion_tokens,
            OutputDetails(),
            usage.total_tokens,
        )
        is_cut = self._status == "incomplete"
        return self._response(
            status=self._status,
            completed_at=None if is_cut else int(time.time()),
            incomplete_details=Incomplete() if is_cut else None,
            output=self._output.items,
            usage=reported,
        )

    def _response(self, **more: Any) -> Sequence[Buffer]:
        """Return the JSON of a response, in parts."""
        state = _State(id=self._name, created_at=self._created, **more)
        return self._echo, b",", msgspec.json.encode(state)[1:]

    def _response_event(self, kind: str, response: Sequence[Buffer]) -> bytes:
        """Return an event of the given type that contains the response."""
        head = b'event: %b\ndata: {"type":"%b","sequence_number":%d,"response":'
        start = head % (kind.encode(), kind.encode(), self._number)
        self._number += 1
        return b"".join((start, *response, b"}\n\n"))

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        text = msgspec.json.encode({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), text)
