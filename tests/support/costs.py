"""CPU time per test, and the `costly` mark for the most expensive ones (`tests/costly.tsv`).

`tools/costly_tests.py` generates the table from a run with `--costs FILE`. A quarter of the test
functions takes four fifths of the CPU time: `tox run` leaves them to `tox run -e costly`.
"""

import json
import os
from collections.abc import Generator, Iterable
from pathlib import Path

import pytest

from costly_tests import function_of, named

MARK = "costly"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--costs",
        metavar="FILE",
        help="append a line for each test: its name, and the seconds of the processor that it took",
    )


def mark(items: Iterable[pytest.Item]) -> None:
    """Mark the tests whose functions are in the table."""
    functions = named()
    for item in items:
        if function_of(item.nodeid) in functions:
            item.add_marker(MARK)


class Costs:
    """Writes the CPU time of each test, including child processes that it waited for."""

    def __init__(self, file: Path) -> None:
        self._file = file

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        before = _spent()
        result = yield
        line = json.dumps([item.nodeid, round(_spent() - before, 3)])
        with self._file.open("a") as file:
            file.write(line + "\n")
        return result


def pytest_configure(config: pytest.Config) -> None:
    """Measure in each process of a run with `--costs`."""
    if config.option.costs:
        config.pluginmanager.register(Costs(Path(config.option.costs).absolute()), "costs")


def _spent() -> float:
    return sum(os.times()[:4])
