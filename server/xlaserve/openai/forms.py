"""Response formats and tool choices, and how a generation is made to follow them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from xlaserve.language.tool_calls import ToolCalls
from xlaserve.language.tool_families import FAMILIES, ToolFamily
from xlaserve.openai.bodies import ChatFields
from xlaserve.openai.errors import UNSUPPORTED, InvalidField
from xlaserve.openai.tool_bodies import (
    MOST_TOOLS,
    Function,
    NamedTool,
    ObjectFormat,
    ResponseFormat,
    SchemaFormat,
    ToolChoice,
)
from xlaserve.runtime.generator.info import GenerationInfo
from xlaserve.tensors import Parameter

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Form:
    """The format that responses to a request must have."""

    schema: str | None = None
    """The JSON schema that the response must follow, as text; None for free text."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Tools for the chat template; empty if tool calls are not allowed."""
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The schema of each tool's arguments, by tool name."""
    called: Sequence[str] = ()
    """Tools, one of which the model must call; empty if the model may decide."""
    most_calls: int = MOST_TOOLS
    """Maximum number of tool calls per response."""
    format_field: str = "response_format"
    """The request field for the format of responses without tool calls."""

    @property
    def characters(self) -> int:
        """Return the length of the tools in a chat template."""
        return sum(len(json.dumps(tool)) for tool in self.tools)

    def family(self, generation: GenerationInfo) -> ToolFamily | None:
        """Return the tool call syntax of the model, or None if it must not call tools.

        Raises InvalidField if the model does not support the format.
        """
        has_grammar = self.schema is not None or bool(self.called)
        if has_grammar and not generation.has_grammars:
            is_schema = self.schema is not None
            taken = "text" if is_schema else "none or auto"
            raise InvalidField(
                self.format_field if is_schema else "tool_choice",
                f"{taken}, since the model's configuration lacks the parameter 'grammars'",
                "JSON" if is_schema else "required",
                code=UNSUPPORTED,
            )
        if not self.tools:
            return None
        family = FAMILIES.get(generation.tool_family)
        if family is None:
            raise InvalidField(
                "tools",
                "none, since the chat template is of no known family and the model's"
                f" configuration lacks the parameter 'tool_calls' ({' or '.join(FAMILIES)})",
                f"{len(self.tools)}",
                code=UNSUPPORTED,
            )
        return family

    def parameters(
        self, family: ToolFamily | None, generation: GenerationInfo
    ) -> Mapping[str, Parameter]:
        """Return the generation parameters that enforce the format."""
        if self.schema is not None:
            return {"json_schema": self.schema}
        if not self.called or family is None or generation.text is None:
            return {}
        tools = {name: self.schemas[name] for name in self.called}
        is_special = generation.text.is_special(family.begin)
        return {
            "grammar": family.grammar(tools, has_special=is_special, many=self.most_calls > 1),
        }

    def parser(self, family: ToolFamily | None) -> ToolCalls | None:
        """Return a parser for the tool calls of a response, or None without tools."""
        return None if family is None else family.parser(tuple(self.schemas), self.most_calls)


ANY = Form()
"""Free text without tool calls."""


class Wanted(NamedTuple):
    """The request fields about the format of responses."""

    format: ResponseFormat | None
    choice: ToolChoice | None
    tools: Sequence[Function]
    calls_beside: bool
    """Whether a response may have several tool calls."""
    format_field: str = "response_format"
    function_field: str = ".function"
    """Path from a tool to its function, for error messages."""


def wanted(body: ChatFields) -> Wanted:
    """Return the fields of a chat request about the format of responses."""
    functions = [tool.function for tool in body.tools or ()]
    return Wanted(
        body.response_format, body.tool_choice, functions, body.parallel_tool_calls is not False
    )


def read(requested: Wanted) -> Form:
    """Return the format that a request asks for; raises InvalidField."""
    schema, inside = _schema(requested.format), requested.function_field
    choice, functions = requested.choice, requested.tools
    if not functions:
        if choice not in (None, "none", "auto"):
            raise InvalidField("tool_choice", "none or auto without tools", "another")
        return Form(schema, format_field=requested.format_field)
    schemas: dict[str, Mapping[str, Any]] = {}
    for index, function in enumerate(functions):
        place, name = f"tools[{index}]{inside}", function.name
        if name in schemas:
            raise InvalidField(f"{place}.name", "unique names", f"'{name}'")
        schemas[name] = _arguments(function, place)
    if choice == "none":
        return Form(schema, format_field=requested.format_field)
    if schema is not None:
        raise InvalidField(
            requested.format_field, "text format when tools may be called", "JSON", code=UNSUPPORTED
        )
    given = [
        {"type": "function", "function": _given(function, schemas[function.name])}
        for function in functions
    ]
    most = MOST_TOOLS if requested.calls_beside else 1
    called: Sequence[str] = ()
    if isinstance(choice, NamedTool):
        called, most = (choice.function.name,), 1
        if choice.function.name not in schemas:
            raise InvalidField(
                f"tool_choice{inside}.name", "one of tools", f"'{choice.function.name}'"
            )
    elif choice == "required":
        called = tuple(schemas)
    return Form(None, given, schemas, called, most, requested.format_field)


def _schema(form: ResponseFormat | None) -> str | None:
    if isinstance(form, ObjectFormat):
        return '{"type":"object"}'
    if isinstance(form, SchemaFormat):
        schema = form.json_schema.schema
        written = b"null" if schema is msgspec.UNSET else bytes(schema)
        return "{}" if written == b"null" else written.decode()
    return None


def _arguments(function: Function, place: str) -> Mapping[str, Any]:
    """Return the schema of a function's arguments; raises InvalidField unless it is an object."""
    if function.parameters is None:
        return _NO_ARGUMENTS
    kind = function.parameters.get("type", "object")
    if kind != "object":
        got = msgspec.json.encode(kind).decode()
        raise InvalidField(f"{place}.parameters.type", '"object"', got)
    return {**function.parameters, "type": "object"}


def _given(function: Function, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a function in the form that chat templates expect."""
    described = {} if function.description is None else {"description": function.description}
    return {"name": function.name, **described, "parameters": schema}
