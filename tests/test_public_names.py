"""Public names of `xlaserve`: each resolves as its table says, in any order of access."""

import inspect
import re
import subprocess
import sys
from importlib import import_module
from types import ModuleType

import pytest

import xlaserve

# Public modules; every other name is a class, a function or a text.
MODULES = {"content_types"}

SAY = "import xlaserve; value = getattr(xlaserve, {name!r}); print(type(value).__name__)"


@pytest.mark.parametrize("name", xlaserve.__all__)
def test_first_name_that_is_asked_for(name: str) -> None:
    """In a subprocess: earlier imports could hide a wrong name."""
    told = subprocess.run(
        [sys.executable, "-c", SAY.format(name=name)],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert "" == told.stderr
    assert (name in MODULES) == ("module" == told.stdout.strip())


def test_names_are_the_same_when_asked_again() -> None:
    """Importing a submodule must not replace the function of that name."""
    for _ in range(2):
        for name in reversed(xlaserve.__all__):
            value = getattr(xlaserve, name)
            assert isinstance(value, ModuleType) == (name in MODULES)
            assert name == "__version__" or name in MODULES or value.__name__ == name


def test_unknown_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'export_streams'"):
        xlaserve.export_streams  # noqa: B018


@pytest.mark.parametrize("name", ["AsyncClient", "CallFailed", "Client"])
def test_a_name_of_the_client_says_where_it_is(name: str) -> None:
    with pytest.raises(AttributeError, match=f"did you mean xlaserve.client.{name}?"):
        getattr(xlaserve, name)
    assert name in vars(import_module("xlaserve.client"))


def test_dir_lists_every_public_name() -> None:
    assert set(xlaserve.__all__) <= set(dir(xlaserve))


# Classes that users construct; the others are constructed for them.
MADE = {"Exportable", "ExportableStream", "Service"}


@pytest.mark.parametrize("name", sorted(set(xlaserve.__all__) - MODULES - {"__version__"}))
def test_help_says_what_each_argument_is(name: str) -> None:
    value = getattr(xlaserve, name)
    text = inspect.getdoc(value)
    explained = set(re.findall(r"\w+", text or ""))

    assert text
    if name in MADE or not inspect.isclass(value):
        parameters = inspect.signature(value).parameters
        assert [] == [one for one in parameters if one not in explained]
