"""The JSON of answers: completions and chat completions, whole and in chunks."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

from xlaserve.openai.choices import CallPiece, Piece, TokenLogprob

_DONE = b"data: [DONE]\n\n"
_UNKNOWN = "\ufffd"
"""Replaces invalid UTF-8 in the text of a single token."""


class PromptDetails(msgspec.Struct):
    """Details of the tokens of a prompt."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """The numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


# --- log-probabilities -------------------------------------------------------------------------


class TopLogprob(msgspec.Struct):
    """One of the likeliest tokens."""

    token: str
    logprob: float
    bytes: list[int] | None
    """Its octets; null if they are no text by themselves."""


class ChatToken(TopLogprob):
    """A token of an answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """The log-probabilities of a chat."""

    content: list[ChatToken]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """The log-probabilities of a completion, by token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]
    """Start of each token, in characters of the text."""


# --- chats -------------------------------------------------------------------------------------


class CalledFunction(msgspec.Struct):
    """The function of a call."""

    name: str
    arguments: str
    """The JSON of its arguments, as the model wrote it."""


class Call(msgspec.Struct):
    """A call of a tool."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ChatAnswer(msgspec.Struct):
    """The message of a model."""

    content: str | None
    """None if it calls tools and has no text."""
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[Call] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    """One choice of a chat."""

    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatCompletion(msgspec.Struct, kw_only=True):
    """A chat completion."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    """Seconds since the epoch."""
    model: str
    choices: list[ChatChoice]
    usage: Usage


class FunctionDelta(msgspec.Struct, omit_defaults=True):
    """A piece of a function call."""

    arguments: str
    """A piece of the JSON of its arguments."""
    name: str | None = None


class CallDelta(msgspec.Struct, omit_defaults=True):
    """More of a call; the first has its id, its type and the name of the function."""

    index: int
    function: FunctionDelta
    id: str | None = None
    type: Literal["function"] | None = None


class Delta(msgspec.Struct, omit_defaults=True):
    """The change of a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChatChunkChoice(msgspec.Struct):
    """The change of one choice of a chat."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatChunk(msgspec.Struct, kw_only=True):
    """An event of a streamed chat."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


# --- completions -------------------------------------------------------------------------------


class CompletionChoice(msgspec.Struct):
    """One choice of a completion, or its change."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class Completion(msgspec.Struct, kw_only=True):
    """A completion, or an event of a streamed one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


# --- writers -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Whole:
    """The pieces of one choice, until the answer is written."""

    pieces: list[Piece] = field(default_factory=list)
    """In the order in which they came."""

    @property
    def text(self) -> str:
        """Return the text of all pieces."""
        return "".join([piece.text for piece in self.pieces])

    @property
    def tokens(self) -> list[TokenLogprob]:
        """Return the tokens with log-probabilities."""
        return [piece.token for piece in self.pieces if piece.token is not None]

    @property
    def calls(self) -> list[Call]:
        """Return the calls, each with all of its arguments."""
        calls: list[Call] = []
        for piece in self.pieces:
            for more in piece.calls:
                if more.name is not None:
                    calls.append(Call(more.id or "", CalledFunction(more.name, "")))
                calls[more.number].function.arguments += more.arguments
        return calls

    @property
    def finish_reason(self) -> str:
        """Return why it has ended; empty while it goes on."""
        return self.pieces[-1].finish_reason or "" if self.pieces else ""


class Writer(Protocol):
    """Writes the answers of one endpoint."""

    def whole(self, choices: Sequence[Whole], usage: Usage) -> bytes:
        """Write the one answer."""
        ...

    def events(self, index: int, piece: Piece, *, is_first: bool) -> Sequence[bytes]:
        """Write the events of a piece of a choice, if any."""
        ...

    def end(self, usage: Usage) -> Sequence[bytes]:
        """Write the events after the last piece."""
        ...

    def fail(self, body: bytes) -> Sequence[bytes]:
        """Write the last events of an answer that fails, from the body of its error."""
        ...


class ChunkWriter(ABC):
    """Writes events without names, each a chunk, and `[DONE]` behind them."""

    def __init__(self, name: str, model: str, created: int, *, includes_usage: bool) -> None:
        self._name = name
        self._model = model
        self._created = created
        self._includes_usage = includes_usage
        self._no_usage = None if includes_usage else msgspec.UNSET

    @abstractmethod
    def begin(self, index: int) -> bytes | None:
        """Return the first chunk of a choice, if it has one."""

    @abstractmethod
    def chunk(self, index: int, piece: Piece) -> bytes:
        """Write a piece of a choice."""

    @abstractmethod
    def usage(self, usage: Usage) -> bytes:
        """Write the chunk with the numbers of tokens."""

    def events(self, index: int, piece: Piece, *, is_first: bool) -> Sequence[bytes]:
        """Write the chunks of a piece of a choice, if any."""
        first = self.begin(index) if is_first else None
        events = [] if first is None else [_event(first)]
        if piece.text or piece.token or piece.calls or piece.finish_reason:
            events.append(_event(self.chunk(index, piece)))
        return events

    def end(self, usage: Usage) -> Sequence[bytes]:
        """Write the numbers of tokens, if they are asked for, and the end."""
        return [_event(self.usage(usage)), _DONE] if self._includes_usage else [_DONE]

    def fail(self, body: bytes) -> Sequence[bytes]:
        """Write an error."""
        return [_event(body)]


