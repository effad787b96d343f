"""Draw docs/architecture.md from the code (or `--check` that it is up to date)."""

import argparse
import ast
import importlib
import sys
from collections.abc import Iterable
from pathlib import Path

from architecture import drawings, limits, lives, rooms, told, workers

ROOT = Path(__file__).resolve().parent.parent
SERVER = ROOT / "server"
PAGE = ROOT / "docs" / "architecture.md"
_LINES = 500
"""Line counts are rounded up to multiples of this, so that the page rarely becomes stale."""
_GIVERS = ("xlaserve.app.server", "xlaserve.app.grpc", "xlaserve.app.http")
"""Modules whose calls pass settings to the code that enforces them."""


def page() -> str:
    """Return the whole page."""
    parts = [
        told.INTRODUCTION,
        "## Packages\n",
        *_rooms(),
        "## Request, stream, batch and load\n",
        *_lives(),
        "## State machines\n",
        *(drawing.text() for drawing in drawings.DRAWINGS),
        "## Threads, pools, processes and event loops\n",
        told.THREADS,
        *_table(
            ("started at", "name", "purpose", "may touch", "hands over"),
            ((f"`{w.place}`", w.name, w.does, w.touches, w.hands_over) for w in told.WORKERS),
        ),
        "## Limits\n",
        told.LIMITS,
        *_limits(),
        told.TOUR,
    ]
    return "\n".join(parts) + "\n"


def problems() -> list[str]:
    """Report statements of the page that contradict the code."""
    return [
        *lives.missing(told.LIVES, SERVER),
        *workers.unmatched(set(workers.places(SERVER)), told.WORKERS),
        *(f"no code receives the limit {name}" for name, users in _users() if not users),
    ]


def _rooms() -> list[str]:
    found = rooms.rooms(SERVER)
    lines = ["```mermaid", "flowchart TD"]
    lines += [f"    {_id(room.name)}[{_shown(room.name)}]" for room in found]
    lines += [f"    {_id(one)} --> {_id(other)}" for one, other in rooms.arrows(found)]
    lines += ["```", "", "An arrow is an import. Imports that others imply are left out.", ""]
    rows = (
        (
            f"`{_shown(room.name)}`",
            room.caption.replace("|", "\\|"),
            f"{-(-room.lines // _LINES) * _LINES:,}",
        )
        for room in found
    )
    return [*lines, *_table(("package", "purpose", "lines (rounded up)"), rows)]


def _lives() -> list[str]:
    lines: list[str] = []
    for life in told.LIVES:
        lines += [f"### {life.title}", ""]
        lines += [f"{i}. `{s.name}` {s.does}" for i, s in enumerate(life.steps, 1)]
        lines += [""]
    return lines


def _users() -> Iterable[tuple[str, set[str]]]:
    modules = [importlib.import_module(name) for name in _GIVERS]
    files = [Path(str(module.__file__)) for module in modules]
    given = limits.receivers(files, modules)
    readers = _readers()
    return [(name, given.get(name) or readers.get(name, set())) for name in limits.limits()]


def _readers() -> dict[str, set[str]]:
    """Return the modules that read each setting directly from `Settings`."""
    found: dict[str, set[str]] = {}
    for file in sorted((SERVER / "xlaserve").rglob("*.py")):
        name = rooms.module_name(file, SERVER).removeprefix("xlaserve.")
        if name.startswith(("cli", "settings")):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("settings"):
                found.setdefault(node.attr, set()).add(name)
    return found


def _limits() -> list[str]:
    rows = (
        (f"`{name}`", ", ".join(f"`{user}`" for user in sorted(users))) for name, users in _users()
    )
    return _table(("setting", "enforced by"), rows)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


def _id(name: str) -> str:
    return name.replace(".", "_")


def _shown(name: str) -> str:
    return name.removeprefix("xlaserve.").replace(".", "/")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if not fresh")
    found = problems()
    for problem in found:
        print(problem)
    if not parser.parse_args().check:
        PAGE.write_text(page())
        return bool(found)
    fresh = PAGE.is_file() and PAGE.read_text() == page()
    print(
        f"docs/architecture.md is {'fresh' if fresh else 'stale: run tools/draw_architecture.py'}"
    )
    return 0 if fresh and not found else 1


if __name__ == "__main__":
    sys.exit(main())
