"""All threads, pools, processes and event loops of the server, and what each may touch.

They are found in the code: a starter without a row, or a row without a starter, is an error.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

STARTERS = frozenset(
    (
        "threading.Thread",
        "ThreadPoolExecutor",
        "ProcessPoolExecutor",
        "LimitedThreads",
        "HostThreads",
        "DeviceThreads",
        "subprocess.run",
        "start_shielded",
        "subprocess.Popen",
        "asyncio.create_subprocess_exec",
        "asyncio.to_thread",
        "uvloop.run",
        "asyncio.run",
    )
)
"""Calls that start a thread, a pool, a process or an event loop."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A row of the table."""

    place: str
    """Module and function that start it."""
    name: str
    does: str
    touches: str
    hands_over: str


def places(server: Path, starters: frozenset[str] = STARTERS) -> Iterator[str]:
    """Yield the functions of the server that start a worker, as `package/module.py: name`."""
    for file in sorted((server / "xlaserve").rglob("*.py")):
        shown = file.relative_to(server / "xlaserve").as_posix()
        text = file.read_text()
        if not any(starter in text for starter in starters):
            continue
        for function, call in _calls(ast.parse(text), ""):
            if call in starters:
                yield f"{shown}: {function}"


def _calls(node: ast.AST, within: str) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        name = within
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{within}.{child.name}" if within else child.name
        elif isinstance(child, ast.Call):
            yield within, ast.unparse(child.func)
            for argument in (*child.args, *(keyword.value for keyword in child.keywords)):
                if isinstance(argument, ast.Attribute | ast.Name):
                    yield within, ast.unparse(argument)
        yield from _calls(child, name)


def unmatched(found: set[str], rows: tuple[Worker, ...]) -> list[str]:
    """Report starting functions without a row, and rows without a starting function."""
    known = {row.place for row in rows}
    return [
        f"{place} starts a thread or a process but has no row" for place in sorted(found - known)
    ] + [f"{place} has a row but starts nothing" for place in sorted(known - found)]
