"""Request bodies: supported fields with their types and limits."""

import codecs
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import inspect

from xlaserve.errors import InvalidBody
from xlaserve.generation.asking import MOST_LOGPROBS
from xlaserve.http.json.json_text import check_depth, check_elements, check_members
from xlaserve.openai.errors import UNKNOWN, UNSUPPORTED, InvalidField
from xlaserve.openai.fields import (
    CHAT_HINTS,
    CHAT_REFUSED,
    COMPLETION_HINTS,
    COMPLETION_REFUSED,
    EMBEDDING_HINTS,
    INSTEAD,
    MESSAGE_REFUSED,
)
from xlaserve.openai.tool_bodies import MOST_TOOLS, ResponseFormat, Tool, ToolCall, ToolChoice

B = TypeVar("B", bound=msgspec.Struct)

_LARGEST = 2**31 - 1

Token: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=_LARGEST)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=_LARGEST)]
Penalty: TypeAlias = Annotated[float, msgspec.Meta(ge=-100, le=100)]
Stop: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
_Unset: TypeAlias = msgspec.Raw | msgspec.UnsetType


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of a streamed response."""

    include_usage: bool | None = None
    """Whether a final chunk has the token counts."""
    include_obfuscation: bool | None = None
    """Ignored: chunks are never padded."""


class Sampling(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that completions, chats and responses share; null means absent."""

    model: str
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    """Default 1; 0 selects the most likely token."""
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    n: Count | None = None
    """Number of choices per prompt."""
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | Annotated[list[Stop], msgspec.Meta(max_length=4)] | None = None
    """Texts that end the generation; they are not part of the response."""
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Penalty] | None = None
    """Values to add to logits, by token id."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=_LARGEST)] | None = None
    """Number of most likely tokens to choose from; 0 and -1 mean no limit."""
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=100)] | None = None
    min_tokens: Token | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[Token], msgspec.Meta(max_length=1024)] | None = None


class CompletionFields(Sampling, kw_only=True):
    """The supported fields of a completion request."""

    prompt: str | list[str | Token | list[Token]]
    """A text, a list of token ids, or a list of either."""
    max_tokens: Count | None = None
    """Default 16."""
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=MOST_LOGPROBS)] | None = None
    """Number of most likely tokens to return per token; 0 returns only the chosen token's."""
    echo: bool | None = None
    """Whether the response begins with the prompt."""


class EmbeddingFields(msgspec.Struct, kw_only=True):
    """The supported fields of an embedding request."""

    model: str
    input: str | list[str | Token | list[Token]]
    """A text, a list of token ids, or a list of either."""
    encoding_format: Literal["float", "base64"] | None = None
    """Numbers, or base64 of little-endian FP32."""
    dimensions: Count | None = None
    """Size of the embeddings, if the model supports shortening them."""


