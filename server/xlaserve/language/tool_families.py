"""The ways in which models write tool calls, with a grammar for each."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from xlaserve.language.tool_calls import ToolCalls


@dataclass(frozen=True, slots=True)
class ToolFamily:
    """One way to write calls."""

    name: str
    begin: str
    """Before each call; without an `end` it may be left out."""
    end: str
    arguments: str
    """The field that holds the arguments of a call."""
    between: str
    """Between two calls."""
    signs: tuple[tuple[str, ...], ...]
    """The signs of a chat template of the family: it has all of one of these."""

    def parser(self, tools: Sequence[str], most: int) -> ToolCalls:
        """Return what finds at most so many calls of these tools in one answer."""
        return ToolCalls(frozenset(tools), self.begin, self.end, most)

    def grammar(
        self, tools: Mapping[str, Mapping[str, Any]], *, has_special: bool, many: bool
    ) -> str:
        """Return the Lark grammar of answers that are calls, and nothing else.

        `tools` are the JSON schemas of their arguments by name, `has_special` tells whether
        `begin` and `end` are special tokens, and `many` whether there may be several calls.
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
"""Families by the name that a configuration has for them, in the order in which they are looked
for."""


def recognised(template: str) -> tuple[ToolFamily, str] | None:
    """Return the family of a chat template, and the sign of it; None for one of no family."""
    for family in FAMILIES.values():
        for signs in family.signs:
            if all(sign in template for sign in signs):
                return family, " and ".join(map(repr, signs))
    return None
