"""Formats in which models write tool calls, with a grammar for each."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from xlaserve.language.tool_calls import ToolCalls


@dataclass(frozen=True, slots=True)
class ToolFamily:
    """One format of tool calls."""

    name: str
    begin: str
    """Precedes each call; optional if `end` is empty."""
    end: str
    arguments: str
    """Name of the field with a call's arguments."""
    between: str
    """Separator of calls."""
    signs: tuple[tuple[str, ...], ...]
    """Strings that identify the format in a chat template, in alternative sets: one must match
    fully.
    """

    def parser(self, tools: Sequence[str], most: int) -> ToolCalls:
        """Return a parser that accepts at most `most` calls of `tools` in one answer."""
        return ToolCalls(frozenset(tools), self.begin, self.end, most)

    def grammar(
        self, tools: Mapping[str, Mapping[str, Any]], *, has_special: bool, many: bool
    ) -> str:
        """Return a Lark grammar for answers that consist of tool calls only.

        `tools` has the JSON schemas of the arguments by name, `has_special` says whether `begin`
        and `end` are special tokens, and `many` whether several calls are allowed.
        """
        more = f" ({json.dumps(self.between)} call)*" if many else ""
        rows = [f"start: call{more}"]
        if self.end:
            begin, end = (
                mark if has_special else json.dumps(mark) for mark in (self.begin, self.end)
            )
            rows.append(f'call: {begin} "\\n" tool "\\n" {end}')
        else:
            rows.append("call: tool")
        rows.append("tool: " + " | ".join(f"tool_{index}" for index in range(len(tools))))
        for index, (name, schema) in enumerate(tools.items()):
            head = json.dumps('{"name": ' + json.dumps(name) + f', "{self.arguments}": ')
            rows.append(f'tool_{index}: {head} arguments_{index} "}}"')
            rows.append(f"arguments_{index}: %json {json.dumps(schema)}")
        return "\n".join(rows)


FAMILIES: Mapping[str, ToolFamily] = MappingProxyType(
    {
        family.name: family
        for family in (
            ToolFamily(
                "hermes",
                "<tool_call>",
                "</tool_call>",
                "arguments",
                "\n",
                (("<tool_call>",),),
            ),
            ToolFamily(
                "llama",
                "<|python_tag|>",
                "",
                "parameters",
                "; ",
                (("<|python_tag|>",), ('"name": ', '"parameters": ')),
            ),
        )
    }
)
"""Formats by their name in the configuration, in the order of detection."""


def recognised(template: str) -> tuple[ToolFamily, str] | None:
    """Detect the format in a chat template; return it with the matching strings, or None."""
    for family in FAMILIES.values():
        for signs in family.signs:
            if all(sign in template for sign in signs):
                return family, " and ".join(map(repr, signs))
    return None