class TextPart(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """A text part of a message."""

    text: str


class MessageFields(msgspec.Struct, forbid_unknown_fields=True):
    """The supported fields of a message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], msgspec.Meta(min_length=1)] | None = None
    """Text or text parts; None in a message that has only tool calls."""
    name: str | None = None
    """Passed to the chat template."""
    tool_calls: Annotated[list[ToolCall], msgspec.Meta(max_length=MOST_TOOLS)] | None = None
    """Tool calls, in messages with role `assistant` only."""
    tool_call_id: str | None = None
    """The tool call whose result this message has; required with role `tool`."""


_Message: Any = msgspec.defstruct(
    "Message",
    [(name, _Unset, msgspec.UNSET) for name in MESSAGE_REFUSED],
    bases=(MessageFields,),
    kw_only=True,
    forbid_unknown_fields=True,
    module=__name__,
)


class ChatFields(Sampling, kw_only=True):
    """The supported fields of a chat completion request."""

    messages: Annotated[list[_Message], msgspec.Meta(min_length=1)]  # pyright: ignore[reportInvalidTypeForm]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    """Replaces `max_tokens`; the default is the rest of the context."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MOST_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], msgspec.Meta(max_length=MOST_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    """Whether a response may have several tool calls; default true."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """Passed to the chat template, which may ignore it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template, such as `{"enable_thinking": false}`."""


def body_of(
    name: str, obeyed: type[B], hints: Sequence[str], refused: Mapping[str, Any]
) -> type[B]:
    """Return a body type that also accepts hints (ignored) and refused fields."""
    found: Any = msgspec.defstruct(
        name,
        [(field, _Unset, msgspec.UNSET) for field in (*hints, *refused)],
        bases=(obeyed,),
        kw_only=True,
        forbid_unknown_fields=True,
        module=__name__,
    )
    return found  # type: ignore[no-any-return]


CompletionRequest = body_of(
    "CompletionRequest", CompletionFields, COMPLETION_HINTS, COMPLETION_REFUSED
)
ChatRequest = body_of("ChatRequest", ChatFields, CHAT_HINTS, CHAT_REFUSED)
EmbeddingRequest = body_of("EmbeddingRequest", EmbeddingFields, EMBEDDING_HINTS, {})

_COMPLETION = msgspec.json.Decoder(CompletionRequest)
_CHAT = msgspec.json.Decoder(ChatRequest)
_EMBEDDING = msgspec.json.Decoder(EmbeddingRequest)

_PLACE = re.compile(r"(.*?)(?: - at `\$\.?(.*)`)?", re.DOTALL)
_FIELD = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`", re.DOTALL)
_QUOTED_BYTES = 64 << 10
"""Size up to which an invalid body is decoded again to quote the value in the error."""
_COMPARED = 64
"""Maximum length of a field's name to compare with the known ones."""
_STEPS = re.compile(r"\.?(\w+)|\[(\d+)\]")
_CHUNK = 1 << 16
"""Bytes per decoding step."""


def read_completion(body: memoryview, *, max_depth: int) -> CompletionFields:
    """Decode a completion request; raises InvalidBody or InvalidField."""
    fields = read_body(body, _COMPLETION, max_depth)
    refuse(fields, COMPLETION_REFUSED, "")
    return fields


def read_chat(body: memoryview, *, max_depth: int) -> ChatFields:
    """Decode a chat completion request; raises InvalidBody or InvalidField."""
    fields = read_body(body, _CHAT, max_depth)
    refuse(fields, CHAT_REFUSED, "")
    for index, message in enumerate(fields.messages):
        refuse(message, MESSAGE_REFUSED, f"messages[{index}].")
    return fields


def read_embedding(body: memoryview, *, max_depth: int) -> EmbeddingFields:
    """Decode an embedding request; raises InvalidBody or InvalidField."""
    return read_body(body, _EMBEDDING, max_depth)


def read_body(body: memoryview, decoder: "msgspec.json.Decoder[B]", max_depth: int) -> B:
    """Decode a body after checking its encoding and limits; raises InvalidBody or InvalidField."""
    _check_text(body)
    check_depth(body, max_depth)
    check_members(body)
    check_elements(body)
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        # msgspec may report a wrong type before it reaches invalid JSON, which takes precedence.
        check_json(body)
        raise invalid(str(error), body, decoder.type) from None
    except msgspec.DecodeError as error:
        raise InvalidBody(f"expected a body of JSON: {error}") from error
    except RecursionError:
        raise InvalidBody("the JSON is nested too deeply") from None


def _check_text(body: memoryview) -> None:
    """Raise InvalidBody unless the body is UTF-8, which msgspec does not check in raw fields."""
    decode = codecs.getincrementaldecoder("utf-8")().decode
    try:
        for start in range(0, len(body), _CHUNK):
            decode(body[start : start + _CHUNK], start + _CHUNK >= len(body))
    except UnicodeDecodeError as error:
        got = f"the octet 0x{error.object[error.start]:02x} ({error.reason})"
        raise InvalidBody(f"expected a body of JSON in UTF-8, got {got}") from None


def check_json(body: memoryview) -> None:
    """Raise InvalidBody unless the body is JSON.

    Small bodies are decoded completely, because errors quote their values.
    """
    try:
        msgspec.json.decode(body, type=Any if len(body) <= _QUOTED_BYTES else msgspec.Raw)
    except msgspec.DecodeError as error:
        raise InvalidBody(f"expected a body of JSON: {error}") from error


def invalid(text: str, body: memoryview, kind: Any, place: str = "") -> InvalidField:
    """Convert msgspec's validation error; `place` is the path of `body` within the request."""
    match = _PLACE.fullmatch(text)
    what, path = (match[1], match[2] or "") if match else (text, "")
    at = f"{place}.{path}" if place and path else place or path
    inside = f"{at}." if at else ""
    unknown, missing = _FIELD.fullmatch(what), _MISSING.fullmatch(what)
    if unknown:
        near = get_close_matches(unknown[1][:_COMPARED], _field_names(kind, path), n=1)
        hint = f"did you mean '{near[0]}'?" if near else "docs/openai.md lists the fields"
        expected = "a field of this request"
        return InvalidField(inside + unknown[1], expected, f"an unknown one; {hint}", code=UNKNOWN)
    if missing:
        return InvalidField(inside + missing[1], "a value", "none")
    if what.startswith("Invalid "):
        values = " or ".join(msgspec.json.encode(one).decode() for one in _values(kind, path))
        expected = values or "a value listed in docs/openai.md"
        return InvalidField(at, expected, _quoted(body, path))
    expected = what.partition(", got ")[0].removeprefix("Expected ").replace("`", "")
    return InvalidField(at, expected, _quoted(body, path))


def _values(kind: Any, path: str) -> list[Any]:
    """Return the allowed literal values at a path of a type; empty if it has none."""
    found = _types(kind, path)
    return list(dict.fromkeys(v for one in found for v in getattr(one, "values", ())))


def _field_names(kind: Any, path: str) -> list[str]:
    """Return the names of the fields at a path of a type."""
    structs = [one for one in _types(kind, path) if isinstance(one, inspect.StructType)]
    return [field.encode_name for struct in structs for field in struct.fields]


def _types(kind: Any, path: str) -> list[inspect.Type]:
    found = list(_members(inspect.type_info(kind)))
    for name, index in _STEPS.findall(path):
        found = [member for one in found for member in _inner(one, name, index)]
    return found


def _members(found: inspect.Type) -> Iterator[inspect.Type]:
    if isinstance(found, inspect.Metadata):
        yield from _members(found.type)
    elif isinstance(found, inspect.UnionType):
        for one in found.types:
            yield from _members(one)
    else:
        yield found


def _inner(found: inspect.Type, name: str, index: str) -> Iterator[inspect.Type]:
    if index and isinstance(found, inspect.ListType | inspect.VarTupleType):
        yield from _members(found.item_type)
    elif name and isinstance(found, inspect.StructType):
        if name == found.tag_field:
            yield inspect.LiteralType((found.tag,))
        for field in found.fields:
            if name == field.encode_name:
                yield from _members(field.type)


def _quoted(body: memoryview, path: str) -> str:
    """Return the JSON text of the value at `path` in the body."""
    if len(body) > _QUOTED_BYTES:
        return "another type"
    found: Any = msgspec.json.decode(body)
    for name, index in _STEPS.findall(path):
        if name and isinstance(found, dict) and name in found:
            found = found[name]
        elif index and isinstance(found, list) and int(index) < len(found):
            found = found[int(index)]
        else:
            break
    return msgspec.json.encode(found).decode()


def refuse(found: msgspec.Struct, refused: Mapping[str, tuple[Any, ...]], inside: str) -> None:
    """Raise InvalidField for an unsupported field unless its value is neutral."""
    for name, neutral in refused.items():
        raw = getattr(found, name)
        if raw is msgspec.UNSET:
            continue
        try:
            value = msgspec.json.decode(raw)
        except msgspec.ValidationError:
            value = raw  # a number out of float's range is not neutral
        if value is None or any(type(value) is type(one) and value == one for one in neutral):
            continue
        known = " or ".join(msgspec.json.encode(one).decode() for one in (*neutral, None))
        got = bytes(raw[:256] if isinstance(raw, bytes) else memoryview(raw)[:256])
        shown = got.decode(errors="replace")
        why = INSTEAD.get(name, "other values are not supported")
        raise InvalidField(inside + name, f"{known}, since {why}", shown, code=UNSUPPORTED)
