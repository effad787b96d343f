"""All limits of the server: each setting, and the class that the composition root passes it to."""

import ast
import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from xlaserve.settings import Settings

_BEGINNINGS = ("max_", "min_")
_ENDINGS = ("_bytes", "_seconds", "_threads", "_backlog", "_per_pass", "_per_model")


def limits() -> list[str]:
    """Return the names of the settings that limit something, in their order."""
    names = [one.name for one in dataclasses.fields(Settings)]
    return [n for n in names if n.startswith(_BEGINNINGS) or n.endswith(_ENDINGS)]


def receivers(files: list[Path], modules: list[ModuleType]) -> dict[str, set[str]]:
    """Return the parameters that receive each setting, as `Class(parameter)`."""
    found: dict[str, set[str]] = {}
    for file, module in zip(files, modules, strict=True):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                for setting, parameter in _given(node, module):
                    found.setdefault(setting, set()).add(parameter)
    return found


def _given(call: ast.Call, module: ModuleType) -> Iterator[tuple[str, str]]:
    name = ast.unparse(call.func)
    if name == "partial":
        call = ast.Call(call.args[0], call.args[1:], call.keywords)
        name = ast.unparse(call.func)
    callee = _resolve(name, module)
    shown = name.rsplit(".", 1)[-1]
    parameters = _parameters(callee)
    for position, argument in enumerate(call.args):
        for setting in _settings_in(argument):
            place = parameters[position] if position < len(parameters) else ""
            yield setting, f"{shown}({place})" if place else shown
    for keyword in call.keywords:
        for setting in _settings_in(keyword.value):
            yield setting, f"{shown}({keyword.arg})" if keyword.arg else shown


def _settings_in(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.Call):
        return  # the walk reaches the inner call by itself
    for child in ast.walk(node):
        if isinstance(child, ast.Attribute) and ast.unparse(child.value).endswith("settings"):
            yield child.attr


def _resolve(name: str, module: ModuleType) -> Any:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _parameters(callee: Any) -> list[str]:
    try:
        return list(inspect.signature(callee).parameters)
    except (TypeError, ValueError):
        return []
