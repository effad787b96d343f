"""Request fields for tools and response formats."""

from typing import Annotated, Any, Literal, TypeAlias

import msgspec

MOST_TOOLS = 128

Name: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
"""The name of a tool or a schema."""


# --- Tools -------------------------------------------------------------------------------------


class Function(msgspec.Struct, forbid_unknown_fields=True):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """The JSON schema of the arguments, which must be an object; None for no arguments."""
    strict: bool | None = None
    """Ignored: if a call is required, its arguments always follow the schema."""


class Tool(msgspec.Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    """A function tool."""

    function: Function


class FunctionName(msgspec.Struct, forbid_unknown_fields=True):
    """The name of a function that the model must call."""

    name: Name


class NamedTool(msgspec.Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    """The tool that the model must call."""

    function: FunctionName


ToolChoice: TypeAlias = Literal["none", "auto", "required"] | NamedTool


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    """The function that a tool call names."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    """A tool call of an earlier response."""

    id: str
    function: CalledFunction


# --- Response formats --------------------------------------------------------------------------


class TextFormat(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """Free text."""


class ObjectFormat(msgspec.Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    """Any JSON object."""


class Schema(msgspec.Struct, forbid_unknown_fields=True):
    """A JSON schema."""

    name: Name
    description: str | None = None
    schema: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    """Any JSON if absent."""
    strict: bool | None = None
    """Ignored: responses always follow the schema."""


class SchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    """A response that must follow a JSON schema."""

    json_schema: Schema


ResponseFormat: TypeAlias = TextFormat | ObjectFormat | SchemaFormat
