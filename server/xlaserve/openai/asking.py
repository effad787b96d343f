"""Converts requests of OpenAI's endpoints to prompts and generation parameters."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeAlias, cast

import msgspec

from xlaserve.http.json.json_text import check_elements, check_members
from xlaserve.language.templates import OWN_VARIABLES
from xlaserve.openai import bodies, forms
from xlaserve.openai.bodies import Sampling
from xlaserve.openai.errors import UNSUPPORTED, InvalidField
from xlaserve.openai.forms import Form
from xlaserve.openai.tool_bodies import ToolCall
from xlaserve.tensors import Parameter

Prompt: TypeAlias = str | Sequence[int]
Message: TypeAlias = Mapping[str, Any]

_DEFAULT_TEMPERATURE = 1.0
_DEFAULT_MAX_TOKENS = 16
"""Default for completions; chats have no default limit."""
_LEAST_TOP_P = 1e-9
"""Replaces a top_p of 0, and keeps only the most likely token."""
_SEEDS = 1 << 63
_THINKING = ("enable_thinking", "thinking")
"""Template variables that enable thinking: Qwen's, and Granite's and DeepSeek's."""
_SAME = (
    *("presence_penalty", "frequency_penalty", "min_p", "repetition_penalty"),
    *("min_tokens", "ignore_eos"),
)
"""Fields whose names and values become generation parameters unchanged."""


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A parsed request of any endpoint that generates text."""

    model: str
    prompts: Sequence[Prompt]
    """Prompts of a completion; empty for a chat."""
    messages: Sequence[Message]
    """Messages of a chat; empty for a completion."""
    count: int
    """Choices per prompt."""
    seed: int | None
    parameters: Mapping[str, Parameter]
    """Parameters of each generation, except the seed."""
    stop: Sequence[str]
    tops: int | None
    """Number of most likely tokens to return for each token; None for no log probabilities."""
    streams: bool
    includes_usage: bool
    """Whether the last chunk of a stream has the token counts."""
    form: Form = forms.ANY
    variables: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Additional variables for the chat template."""
    echoes: bool = False
    """Whether responses begin with the prompt."""
    prompt_field: str = "prompt"
    path: str = "/v1/completions"
    characters: int = 0
    """Length of the prompts, or of the messages, tools and variables for the chat template."""
    echoed_bytes: int = 0
    """Size of the JSON that the response repeats from the request."""
    most_field: str = "max_tokens"
    """Name of the request's field for the maximum number of tokens."""

    @property
    def fields(self) -> Mapping[str, str]:
        """Map parameters to the request fields that they come from, if the names differ."""
        form = self.form.format_field
        return {"json_schema": form, "grammar": "tools", "max_tokens": self.most_field}

    @property
    def choices(self) -> int:
        """Return the total number of choices."""
        return self.count * max(1, len(self.prompts))

    def parameters_of(self, index: int) -> Mapping[str, Parameter]:
        """Return the parameters of one choice of a prompt.

        If the request has a seed, the first choice uses it, and the others use the numbers after
        it.
        """
        if self.seed is None:
            return self.parameters
        return {**self.parameters, "seed": (self.seed + index) % _SEEDS}


def read_completion(text: memoryview, *, max_depth: int) -> TextRequest:
    """Parse a completion request; raises InvalidBody or InvalidField."""
    body = bodies.read_completion(text, max_depth=max_depth)
    most = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if body.echo and body.logprobs is not None:
        expected = "false or null with logprobs, since prompt logprobs are not computed"
        raise InvalidField("echo", expected, "true", code=UNSUPPORTED)
    parsed = text_request_of(body, listed("prompt", body.prompt), (), most, body.logprobs)
    return measured(replace(parsed, echoes=bool(body.echo)))


def read_chat(text: memoryview, *, max_depth: int) -> TextRequest:
    """Parse a chat completion request; raises InvalidBody or InvalidField."""
    body = bodies.read_chat(text, max_depth=max_depth)
    most, other = body.max_completion_tokens, body.max_tokens
    if most is not None and other is not None and most != other:
        expected = f"no value, or {most} as max_completion_tokens"
        raise InvalidField("max_tokens", expected, str(other))
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidField("top_logprobs", "no value without logprobs", str(body.top_logprobs))
    tops = (body.top_logprobs or 0) if body.logprobs else None
    messages = tuple(_message(message, at) for at, message in enumerate(body.messages))
    parsed = text_request_of(body, (), messages, other if most is None else most, tops)
    whole = replace(
        parsed,
        form=forms.read(forms.wanted(body)),
        variables=variables(body.reasoning_effort, body.chat_template_kwargs or {}),
        prompt_field="messages",
        path="/v1/chat/completions",
        most_field="max_tokens" if most is None else "max_completion_tokens",
    )
    return measured(whole)


