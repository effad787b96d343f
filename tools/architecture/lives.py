"""The lives of a request, a stream, a batch and a load, as steps that name code.

A step whose name no longer exists in the code is an error, which keeps the page up to date.
"""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Step:
    """One step in the life of a request, a stream, a batch or a load."""

    name: str
    """Module and name, such as `serving/gates.py: Gates.admit`."""
    does: str


@dataclass(frozen=True, slots=True)
class Life:
    """All steps of one life, in order."""

    title: str
    steps: tuple[Step, ...]


def missing(lives: tuple[Life, ...], server: Path) -> list[str]:
    """Report the steps whose names are not in the code."""
    return [
        f"'{life.title}' names {step.name}, which does not exist"
        for life in lives
        for step in life.steps
        if not _is_there(step.name, server / "xlaserve")
    ]


def _is_there(name: str, package: Path) -> bool:
    file, _, qualified = name.partition(": ")
    path = package / file
    return path.is_file() and (not qualified or qualified in _names(path))


@cache
def _names(path: Path) -> frozenset[str]:
    found: set[str] = set()

    def look(node: ast.AST, within: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{within}.{child.name}" if within else child.name
                found.add(name)
                look(child, name)
            elif isinstance(child, ast.Assign | ast.AnnAssign):
                targets = child.targets if isinstance(child, ast.Assign) else [child.target]
                found.update(t.id for t in targets if isinstance(t, ast.Name) and not within)

    look(ast.parse(path.read_text()), "")
    return frozenset(found)
