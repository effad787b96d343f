"""What tests cost the processor, and the mark of those that cost the most: `tests/costly.tsv`.

`tools/costly_tests.py` writes the table from a run with `--costs FILE`. A quarter of the functions
takes four fifths of the processor time: `tox run` leaves it to `tox run -e costly`.
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
    """Mark the tests whose functions the table names."""
    functions = named()
    for item in items:
        if function_of(item.nodeid) in functions:
            item.add_marker(MARK)


class Costs:
    """Writes what each test takes of the processor, with the processes that it waited for."""

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
    """Measure in each process of a run, where it was asked for."""
    if config.option.costs:
        config.pluginmanager.register(Costs(Path(config.option.costs).absolute()), "costs")


def _spent() -> float:
    return sum(os.times()[:4])
