"""Request bodies of the Responses API: fields, input items and their parts."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from xlaserve.generation.asking import MOST_LOGPROBS
from xlaserve.openai.bodies import Count, Sampling, body_of, check_json, invalid, read_body, refuse
from xlaserve.openai.errors import UNSUPPORTED, InvalidField
from xlaserve.openai.fields import RESPONSE_HINTS, RESPONSE_REFUSED
from xlaserve.openai.tool_bodies import MOST_TOOLS, Function, Name, ObjectFormat, TextFormat

MOST_PAIRS = 16
MOST_KEY = 64
MOST_VALUE = 512
"""OpenAI's limits on metadata: the number of pairs, and characters per key and value."""

LOGPROBS = "message.output_text.logprobs"
_Ignored: TypeAlias = msgspec.Raw | msgspec.UnsetType
_Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]


# --- Input items -------------------------------------------------------------------------------


class InputText(msgspec.Struct, tag_field="type", tag="input_text", forbid_unknown_fields=True):
    """An input text."""

    text: str


class OutputText(msgspec.Struct, tag_field="type", tag="output_text", forbid_unknown_fields=True):
    """A text of an earlier response."""

    text: str
    annotations: _Ignored = msgspec.UNSET
    logprobs: _Ignored = msgspec.UNSET
    parsed: _Ignored = msgspec.UNSET
    """Added by OpenAI's client; ignored."""


class MessageItem(msgspec.Struct, forbid_unknown_fields=True):
    """A message."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[InputText | OutputText], msgspec.Meta(min_length=1)]
    type: Literal["message"] | None = None
    id: str | None = None
    status: _Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class CallItem(msgspec.Struct, forbid_unknown_fields=True):
    """A function call of an earlier response."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: _Status | None = None
    parsed_arguments: _Ignored = msgspec.UNSET
    """Added by OpenAI's client; ignored."""


class ResultItem(msgspec.Struct, forbid_unknown_fields=True):
    """The result of a function call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Annotated[list[InputText], msgspec.Meta(min_length=1)]
    id: str | None = None
    status: _Status | None = None


Item: TypeAlias = MessageItem | CallItem | ResultItem


class _Kind(msgspec.Struct):
    type: str | None = None


_KIND = msgspec.json.Decoder(_Kind)
_ITEMS: dict[str, msgspec.json.Decoder[Any]] = {
    "message": msgspec.json.Decoder(MessageItem),
    "function_call": msgspec.json.Decoder(CallItem),
    "function_call_output": msgspec.json.Decoder(ResultItem),
}


def read_item(raw: msgspec.Raw, place: str) -> Item:
    """Decode an input item; raises InvalidBody or InvalidField."""
    decoder: msgspec.json.Decoder[Any] = _KIND
    try:
        kind = _KIND.decode(raw).type or "message"
        decoder = _ITEMS.get(kind, decoder)
        if decoder is not _KIND:
            found: Item = decoder.decode(raw)
            return found
    except msgspec.ValidationError as error:
        check_json(memoryview(raw))
        raise invalid(str(error), memoryview(raw), decoder.type, place) from None
    known = " or ".join(f'"{name}"' for name in _ITEMS)
    raise InvalidField(f"{place}.type", known, f'"{kind}"', code=UNSUPPORTED)


# --- Fields ------------------------------------------------------------------------------------


class FunctionTool(Function, tag_field="type", tag="function", forbid_unknown_fields=True):
    """A function tool."""


class FunctionChoice(msgspec.Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    """A function that the model must call."""

    name: Name


class SchemaText(msgspec.Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    """The text format of a response that must follow a JSON schema."""

    name: Name
    schema: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    """JSON schema of the output; if absent, any JSON is allowed."""
    description: str | None = None
    strict: bool | None = None
    """Ignored: responses always follow the schema."""


class TextFields(msgspec.Struct, forbid_unknown_fields=True):
    """Options of output texts."""

    format: TextFormat | ObjectFormat | SchemaText | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """Ignored."""


class Reasoning(msgspec.Struct, forbid_unknown_fields=True):
    """Reasoning options."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """Passed to the chat template, which may ignore it."""
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Ignored: responses have no reasoning items."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """Deprecated name of `summary`."""


class ResponseFields(Sampling, kw_only=True):
    """The supported fields of a response request."""

    input: str | Annotated[list[msgspec.Raw], msgspec.Meta(min_length=1)]
    """A user's text, or input items."""
    instructions: str | None = None
    """A system message before the input."""
    max_output_tokens: Count | None = None
    """The default is the rest of the context."""
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = (
        None
    )
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MOST_LOGPROBS)] | None = None
    text: TextFields | None = None
    reasoning: Reasoning | None = None
    tools: Annotated[list[FunctionTool], msgspec.Meta(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    """Whether a response may have several tool calls; default true."""
    metadata: dict[str, str] | None = None
    """Returned with the response; MOST_PAIRS, MOST_KEY and MOST_VALUE limit it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template, such as `{"enable_thinking": false}`."""


ResponseRequest = body_of("ResponseRequest", ResponseFields, RESPONSE_HINTS, RESPONSE_REFUSED)
_RESPONSE = msgspec.json.Decoder(ResponseRequest)


def read_fields(body: memoryview, *, max_depth: int) -> ResponseFields:
    """Decode a response request; raises InvalidBody or InvalidField."""
    fields = read_body(body, _RESPONSE, max_depth)
    refuse(fields, RESPONSE_REFUSED, "")
    _check_metadata(fields.metadata or {})
    return fields


def _check_metadata(given: Mapping[str, str]) -> None:
    if len(given) > MOST_PAIRS:
        raise InvalidField("metadata", f"at most {MOST_PAIRS} pairs", str(len(given)))
    for key, value in given.items():
        if len(key) > MOST_KEY:
            expected = f"keys of at most {MOST_KEY} characters"
            raise InvalidField("metadata", expected, f"{len(key)} in '{key[:MOST_KEY]}...'")
        if len(value) > MOST_VALUE:
            expected = f"a text of at most {MOST_VALUE} characters"
            raise InvalidField(f"metadata.{key}", expected, f"{len(value)} characters")
