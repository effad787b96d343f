"""Write the tables of docs/access.md from the code, or prove them fresh (`--check`)."""

import argparse
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from xlaserve.app.server import Application
from xlaserve.grpc.methods import ROWS
from xlaserve.http.routing import Route
from xlaserve.serving.access.objects import BESIDE, DOORS, RULES, Callers
from xlaserve.serving.call import Operation
from xlaserve.settings import Settings

PAGE = Path(__file__).resolve().parent.parent / "docs" / "access.md"
_BEGIN, _END = "<!-- made by tools/access_page.py -->\n", "<!-- end -->\n"
_OBJECTS_BEGIN, _OBJECTS_END = (
    "<!-- objects, by tools/access_page.py -->\n",
    "<!-- end objects -->\n",
)
_OBJECTS_HEAD = (
    "| object | operation | endpoints | no credentials | owner | other tenants | operator |\n"
    "|---|---|---|---|---|---|---|\n"
)
_BESIDE_HEAD = "| other object | owner | what other callers get |\n|---|---|---|\n"
_HEAD = "| operation | protocol | methods and routes |\n|---|---|---|\n"
_PROTOCOLS: Mapping[str, str] = MappingProxyType(
    {
        "/inference.": "V2 gRPC",
        "/grpc.health.": "health",
        "/grpc.reflection.": "reflection",
        "/mmesh.": "ModelMesh",
        "/v2": "V2 REST",
        "/ping": "SageMaker",
        "/models": "SageMaker",
        "/invocations": "SageMaker",
        "/": "HTTP",
    }
)
"""Path prefixes and their protocols; the first match counts."""
_OTHERS = (
    (Operation.SERVICE, "gRPC", "every method of a custom service, and unknown methods"),
    (Operation.PAGE, "HTTP", "any unknown path"),
)


def doors(routes: Iterable[Route]) -> list[tuple[Operation, str, str]]:
    """Return every method and route with its operation and its protocol."""
    methods = ((row.operation, path, path.rpartition("/")[2]) for path, row in ROWS.items())
    paths = ((r.operation, r.path, f"{r.method} {r.path}") for r in routes)
    found = [(operation, _protocol(path), name) for operation, path, name in (*methods, *paths)]
    return [*dict.fromkeys(found), *_OTHERS]


def every_route() -> Iterable[Route]:
    """Return the routes of a server that is not started."""
    settings = Settings.read({}, repository=PAGE.parent)
    return Application(settings).http_routes().routes


def table(routes: Iterable[Route]) -> str:
    """Return the rows, one for each operation over each protocol."""
    rows: dict[tuple[str, str], list[str]] = {}
    for operation, protocol, name in doors(routes):
        rows.setdefault((operation.value, protocol), []).append(name)
    order = [operation.value for operation in Operation]
    lines = (
        f"| `{operation}` | {protocol} | {', '.join(map(_shown, names))} |\n"
        for (operation, protocol), names in sorted(rows.items(), key=lambda r: order.index(r[0][0]))
    )
    return _HEAD + "".join(lines)


def _shown(name: str) -> str:
    return name if name.startswith(("every", "any")) else f"`{name}`"


def _protocol(path: str) -> str:
    return next(name for start, name in _PROTOCOLS.items() if path.startswith(start))


def objects() -> str:
    """Return the rows of objects, including those other than models."""
    rows = "".join(
        f"| {row.thing} | {row.deed} | {', '.join(map(_door, row.paths))} | "
        f"{' | '.join(_found(RULES[row.rule]))} |\n"
        for row in DOORS
    )
    beside = "".join(f"| {one.thing} | {one.owner} | {one.others} |\n" for one in BESIDE)
    return f"{_OBJECTS_HEAD}{rows}\n{_BESIDE_HEAD}{beside}"


def _door(path: str) -> str:
    return f"`{path if ' ' in path else path.rpartition('/')[2]}`"


def _found(callers: Callers) -> list[str]:
    return [found.value for found in callers]


def page() -> str:
    """Return the whole page with regenerated tables."""
    text = PAGE.read_text()
    for begin, made, end in (
        (_OBJECTS_BEGIN, objects(), _OBJECTS_END),
        (_BEGIN, table(every_route()), _END),
    ):
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{made}\n{end}{rest.partition(end)[2]}"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if not fresh")
    made = page()
    if not parser.parse_args().check:
        PAGE.write_text(made)
        return 0
    if PAGE.read_text() == made:
        print("docs/access.md is fresh")
        return 0
    print("docs/access.md is stale: run tools/access_page.py")
    return 1


if __name__ == "__main__":
    sys.exit(main())
