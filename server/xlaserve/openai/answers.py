"""Response bodies of completions and chat completions, complete or streamed in chunks."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

from xlaserve.openai.choices import CallPiece, Piece, TokenLogprob

_DONE = b"data: [DONE]\n\n"
_UNKNOWN = "\ufffd"
"""Marks invalid UTF-8 in the text of a single token."""


class PromptDetails(msgspec.Struct):
    """Details about the prompt's tokens."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


# --- Log probabilities -------------------------------------------------------------------------


class TopLogprob(msgspec.Struct):
    """One of the most likely tokens at a position."""

    token: str
    logprob: float
    bytes: list[int] | None
    """The token's UTF-8 bytes; null if the token is not valid UTF-8 by itself."""


class ChatToken(TopLogprob):
    """A generated token with the most likely alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """The log probabilities of a chat choice."""

    content: list[ChatToken]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """The log probabilities of a completion choice; parallel lists with an entry per token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]
    """Start of each token in the text, in characters."""


# --- Chat --------------------------------------------------------------------------------------


class CalledFunction(msgspec.Struct):
    """The function that a tool call names."""

    name: str
    arguments: str
    """The arguments as the model wrote them, which should be JSON."""


class Call(msgspec.Struct):
    """A tool call."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ChatAnswer(msgspec.Struct):
    """The model's message."""

    content: str | None
    """The message's text; None if the message has tool calls and no text."""
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[Call] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    """One choice of a chat completion."""

    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatCompletion(msgspec.Struct, kw_only=True):
    """A chat completion."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    """Unix time in seconds."""
    model: str
    choices: list[ChatChoice]
    usage: Usage


class FunctionDelta(msgspec.Struct, omit_defaults=True):
    """A fragment of the function of a tool call."""

    arguments: str
    """A fragment of the arguments."""
    name: str | None = None


class CallDelta(msgspec.Struct, omit_defaults=True):
    """A fragment of a tool call; the first one has the id, the type and the function's name."""

    index: int
    function: FunctionDelta
    id: str | None = None
    type: Literal["function"] | None = None


