"""Typed bodies of requests: the obeyed fields and their values."""

import codecs
import re
from collections.abc import Iterator, Mapping, Sequence
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
    """Options of a streamed answer."""

    include_usage: bool | None = None
    """Whether a last chunk has the numbers of tokens."""
    include_obfuscation: bool | None = None
    """A hint: nothing is ever added to chunks."""


class Sampling(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Common fields of completions and chats; null means absent."""

    model: str
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    """Default 1; 0 takes the likeliest token."""
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    n: Count | None = None
    """Answers to each prompt."""
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | Annotated[list[Stop], msgspec.Meta(max_length=4)] | None = None
    """Texts that end the answer, and are not part of it."""
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Penalty] | None = None
    """Additions to the logits, by token id."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=_LARGEST)] | None = None
    """0 and -1 for no limit."""
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=100)] | None = None
    min_tokens: Token | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[Token], msgspec.Meta(max_length=1024)] | None = None


class CompletionFields(Sampling, kw_only=True):
    """The obeyed fields of a request for completions."""

    prompt: str | list[str | Token | list[Token]]
    """A text or token ids, or a list of either."""
    max_tokens: Count | None = None
    """Default 16."""
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=MOST_LOGPROBS)] | None = None
    """How many of the likeliest tokens come with each; 0 for the log-probability of each alone."""
    echo: bool | None = None
    """Whether an answer begins with its prompt."""


class EmbeddingFields(msgspec.Struct, kw_only=True):
    """The obeyed fields of a request for embeddings."""

    model: str
    input: str | list[str | Token | list[Token]]
    """A text or token ids, or a list of either."""
    encoding_format: Literal["float", "base64"] | None = None
    """The form of an embedding: numbers, or those as FP32, little-endian, in base64."""
    dimensions: Count | None = None
    """Requested size of each embedding, if the model can be cut."""