def measured(parsed: TextRequest) -> TextRequest:
    """Return the request with `characters` set; this takes time linear in its size."""
    if not parsed.messages:
        found = sum(len(prompt) for prompt in parsed.prompts if isinstance(prompt, str))
        return replace(parsed, characters=found)
    given = len(json.dumps(dict(parsed.variables))) + sum(map(_characters, parsed.messages))
    return replace(parsed, characters=given + parsed.form.characters)


def variables(effort: str | None, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the template variables of a request; raises InvalidField for a reserved name."""
    found: dict[str, Any] = {}
    if effort is not None:
        found = {"reasoning_effort": effort, **dict.fromkeys(_THINKING, effort != "none")}
    for name in given:
        if name in OWN_VARIABLES:
            expected = f"no reserved variable ({', '.join(sorted(OWN_VARIABLES))})"
            raise InvalidField("chat_template_kwargs", expected, f"'{name}'")
    return {**found, **given}


def text_request_of(
    body: Sampling,
    prompts: Sequence[Prompt],
    messages: Sequence[Message],
    most: int | None,
    tops: int | None,
) -> TextRequest:
    """Convert the fields that all endpoints share; raises InvalidField."""
    options = body.stream_options
    if options is not None and not body.stream:
        raise InvalidField("stream_options", "no value without stream", "an object")
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return TextRequest(
        body.model,
        prompts,
        messages,
        1 if body.n is None else body.n,
        None if body.seed is None else body.seed % _SEEDS,
        _parameters(body, most, tops),
        stop,
        tops,
        bool(body.stream),
        options is not None and bool(options.include_usage),
    )


def _parameters(body: Sampling, most: int | None, tops: int | None) -> Mapping[str, Parameter]:
    temperature = _DEFAULT_TEMPERATURE if body.temperature is None else body.temperature
    found: dict[str, Parameter] = {"temperature": temperature, "logprobs": tops or 0}
    for name in _SAME:
        value = getattr(body, name)
        if value is not None:
            found[name] = value
    if most is not None:
        found["max_tokens"] = most
    if body.top_p is not None:
        found["top_p"] = max(body.top_p, _LEAST_TOP_P)
    if body.top_k is not None:
        found["top_k"] = max(body.top_k, 0)
    if body.stop_token_ids:
        found["stop_token_ids"] = ",".join(map(str, body.stop_token_ids))
    if body.logit_bias:
        found["logit_bias"] = ",".join(map(_biased, body.logit_bias.items()))
    return found


def _biased(entry: tuple[str, float]) -> str:
    token, bias = entry
    if not (token.isascii() and token.isdigit()):
        raise InvalidField("logit_bias", "token ids in digits", f"'{token}'")
    return f"{token}:{bias}"


def _message(message: Any, index: int) -> Message:
    """Convert a message to the form that chat templates expect; raises InvalidField."""
    content, calls, place = message.content, message.tool_calls or [], f"messages[{index}]."
    if calls and message.role != "assistant":
        raise InvalidField(f"{place}tool_calls", "none except for role assistant", f"{len(calls)}")
    if (message.tool_call_id is None) == (message.role == "tool"):
        raise InvalidField(
            f"{place}tool_call_id",
            "only on messages of role tool",
            "none" if message.tool_call_id is None else "one",
        )
    if content is None and not calls:
        raise InvalidField(f"{place}content", "a string or text parts", "none")
    if not isinstance(content, str):
        content = "\n".join(part.text for part in content or ())
    found: dict[str, Any] = {"role": str(message.role), "content": content}
    for name in ("name", "tool_call_id"):
        if getattr(message, name) is not None:
            found[name] = getattr(message, name)
    if calls:
        found["tool_calls"] = [called(call) for call in calls]
    return found


def called(call: ToolCall) -> Mapping[str, Any]:
    """Convert a tool call to the form that chat templates expect.

    Arguments that are a JSON object are decoded; others, such as truncated ones, stay text.
    """
    arguments: Any = call.function.arguments
    try:
        text = arguments.encode(errors="surrogatepass")
        check_members(text)
        check_elements(text)
        read = json.loads(arguments)
    except (ValueError, RecursionError):
        read = None  # the JSON is truncated or invalid
    function = {"name": call.function.name, "arguments": read if type(read) is dict else arguments}
    return {"id": call.id, "type": "function", "function": function}


def _characters(message: Message) -> int:
    calls = message.get("tool_calls")
    return len(message["content"]) + (len(json.dumps(calls)) if calls else 0)


def listed(name: str, value: str | list[str | int | list[int]]) -> Sequence[Prompt]:
    """Return a prompt, or a list of prompts, as a list; raises InvalidField for mixed types."""
    if isinstance(value, str):
        return (value,)
    if not value:
        raise InvalidField(name, "at least one string or token", "[]")
    kinds = {type(part) for part in value}
    if len(kinds) > 1:
        got = msgspec.json.encode(value[:4]).decode()
        raise InvalidField(name, "only strings, only token ids, or only lists of token ids", got)
    if int in kinds:
        return (cast(list[int], value),)
    return cast(list[Prompt], value)
