"""Converts the generated tokens of a choice to text and finds where it ends."""

import secrets
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from xlaserve.language.text import LanguageText
from xlaserve.language.tool_calls import CallDelta, Parsed, ToolCalls
from xlaserve.serving.inference import DetailedResponse, InferResponse
from xlaserve.tensors import Parameter, Tensor

_LEAST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot represent."""

_TOKEN_BYTES = 256
_TOP_BYTES = 192
"""Memory bounds until the response is sent: _TOKEN_BYTES per token, and _TOP_BYTES for its log
probability and for that of each alternative."""


class TokenLogprob(NamedTuple):
    """The text and log probability of a token."""

    text: str
    logprob: float
    likeliest: "Sequence[TokenLogprob]" = ()
    """The most likely tokens at the same position, in descending order."""


class CallPiece(NamedTuple):
    """An increment of a tool call."""

    number: int
    """Index of the call within the choice, from 0."""
    id: str | None
    """The call's id, set in the first increment only, like the name."""
    name: str | None
    arguments: str


class Piece(NamedTuple):
    """An increment of a choice."""

    text: str
    token: TokenLogprob | None = None
    """The token's log probabilities; None if they were not requested, and for the stop token."""
    finish_reason: str | None = None
    """Why the generation ended; None while it continues."""
    calls: Sequence[CallPiece] = ()


class Choice:
    """A choice that is being generated."""

    def __init__(
        self,
        text: LanguageText,
        stop: Sequence[str],
        tops: int | None,
        calls: ToolCalls | None = None,
    ) -> None:
        """`calls` parses tool calls, if there may be any. Raises InvalidParameter."""
        self._text = text
        self._calls = calls
        self._detokenizer = text.detokenizer(stop, () if calls is None else calls.marks)
        self._tops = tops
        self.tokens = 0
        """Number of generated tokens, including the stop token."""
        self.cached_tokens = 0
        """Number of prompt tokens found in the prefix cache."""
        self.finish_reason: str | None = None

    @property
    def token_bytes(self) -> int:
        """Return an upper bound of the memory for a token, in bytes."""
        return _TOKEN_BYTES + _TOP_BYTES * (1 + self._tops if self._tops is not None else 0)

    def take(self, response: InferResponse) -> Piece:
        """Convert a token to an increment; must not be called after the end of the choice."""
        outputs = {output.name: output.data for output in response.outputs}
        parameters: Mapping[str, Parameter] = {}
        if isinstance(response, DetailedResponse):
            parameters = response.parameters
        reason = parameters.get("finish_reason")
        is_stop = parameters.get("stop_token") is True
        text, token = "", None
        if outputs:
            self.tokens += 1
            number = int(outputs["token"][0])
            if not is_stop:
                text = self._detokenizer.push(number)
                token = self._logprob(number, outputs)
        if self._detokenizer.stopped is not None:
            self.finish_reason = "stop"
        elif reason is not None:
            self.cached_tokens = int(parameters.get("cached_tokens") or 0)
            text += self._detokenizer.end()
            # The remaining text may complete a stop text.
            is_stopped = self._detokenizer.stopped is not None
            self.finish_reason = "stop" if is_stopped else str(reason)
        return self._piece(text, token)

    def _piece(self, text: str, token: TokenLogprob | None) -> Piece:
        """Split text into content and tool calls."""
        parser = self._calls
        if parser is None:
            return Piece(text, token, self.finish_reason)
        found = [parser.push(text)]
        if parser.is_complete and self.finish_reason is None:
            self.finish_reason = "stop"
        if self.finish_reason is not None:
            found.append(parser.end())
            if self.finish_reason == "stop" and parser.count:
                self.finish_reason = "tool_calls"
        more = "".join(part for one in found for part in one.text)
        return Piece(more, token, self.finish_reason, _pieces(found))

    def _logprob(self, number: int, outputs: Mapping[str, Tensor]) -> TokenLogprob | None:
        if self._tops is None:
            return None
        likeliest = [
            self._one(int(token), float(logprob))
            for token, logprob in zip(outputs["top_tokens"], outputs["top_logprobs"], strict=True)
        ]
        one = self._one(number, float(outputs["logprob"][0]))
        return one._replace(likeliest=likeliest)

    def _one(self, token: int, logprob: float) -> TokenLogprob:
        written = self._text.decode([token])
        # NaN is replaced too, because the comparison is false for it.
        return TokenLogprob(written, logprob if logprob > _LEAST_LOGPROB else _LEAST_LOGPROB)


def _pieces(found: Sequence[Parsed]) -> Sequence[CallPiece]:
    return [_call(delta) for one in found for delta in one.calls]


def _call(delta: CallDelta) -> CallPiece:
    name = None if delta.name is None else f"call_{secrets.token_hex(12)}"
    return CallPiece(delta.index, name, delta.name, delta.arguments)