class Delta(msgspec.Struct, omit_defaults=True):
    """An increment of a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChatChunkChoice(msgspec.Struct):
    """An increment of one choice of a chat completion."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatChunk(msgspec.Struct, kw_only=True):
    """A chunk of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


# --- Completions -------------------------------------------------------------------------------


class CompletionChoice(msgspec.Struct):
    """One choice of a completion, or an increment of one."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class Completion(msgspec.Struct, kw_only=True):
    """A completion, or a chunk of a streamed one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


# --- Writers -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Whole:
    """Collects the pieces of one choice for a response that is not streamed."""

    pieces: list[Piece] = field(default_factory=list)
    """The pieces in the order in which they were generated."""

    @property
    def text(self) -> str:
        """Return the text of all pieces."""
        return "".join([piece.text for piece in self.pieces])

    @property
    def tokens(self) -> list[TokenLogprob]:
        """Return the tokens that have log probabilities."""
        return [piece.token for piece in self.pieces if piece.token is not None]

    @property
    def calls(self) -> list[Call]:
        """Return the tool calls, each with its complete arguments."""
        calls: list[Call] = []
        for piece in self.pieces:
            for more in piece.calls:
                if more.name is not None:
                    calls.append(Call(more.id or "", CalledFunction(more.name, "")))
                calls[more.number].function.arguments += more.arguments
        return calls

    @property
    def finish_reason(self) -> str:
        """Return why generation ended, or an empty string if it has not."""
        return self.pieces[-1].finish_reason or "" if self.pieces else ""


class Writer(Protocol):
    """Serializes the responses of one endpoint."""

    def whole(self, choices: Sequence[Whole], usage: Usage) -> bytes:
        """Return the body of a response that is not streamed."""
        ...

    def events(self, index: int, piece: Piece, *, is_first: bool) -> Sequence[bytes]:
        """Return the server-sent events for a piece of a choice, if there are any."""
        ...

    def end(self, usage: Usage) -> Sequence[bytes]:
        """Return the events that follow the last piece."""
        ...

    def fail(self, body: bytes) -> Sequence[bytes]:
        """Return the final events of a failed stream, given the body of its error."""
        ...


class ChunkWriter(ABC):
    """Serializes unnamed events, one per chunk, and a final `[DONE]`."""

    def __init__(self, name: str, model: str, created: int, *, includes_usage: bool) -> None:
        self._name = name
        self._model = model
        self._created = created
        self._includes_usage = includes_usage
        self._no_usage = None if includes_usage else msgspec.UNSET

    @abstractmethod
    def begin(self, index: int) -> bytes | None:
        """Return the first chunk of a choice, or None."""

    @abstractmethod
    def chunk(self, index: int, piece: Piece) -> bytes:
        """Return the chunk for a piece of a choice."""

    @abstractmethod
    def usage(self, usage: Usage) -> bytes:
        """Return the chunk with the token counts."""

    def events(self, index: int, piece: Piece, *, is_first: bool) -> Sequence[bytes]:
        """Return the chunks for a piece of a choice, if there are any."""
        first = self.begin(index) if is_first else None
        events = [] if first is None else [_event(first)]
        if piece.text or piece.token or piece.calls or piece.finish_reason:
            events.append(_event(self.chunk(index, piece)))
        return events

    def end(self, usage: Usage) -> Sequence[bytes]:
        """Return `[DONE]`, after the token counts if they were requested."""
        return [_event(self.usage(usage)), _DONE] if self._includes_usage else [_DONE]

    def fail(self, body: bytes) -> Sequence[bytes]:
        """Return the error as an event."""
        return [_event(body)]


def _event(text: bytes) -> bytes:
    """Format JSON, which must not contain line breaks, as a server-sent event."""
    return b"data: %b\n\n" % text


class ChatWriter(ChunkWriter):
    """Serializes chat completions."""

    def __init__(
        self, name: str, model: str, created: int, *, has_logprobs: bool, includes_usage: bool
    ) -> None:
        super().__init__(name, model, created, includes_usage=includes_usage)
        self._has_logprobs = has_logprobs

    def whole(self, choices: Sequence[Whole], usage: Usage) -> bytes:
        """Return the body of a response that is not streamed."""
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
        """Return the chunk with the role."""
        delta = Delta("assistant", "")
        return self._chunk([ChatChunkChoice(index, delta, None, None)], self._no_usage)

    def chunk(self, index: int, piece: Piece) -> bytes:
        """Return the chunk for a piece of a choice."""
        delta = Delta(
            content=piece.text or None, tool_calls=[_delta(call) for call in piece.calls] or None
        )
        logprobs = None if piece.token is None else self._logprobs([piece.token])
        choice = ChatChunkChoice(index, delta, logprobs, piece.finish_reason)
        return self._chunk([choice], self._no_usage)

    def usage(self, usage: Usage) -> bytes:
        """Return the chunk with the token counts."""
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
    """Return the log probabilities of tokens and of their most likely alternatives."""
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
    """Serializes text completions."""

    def __init__(
        self, name: str, model: str, created: int, *, tops: int | None, includes_usage: bool
    ) -> None:
        super().__init__(name, model, created, includes_usage=includes_usage)
        self._tops = tops
        self._offsets: dict[int, int] = {}
        """For each choice, the start of its next token in characters."""

    def whole(self, choices: Sequence[Whole], usage: Usage) -> bytes:
        """Return the body of a response that is not streamed."""
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
        """Return None: completions have no initial chunk."""
        return None

    def chunk(self, index: int, piece: Piece) -> bytes:
        """Return the chunk for a piece of a choice."""
        logprobs = None if piece.token is None else self._logprobs(index, [piece.token])
        choice = CompletionChoice(index, piece.text, logprobs, piece.finish_reason)
        return self._written([choice], self._no_usage)

    def usage(self, usage: Usage) -> bytes:
        """Return the chunk with the token counts."""
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
