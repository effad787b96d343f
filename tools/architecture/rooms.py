"""The packages of the server, their purpose, and their imports of one another."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = "xlaserve"
_DRAWN = (
    "xlaserve.cli",
    "xlaserve.bench",
    "xlaserve.client",
    "xlaserve.dialing",
    "xlaserve.workers",
    "xlaserve.app",
    "xlaserve.offline",
    "xlaserve.importers.onnx",
    "xlaserve.importers.pt2",
    "xlaserve.importers",
    "xlaserve.python_models",
    "xlaserve.openai",
    "xlaserve.generation",
    "xlaserve.authoring",
    "xlaserve.grpc_web",
    "xlaserve.http",
    "xlaserve.grpc.http2",
    "xlaserve.grpc",
    "xlaserve.residence",
    "xlaserve.serving",
    "xlaserve.runtime",
    "xlaserve.storage",
    "xlaserve.artifact",
    "xlaserve.model_config",
    "xlaserve.row_proofs",
    "xlaserve.language",
    "xlaserve.net",
    "xlaserve.process",
    "xlaserve.files",
    "xlaserve.concurrency",
    "xlaserve.settings",
    "xlaserve.tensors",
    "xlaserve.errors",
)
"""The packages in the drawing; a module belongs to the first whose name is its prefix."""


@dataclass(slots=True)
class Room:
    """One drawn package, without the drawn packages inside it."""

    name: str
    caption: str = ""
    lines: int = 0
    imports: set[str] = field(default_factory=set)


def module_name(file: Path, server: Path) -> str:
    """Return the dotted name of a file below `server`."""
    parts = file.relative_to(server).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def rooms(server: Path) -> list[Room]:
    """Read every module below `server/xlaserve` once, in the order of `_DRAWN`."""
    found: dict[str, Room] = {}
    for file in sorted((server / PACKAGE).rglob("*.py")):
        name = module_name(file, server)
        room_name = room_of(name)
        if room_name is None:
            continue
        room = found.setdefault(room_name, Room(room_name))
        source = file.read_text()
        tree = ast.parse(source)
        room.lines += source.count("\n")
        if name == room_name:
            room.caption = (ast.get_docstring(tree) or "").partition("\n")[0]
        for imported in _imports(tree):
            target = room_of(imported)
            if target not in (None, room_name):
                room.imports.add(str(target))
    return [found[name] for name in _DRAWN if name in found]


def room_of(module: str) -> str | None:
    """Return the drawn package of a module, or None if there is none."""
    return next((name for name in _DRAWN if module == name or module.startswith(f"{name}.")), None)


def arrows(found: list[Room]) -> Iterator[tuple[str, str]]:
    """Yield the imports between packages, without those implied by others."""
    direct = {room.name: room.imports for room in found}
    for room in found:
        for target in sorted(room.imports):
            # Arrows within an import cycle imply each other, so none of them is left out.
            back = _reached(direct, target, room.name)
            others = room.imports - {target} - back
            if not any(target in _reached(direct, other, room.name) for other in others):
                yield room.name, target


def _reached(direct: Mapping[str, set[str]], start: str, without: str) -> set[str]:
    """Return the direct and indirect imports of a package, on paths that avoid `without`."""
    reached: set[str] = set()
    left = [start]
    while left:
        more = direct.get(left.pop(), set()) - reached - {without}
        reached |= more
        left += more
    return reached


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
