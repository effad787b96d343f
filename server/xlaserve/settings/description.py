"""Descriptions of settings, for `xlaserve serve --help` and docs/settings.md.

They are parsed from the source of `Settings`: the string below a field, and the heading above.
"""

import ast
import inspect
import itertools
import re
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path

from xlaserve import settings
from xlaserve.settings import Settings
from xlaserve.settings.reading import ENVIRONMENT_PREFIX

_HEADING = re.compile(r"    # --- (.+) ---")
_FIELD = re.compile(r"    (\w+): ")


@dataclass(frozen=True, slots=True)
class SettingDescription:
    """A setting's row in docs/settings.md and `--help`."""

    name: str
    default: str
    text: str
    group: str
    """The heading above the setting in the source, or an empty string for the first settings."""
    many: bool
    """Whether the flag may be repeated."""
    switch: bool
    """Whether the setting is a boolean."""

    @property
    def variable(self) -> str:
        """Return the environment variable that sets the setting."""
        return ENVIRONMENT_PREFIX + self.name.upper()


def describe_settings() -> list[SettingDescription]:
    """Return all settings with their documentation, by group and in order of definition."""
    texts, groups = _strings_below_fields(), _headings_above_fields()
    described = [
        SettingDescription(
            field.name,
            _shown(field.name, field.default),
            texts[field.name],
            groups[field.name],
            many=isinstance(field.default, tuple),
            switch=isinstance(field.default, bool),
        )
        for field in fields(Settings)
    ]
    order = list(dict.fromkeys(row.group for row in described))
    return sorted(described, key=lambda row: order.index(row.group))


def _shown(name: str, default: object) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, int) and name.endswith("_mode") and default >= 0:
        return oct(default)  # permission bits
    if isinstance(default, StrEnum | Path):
        return str(default)
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    return "" if not isinstance(default, str | int | float) else str(default)


def _strings_below_fields() -> dict[str, str]:
    tree = ast.parse(inspect.getsource(settings))
    body = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Settings").body
    texts = {}
    for field, below in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            assert isinstance(below, ast.Expr)
            assert isinstance(below.value, ast.Constant)
            texts[field.target.id] = " ".join(str(below.value.value).split())
    return texts


def _headings_above_fields() -> dict[str, str]:
    groups, group = {}, ""
    for line in inspect.getsource(Settings).splitlines():
        if heading := _HEADING.fullmatch(line):
            group = heading[1]
        elif field := _FIELD.match(line):
            groups[field[1]] = group
    return groups