def _event(text: bytes) -> bytes:
    """Write JSON, which holds no end of a line, as an event."""
    return b"data: %b\n\n" % text


class ChatWriter(ChunkWriter):
    """Writes chat completions (a Writer)."""

    def __init__(
        self, name: str, model: str, created: int, *, has_logprobs: bool, includes_usage: bool
    ) -> None:
        super().__init__(name, model, created, includes_usage=includes_usage)
        self._has_logprobs = has_logprobs

    def whole(self, choices: Sequence[Whole], usage: Usage) -> bytes:
        """Write the one answer."""
        written = [
            ChatChoice(
                index,
                _message(choice),
                self._logprobs(choice.tokens),
                choice.finish_reason,
            )
            for index, choice in enumerate(choices)
        ]
        return msgspec.json.encode(
            ChatCompletion(
                id=self._name,
                created=self._created,
                model=self._model,
                choices=written,
                usage=usage,
            )
        )

    def begin(self, index: int) -> bytes | None:
        """Write the chunk with the role."""
        delta = Delta("assistant", "")
        return self._chunk([ChatChunkChoice(index, delta, None, None)], self._no_usage)

    def chunk(self, index: int, piece: Piece) -> bytes:
        """Write a piece of a choice."""
        delta = Delta(
            content=piece.text or None, tool_calls=[_delta(call) for call in piece.calls] or None
        )
        logprobs = None if piece.token is None else self._logprobs([piece.token])
        choice = ChatChunkChoice(index, delta, logprobs, piece.finish_reason)
        return self._chunk([choice], self._no_usage)

    def usage(self, usage: Usage) -> bytes:
        """Write the chunk with the numbers of tokens."""
        return self._chunk([], usage)

    def _chunk(
        self, choices: list[ChatChunkChoice], usage: Usage | msgspec.UnsetType | None
    ) -> bytes:
        chunk = ChatChunk(
            id=self._name,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
        )
        return msgspec.json.encode(chunk)

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> ChatLogprobs | None:
        return ChatLogprobs(logprobs_of(tokens)) if self._has_logprobs else None


def _message(choice: Whole) -> ChatAnswer:
    text, calls = choice.text, choice.calls
    return ChatAnswer(text or None, tool_calls=calls) if calls else ChatAnswer(text)


def _delta(piece: CallPiece) -> CallDelta:
    function = FunctionDelta(piece.arguments, piece.name)
    if piece.id is None:
        return CallDelta(piece.number, function)
    return CallDelta(piece.number, function, piece.id, "function")


def logprobs_of(tokens: Sequence[TokenLogprob]) -> list[ChatToken]:
    """Return the log-probabilities of tokens with those of the likeliest."""
    return [
        ChatToken(
            *_chat_token(token),
            top_logprobs=[TopLogprob(*_chat_token(one)) for one in token.likeliest],
        )
        for token in tokens
    ]


def _chat_token(token: TokenLogprob) -> tuple[str, float, list[int] | None]:
    is_text = _UNKNOWN not in token.text
    return token.text, token.logprob, list(token.text.encode()) if is_text else None


class CompletionWriter(ChunkWriter):
    """Writes completions (a Writer)."""

    def __init__(
        self, name: str, model: str, created: int, *, tops: int | None, includes_usage: bool
    ) -> None:
        super().__init__(name, model, created, includes_usage=includes_usage)
        self._tops = tops
        self._offsets: dict[int, int] = {}
        """Characters of each choice's tokens so far."""

    def whole(self, choices: Sequence[Whole], usage: Usage) -> bytes:
        """Write the one answer."""
        written = [
            CompletionChoice(
                index,
                choice.text,
                self._logprobs(index, choice.tokens),
                choice.finish_reason,
            )
            for index, choice in enumerate(choices)
        ]
        return self._written(written, usage)

    def begin(self, index: int) -> bytes | None:
        """Return None: completions have no first chunk."""
        return None

    def chunk(self, index: int, piece: Piece) -> bytes:
        """Write a piece of a choice."""
        logprobs = None if piece.token is None else self._logprobs(index, [piece.token])
        choice = CompletionChoice(index, piece.text, logprobs, piece.finish_reason)
        return self._written([choice], self._no_usage)

    def usage(self, usage: Usage) -> bytes:
        """Write the chunk with the numbers of tokens."""
        return self._written([], usage)

    def _written(
        self, choices: list[CompletionChoice], usage: Usage | msgspec.UnsetType | None
    ) -> bytes:
        completion = Completion(
            id=self._name,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
        )
        return msgspec.json.encode(completion)

    def _logprobs(self, index: int, tokens: Sequence[TokenLogprob]) -> CompletionLogprobs | None:
        if self._tops is None:
            return None
        offsets = []
        for token in tokens:
            start = self._offsets.get(index, 0)
            offsets.append(start)
            self._offsets[index] = start + len(token.text)
        tops = None
        if self._tops:
            tops = [{one.text: one.logprob for one in token.likeliest} for token in tokens]
        return CompletionLogprobs(
            [token.text for token in tokens],
            [token.logprob for token in tokens],
            tops,
            offsets,
        )
