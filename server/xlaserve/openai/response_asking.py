"""Converts requests of the Responses API: input items become messages."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from xlaserve.openai import forms, response_bodies, tool_bodies
from xlaserve.openai.asking import TextRequest, called, measured, text_request_of, variables
from xlaserve.openai.errors import InvalidField
from xlaserve.openai.forms import Wanted
from xlaserve.openai.response_answers import Echo, ReasoningEcho, TextEcho
from xlaserve.openai.response_bodies import (
    LOGPROBS,
    CallItem,
    FunctionChoice,
    InputText,
    Item,
    MessageItem,
    OutputText,
    Reasoning,
    ResponseFields,
    SchemaText,
    TextFields,
)


def read_response(text: memoryview, *, max_depth: int) -> tuple[TextRequest, bytes]:
    """Parse a response request; return it and the JSON of the fields that responses repeat.

    Raises InvalidBody or InvalidField.
    """
    body = response_bodies.read_fields(text, max_depth=max_depth)
    if body.n not in (None, 1):
        raise InvalidField("n", "1 or null, since a response has one answer", str(body.n))
    has_logprobs = LOGPROBS in (body.include or ())
    if body.top_logprobs and not has_logprobs:
        expected = f'0 or null without "{LOGPROBS}" in include'
        raise InvalidField("top_logprobs", expected, str(body.top_logprobs))
    tops = (body.top_logprobs or 0) if has_logprobs else None
    effort = None if body.reasoning is None else body.reasoning.effort
    parsed = replace(
        text_request_of(body, (), _messages(body), body.max_output_tokens, tops),
        form=forms.read(_wanted(body)),
        variables=variables(effort, body.chat_template_kwargs or {}),
        prompt_field="input",
        path="/v1/responses",
        most_field="max_output_tokens",
    )
    echo = msgspec.json.encode(_echo(body))
    return measured(replace(parsed, echoed_bytes=len(echo))), echo


def _messages(body: ResponseFields) -> Sequence[dict[str, Any]]:
    """Convert the input to the messages that chat templates expect; raises InvalidField."""
    found: list[dict[str, Any]] = []
    if body.instructions:
        found.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*found, {"role": "user", "content": body.input}]
    for index, raw in enumerate(body.input):
        _add(found, response_bodies.read_item(raw, f"input[{index}]"))
    return found


def _add(messages: list[dict[str, Any]], item: Item) -> None:
    """Append an item to the messages; calls are added to the preceding assistant message."""
    if isinstance(item, MessageItem):
        messages.append({"role": str(item.role), "content": _joined(item.content)})
    elif isinstance(item, CallItem):
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        function = tool_bodies.CalledFunction(item.name, item.arguments)
        call = called(tool_bodies.ToolCall(item.call_id, function))
        messages[-1].setdefault("tool_calls", []).append(call)
    else:
        message = {"content": _joined(item.output), "tool_call_id": item.call_id}
        messages.append({"role": "tool", **message})


def _joined(content: str | Sequence[InputText | OutputText]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _wanted(body: ResponseFields) -> Wanted:
    parallel = body.parallel_tool_calls is not False
    return Wanted(_format(body), _choice(body), body.tools or (), parallel, "text.format", "")


def _format(body: ResponseFields) -> tool_bodies.ResponseFormat | None:
    form = None if body.text is None else body.text.format
    if not isinstance(form, SchemaText):
        return form
    schema = tool_bodies.Schema(form.name, form.description, form.schema, form.strict)
    return tool_bodies.SchemaFormat(schema)


def _choice(body: ResponseFields) -> tool_bodies.ToolChoice | None:
    choice = body.tool_choice
    if not isinstance(choice, FunctionChoice):
        return choice
    return tool_bodies.NamedTool(tool_bodies.FunctionName(choice.name))


def _echo(body: ResponseFields) -> Echo:
    reasoning, text = body.reasoning or Reasoning(), body.text or TextFields()
    return Echo(
        body.model,
        body.instructions,
        body.max_output_tokens,
        body.parallel_tool_calls is not False,
        ReasoningEcho(reasoning.effort, reasoning.summary or reasoning.generate_summary),
        1.0 if body.temperature is None else body.temperature,
        1.0 if body.top_p is None else body.top_p,
        TextEcho(_plain(text.format), text.verbosity or "medium"),
        body.tool_choice or "auto",
        body.tools or [],
        body.top_logprobs or 0,
        body.metadata or {},
    )


def _plain(form: tool_bodies.TextFormat | tool_bodies.ObjectFormat | SchemaText | None) -> Any:
    """Return the format with its schema on one line, because an event's data must be one line."""
    if isinstance(form, SchemaText) and form.schema is not msgspec.UNSET:
        schema = msgspec.json.format(bytes(form.schema), indent=-1)
        return msgspec.structs.replace(form, schema=msgspec.Raw(schema))
    return form or tool_bodies.TextFormat()
