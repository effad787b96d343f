"""What the gateway takes of aiohttp that aiohttp does not promise is there, by its name."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

import aiohttp.web_protocol
import pytest
from packaging.requirements import Requirement

from xlaserve.transport import rest
from xlaserve.transport.rest.aiohttp_connection import PRIVATES, missing_privates

ROOT = Path(__file__).resolve().parents[3]
SOURCES = sorted(Path(rest.__file__).parent.glob("*.py"))


def test_the_installed_aiohttp_has_every_private_that_is_used() -> None:
    missing = missing_privates()

    assert [] == missing, (
        f"aiohttp {metadata.version('aiohttp')} has no RequestHandler.{', .'.join(missing)}: see "
        "PRIVATES in transport/rest/aiohttp_connection.py, and the bounds in pyproject.toml"
    )


@pytest.mark.parametrize("name", PRIVATES)
def test_a_private_that_is_missing_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(aiohttp.web_protocol.RequestHandler, name)

    assert [name] == missing_privates()


def test_aiohttp_is_bounded_from_above() -> None:
    """By the next minor version: its privates may change with any."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [Requirement(text) for text in project["dependencies"]]
    (bounds,) = [requirement.specifier for requirement in found if requirement.name == "aiohttp"]

    assert {">=", "<"} == {one.operator for one in bounds}
    assert bounds.contains(metadata.version("aiohttp"))


NAMES = [name for name in dir(aiohttp.web_protocol.RequestHandler) if re.match("_[a-z]", name)]
OURS = {"_loop"}
"""Names that classes of the gateway have too."""


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_no_other_module_touches_a_private_of_aiohttp(source: Path) -> None:
    text = source.read_text()
    taken = {name for name in NAMES if re.search(rf"\.{name}\b", text)} - OURS

    assert taken == (set(PRIVATES) if source.name == "aiohttp_connection.py" else set())