class TextPart(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """A text part of a message."""

    text: str


class MessageFields(msgspec.Struct, forbid_unknown_fields=True):
    """The obeyed fields of a message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], msgspec.Meta(min_length=1)] | None = None
    """None in an answer with calls alone."""
    name: str | None = None
    """For the model's template."""
    tool_calls: Annotated[list[ToolCall], msgspec.Meta(max_length=MOST_TOOLS)] | None = None
    """The calls of an answer; of role `assistant` alone."""
    tool_call_id: str | None = None
    """The call that a message of role `tool` has the result of."""


_Message: Any = msgspec.defstruct(
    "Message",
    [(name, _Unset, msgspec.UNSET) for name in MESSAGE_REFUSED],
    bases=(MessageFields,),
    kw_only=True,
    forbid_unknown_fields=True,
    module=__name__,
)


class ChatFields(Sampling, kw_only=True):
    """The obeyed fields of a request for chat completions."""

    messages: Annotated[list[_Message], msgspec.Meta(min_length=1)]  # pyright: ignore[reportInvalidTypeForm]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    """The same; by default all remaining positions."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MOST_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], msgspec.Meta(max_length=MOST_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    """Whether an answer may have several calls; default true."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """For the model's template, which may ignore it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the template, as `{"enable_thinking": false}`."""


def body_of(
    name: str, obeyed: type[B], hints: Sequence[str], refused: Mapping[str, Any]
) -> type[B]:
    """Return the body of a request: what is obeyed, and the fields that are hints or refused."""
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
"""Bodies up to this size are read once more for the value that an error quotes."""
_STEPS = re.compile(r"\.?(\w+)|\[(\d+)\]")
_CHUNK = 1 << 16
"""Octets that are checked at once."""


def read_completion(body: memoryview, *, max_depth: int) -> CompletionFields:
    """Read a request for completions; raises InvalidBody or InvalidField."""
    asked = read_body(body, _COMPLETION, max_depth)
    refuse(asked, COMPLETION_REFUSED, "")
    return asked


def read_chat(body: memoryview, *, max_depth: int) -> ChatFields:
    """Read a request for chat completions; raises InvalidBody or InvalidField."""
    asked = read_body(body, _CHAT, max_depth)
    refuse(asked, CHAT_REFUSED, "")
    for index, message in enumerate(asked.messages):
        refuse(message, MESSAGE_REFUSED, f"messages[{index}].")
    return asked


def read_embedding(body: memoryview, *, max_depth: int) -> EmbeddingFields:
    """Read a request for embeddings; raises InvalidBody or InvalidField."""
    return read_body(body, _EMBEDDING, max_depth)


def read_body(body: memoryview, decoder: "msgspec.json.Decoder[B]", max_depth: int) -> B:
    """Read a body; raises InvalidBody or InvalidField."""
    _check_text(body)
    check_depth(body, max_depth)
    check_members(body)
    check_elements(body)
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        # It may come before the place where the body is no JSON at all.
        check_json(body)
        raise invalid(str(error), body, decoder.type) from None
    except msgspec.DecodeError as error:
        raise InvalidBody(f"expected a body of JSON: {error}") from error
    except RecursionError:
        raise InvalidBody("the JSON is nested too deeply") from None


def _check_text(body: memoryview) -> None:
    """Raise InvalidBody for what is not UTF-8: a decoder that leaves a part raw does not look."""
    decode = codecs.getincrementaldecoder("utf-8")().decode
    try:
        for start in range(0, len(body), _CHUNK):
            decode(body[start : start + _CHUNK], start + _CHUNK >= len(body))
    except UnicodeDecodeError as error:
        got = f"the octet 0x{error.object[error.start]:02x} ({error.reason})"
        raise InvalidBody(f"expected a body of JSON in UTF-8, got {got}") from None


def check_json(body: memoryview) -> None:
    """Raise InvalidBody for invalid JSON, decoding its text as later errors quote it."""
    try:
        msgspec.json.decode(body, type=Any if len(body) <= _QUOTED_BYTES else msgspec.Raw)
    except msgspec.DecodeError as error:
        raise InvalidBody(f"expected a body of JSON: {error}") from error


def invalid(text: str, body: memoryview, kind: Any, place: str = "") -> InvalidField:
    """Rephrase msgspec's error of what lies at a place of the whole body."""
    match = _PLACE.fullmatch(text)
    what, path = (match[1], match[2] or "") if match else (text, "")
    at = f"{place}.{path}" if place and path else place or path
    inside = f"{at}." if at else ""
    unknown, missing = _FIELD.fullmatch(what), _MISSING.fullmatch(what)
    if unknown:
        return InvalidField(inside + unknown[1], "no field of that name", "one", code=UNKNOWN)
    if missing:
        return InvalidField(inside + missing[1], "a value", "none")
    if what.startswith("Invalid "):
        values = " or ".join(msgspec.json.encode(one).decode() for one in _values(kind, path))
        expected = values or "a value that docs/openai.md lists"
        return InvalidField(at, expected, _quoted(body, path))
    expected = what.partition(", got ")[0].removeprefix("Expected ").replace("`", "")
    return InvalidField(at, expected, _quoted(body, path))


def _values(kind: Any, path: str) -> list[Any]:
    """Return the choices of a type at a path; none for other types."""
    found = list(_members(inspect.type_info(kind)))
    for name, index in _STEPS.findall(path):
        found = [member for one in found for member in _inner(one, name, index)]
    return list(dict.fromkeys(v for one in found for v in getattr(one, "values", ())))


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
    """Return the value at a path of a body, as it was written."""
    if len(body) > _QUOTED_BYTES:
        return "something else"
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
    """Raise InvalidField for a field that nothing obeys and that asks for something."""
    for name, neutral in refused.items():
        raw = getattr(found, name)
        if raw is msgspec.UNSET:
            continue
        try:
            value = msgspec.json.decode(raw)
        except msgspec.ValidationError:
            value = raw  # a number that no float holds, which asks for something
        if value is None or any(type(value) is type(one) and value == one for one in neutral):
            continue
        known = " or ".join(msgspec.json.encode(one).decode() for one in (*neutral, None))
        got = bytes(raw[:256] if isinstance(raw, bytes) else memoryview(raw)[:256])
        shown = got.decode(errors="replace")
        why = INSTEAD.get(name, "nothing else is obeyed here")
        raise InvalidField(inside + name, f"{known}, since {why}", shown, code=UNSUPPORTED)
