"""OpenAI requests as generations: prompts, parameters and answers."""

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
"""Default for completions; chats have none."""
_LEAST_TOP_P = 1e-9
"""Replaces 0, which keeps the likeliest token alone."""
_SEEDS = 1 << 63
_THINKING = ("enable_thinking", "thinking")
"""Template variables that enable thinking: Qwen's, and Granite's and DeepSeek's."""
_SAME = (
    *("presence_penalty", "frequency_penalty", "min_p", "repetition_penalty"),
    *("min_tokens", "ignore_eos"),
)
"""Fields passed on as parameters of a generator."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, whatever its endpoint."""

    model: str
    prompts: Sequence[Prompt]
    """Prompts of a completion; empty for a chat."""
    messages: Sequence[Message]
    """Messages of a chat; empty for a completion."""
    count: int
    """Choices for each prompt."""
    seed: int | None
    parameters: Mapping[str, Parameter]
    """Parameters of each generation, without the seed."""
    stop: Sequence[str]
    tops: int | None
    """Number of likeliest tokens returned with each; None for no log-probabilities."""
    streams: bool
    includes_usage: bool
    """Whether the last chunk of a stream tells the numbers of tokens."""
    form: Form = forms.ANY
    variables: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Further variables of a chat's template."""
    echoes: bool = False
    """Whether answers begin with their prompts."""
    prompt_field: str = "prompt"
    path: str = "/v1/completions"
    characters: int = 0
    """How long the prompts are, or the messages and the tools for their template."""
    echoed_bytes: int = 0
    """How long the JSON is that an answer repeats of the request."""
    most_field: str = "max_tokens"
    """The name of the field with the most tokens of an answer."""

    @property
    def fields(self) -> Mapping[str, str]:
        """Return the fields that become parameters of other names."""
        form = self.form.format_field
        return {"json_schema": form, "grammar": "tools", "max_tokens": self.most_field}

    @property
    def choices(self) -> int:
        """Return the number of requested answers."""
        return self.count * max(1, len(self.prompts))

    def parameters_of(self, index: int) -> Mapping[str, Parameter]:
        """Return the parameters of one of the choices for a prompt.

        With a seed each choice has a seed of its own, the first one that which was given.
        """
        if self.seed is None:
            return self.parameters
        return {**self.parameters, "seed": (self.seed + index) % _SEEDS}


def read_completion(text: memoryview, *, max_depth: int) -> Asked:
    """Read a request for completions; raises InvalidBody or InvalidField."""
    body = bodies.read_completion(text, max_depth=max_depth)
    most = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if body.echo and body.logprobs is not None:
        expected = "false or null with logprobs, since those of a prompt are not computed"
        raise InvalidField("echo", expected, "true", code=UNSUPPORTED)
    asked = asked_of(body, listed("prompt", body.prompt), (), most, body.logprobs)
    return measured(replace(asked, echoes=bool(body.echo)))


def read_chat(text: memoryview, *, max_depth: int) -> Asked:
    """Read a request for chat completions; raises InvalidBody or InvalidField."""
    body = bodies.read_chat(text, max_depth=max_depth)
    most, other = body.max_completion_tokens, body.max_tokens
    if most is not None and other is not None and most != other:
        raise InvalidField(
            "max_tokens", f"{most}, as max_completion_tokens has it, or none", str(other)
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidField("top_logprobs", "none without logprobs", str(body.top_logprobs))
    tops = (body.top_logprobs or 0) if body.logprobs else None
    messages = tuple(_message(message, at) for at, message in enumerate(body.messages))
    asked = asked_of(body, (), messages, other if most is None else most, tops)
    whole = replace(
        asked,
        form=forms.read(forms.wanted(body)),
        variables=variables(body.reasoning_effort, body.chat_template_kwargs or {}),
        prompt_field="messages",
        path="/v1/chat/completions",
        most_field="max_tokens" if most is None else "max_completion_tokens",
    )
    return measured(whole)


def measured(asked: Asked) -> Asked:
    """Return it with its length, which takes as long to find out as the body is long."""
    if not asked.messages:
        found = sum(len(prompt) for prompt in asked.prompts if isinstance(prompt, str))
        return replace(asked, characters=found)
    given = len(json.dumps(dict(asked.variables))) + sum(map(_characters, asked.messages))
    return replace(asked, characters=given + asked.form.characters)


def variables(effort: str | None, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the variables that a request gives the template; raises InvalidField."""
    found: dict[str, Any] = {}
    if effort is not None:
        found = {"reasoning_effort": effort, **dict.fromkeys(_THINKING, effort != "none")}
    for name in given:
        if name in OWN_VARIABLES:
            expected = f"no variable of the server's own ({', '.join(sorted(OWN_VARIABLES))})"
            raise InvalidField("chat_template_kwargs", expected, f"'{name}'")
    return {**found, **given}


def asked_of(
    body: Sampling,
    prompts: Sequence[Prompt],
    messages: Sequence[Message],
    most: int | None,
    tops: int | None,
) -> Asked:
    """Return what the fields of all endpoints ask for; raises InvalidField."""
    options = body.stream_options
    if options is not None and not body.stream:
        raise InvalidField("stream_options", "none without stream", "an object")
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return Asked(
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
    """Return a message in the template's form; raises InvalidField."""
    content, calls, place = message.content, message.tool_calls or [], f"messages[{index}]."
    if calls and message.role != "assistant":
        raise InvalidField(f"{place}tool_calls", "none but of role assistant", f"{len(calls)}")
    if (message.tool_call_id is None) == (message.role == "tool"):
        raise InvalidField(
            f"{place}tool_call_id",
            "one of role tool, and no other",
            "none" if message.tool_call_id is None else "one",
        )
    if content is None and not calls:
        raise InvalidField(f"{place}content", "a text, or parts of one", "none")
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
    """Return a call in the template's form: its arguments as data, if they are an object."""
    arguments: Any = call.function.arguments
    try:
        text = arguments.encode(errors="surrogatepass")
        check_members(text)
        check_elements(text)
        read = json.loads(arguments)
    except (ValueError, RecursionError):
        read = None  # one that was cut
    function = {"name": call.function.name, "arguments": read if type(read) is dict else arguments}
    return {"id": call.id, "type": "function", "function": function}


def _characters(message: Message) -> int:
    calls = message.get("tool_calls")
    return len(message["content"]) + (len(json.dumps(calls)) if calls else 0)


def listed(name: str, value: str | list[str | int | list[int]]) -> Sequence[Prompt]:
    """Return a text or token ids, or several of either, as a list; raises InvalidField."""
    if isinstance(value, str):
        return (value,)
    if not value:
        raise InvalidField(name, "at least one text or token", "[]")
    kinds = {type(part) for part in value}
    if len(kinds) > 1:
        got = msgspec.json.encode(value[:4]).decode()
        raise InvalidField(name, "texts, token ids, or lists of token ids alone", got)
    if int in kinds:
        return (cast(list[int], value),)
    return cast(list[Prompt], value)
