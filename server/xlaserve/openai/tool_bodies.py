"""Typed fields of a chat about tools and the form of its answer."""

from typing import Annotated, Any, Literal, TypeAlias

import msgspec

MOST_TOOLS = 128

Name: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
"""The name of a tool or a schema."""


# --- tools -------------------------------------------------------------------------------------


class Function(msgspec.Struct, forbid_unknown_fields=True):
    """A function that a model may call."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """The JSON schema of its arguments, an object; without one it has none."""
    strict: bool | None = None
    """A hint: the arguments follow the schema wherever a call is required."""


class Tool(msgspec.Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    """A tool: a function."""

    function: Function


class FunctionName(msgspec.Struct, forbid_unknown_fields=True):
    """The function to call."""

    name: Name


class NamedTool(msgspec.Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    """The tool to call."""

    function: FunctionName


ToolChoice: TypeAlias = Literal["none", "auto", "required"] | NamedTool


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    """A function that was called."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    """A call of an earlier answer."""

    id: str
    function: CalledFunction


# --- forms of answers --------------------------------------------------------------------------


class TextFormat(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """An answer of any form."""


class ObjectFormat(msgspec.Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    """An answer that is an object of JSON."""


class Schema(msgspec.Struct, forbid_unknown_fields=True):
    """A JSON schema."""

    name: Name
    description: str | None = None
    schema: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    """Any JSON where it is not given."""
    strict: bool | None = None
    """A hint: a schema is always followed."""


class SchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    """An answer that follows a JSON schema."""

    json_schema: Schema


ResponseFormat: TypeAlias = TextFormat | ObjectFormat | SchemaFormat
