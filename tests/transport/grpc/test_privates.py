"""Private names of grpclib and betterproto that the gRPC transport relies on still exist."""

import ast
import inspect
import re
import tomllib
from importlib import import_module, metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import xlaserve

ROOT = Path(__file__).resolve().parents[3]
SERVER = Path(xlaserve.__file__).parent

PRIVATES = {
    ("grpclib._typing", "IServable"): "the type of what is served",
    ("grpclib.client:Channel", "_protocol_factory"): "makes the protocol of a connection",
    ("grpclib.client:Channel", "_config"): "what that protocol is made with",
    ("grpclib.client:Channel", "_h2_config"): "likewise",
    ("grpclib.events", "_DispatchServerEvents"): "tells listeners of requests and messages",
    ("grpclib.protocol:Connection", "_connection"): "h2's connection, to know its last stream",
    ("grpclib.protocol:Connection", "_transport"): "the transport, to write GOAWAY and to close",
    ("grpclib.server:Stream", "_codec"): "the codec, which puts ids into messages",
    ("betterproto:Message", "_betterproto"): "the fields of a message class",
    ("betterproto:Message", "_betterproto_meta"): "those fields, once they are known",
    ("betterproto:Message", "_type_hint"): "the type of a field",
    ("betterproto:Message", "_serialized_on_wire"): "whether an empty message is there",
}
"""Each private name in use, by its module or class, with its kind."""

FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef

_MODULES = (
    "grpclib.client",
    "grpclib.server",
    "grpclib.protocol",
    "grpclib.events",
    "grpclib.stream",
    "betterproto",
)


def is_there(place: str, name: str) -> bool:
    module_name, _, class_name = place.partition(":")
    try:
        found = import_module(module_name)
    except ImportError:
        return False
    if not class_name:
        return hasattr(found, name)
    source = inspect.getsource(found)
    of_class = inspect.getattr_static(getattr(found, class_name), name, None)
    return of_class is not None or f".{name} = " in source


def privates_of_libraries() -> set[str]:
    names = {"_typing"}
    for module in _MODULES:
        source = inspect.getsource(import_module(module))
        names |= set(re.findall(r"(?:self|cls)\.(_[a-z]\w*)", source))
        names |= set(re.findall(r"(?:def|class) (_[A-Za-z]\w*)", source))
    return names


def overridden(tree: ast.Module) -> set[str]:
    """Return the private names overridden in classes that derive from a library class."""
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").startswith(("grpclib", "betterproto"))
        for alias in node.names
    }
    derived = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and {base.id for base in node.bases if isinstance(base, ast.Name)} & imported
    ]
    methods = [part.name for node in derived for part in node.body if isinstance(part, FUNCTIONS)]
    return {name for name in methods if name.startswith("_") and not name.startswith("__")}


def used(file: Path, names: set[str]) -> set[str]:
    """Return the private names that a file uses without defining them, or overrides."""
    text = file.read_text()
    if not re.search(r"grpclib|betterproto", text):
        return set()
    own = set(re.findall(r"(?:def|class) (_\w+)|self\.(_\w+)(?:: [^=\n]+)? = ", text))
    defined = {name for pair in own for name in pair if name}
    tree = ast.parse(text)
    found = overridden(tree) & names
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in names - defined:
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            ("grpclib", "betterproto")
        ):
            private_module = "._" in str(node.module)
            found |= {a.name for a in node.names if private_module or a.name.startswith("_")}
    return found


@pytest.mark.parametrize(("place", "name"), PRIVATES, ids=lambda part: part.replace(":", "."))
def test_the_installed_library_has_every_private_that_is_used(place: str, name: str) -> None:
    library = place.partition(".")[0].partition(":")[0]

    assert is_there(place, name), (
        f"{library} {metadata.version(library)} has no {name} in {place}, "
        f"which is {PRIVATES[place, name]}: see the bounds in pyproject.toml"
    )


@pytest.mark.parametrize(
    ("place", "name"),
    [("grpclib.nowhere", "x"), ("grpclib.server", "_none"), ("grpclib.server:Stream", "_none")],
)
def test_a_private_that_is_missing_is_noticed(place: str, name: str) -> None:
    assert not is_there(place, name)


def test_what_is_used_is_in_the_table() -> None:
    names = privates_of_libraries()
    found = set().union(*(used(file, names) for file in SERVER.rglob("*.py")))

    assert {name for _, name in PRIVATES} == found


@pytest.mark.parametrize("library", ["grpclib", "betterproto"])
def test_a_library_whose_privates_are_used_is_bounded_from_above(library: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [Requirement(text) for text in project["dependencies"]]
    (bounds,) = [requirement.specifier for requirement in found if requirement.name == library]

    assert {one.operator for one in bounds} & {"<", "=="}
    assert bounds.contains(metadata.version(library), prereleases=True)
