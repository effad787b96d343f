"""Pytest plugin that records which tests execute which lines of a package.

    EXECUTED_BELOW=server/xlaserve/runtime EXECUTED_INTO=lines.json pytest -p executed

Lines executed while fixtures are set up count for every test of the file. Needs Python 3.12.
"""

import inspect
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

_monitoring: Any = getattr(sys, "monitoring", None)
IS_POSSIBLE = _monitoring is not None
_TOOL = 3
"""An id that sys.monitoring leaves free for any tool."""


class _Executed:
    def __init__(self, below: str, into: Path) -> None:
        self._below = below
        self._into = into
        self._lines: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        self._seconds: dict[str, float] = {}
        self._current = ""

    def pytest_sessionstart(self) -> None:
        events = _monitoring.events
        _monitoring.use_tool_id(_TOOL, "executed")
        _monitoring.register_callback(_TOOL, events.PY_START, self._started)
        _monitoring.register_callback(_TOOL, events.LINE, self._line)
        _monitoring.set_events(_TOOL, events.PY_START)

    def _started(self, code: CodeType, offset: int) -> object:
        del offset
        if code.co_filename.startswith(self._below):
            _monitoring.set_local_events(_TOOL, code, _monitoring.events.LINE)
        return _monitoring.DISABLE

    def _line(self, code: CodeType, line: int) -> object:
        # Module and class bodies are executed once, by whichever test imports them first, so they
        # count for all tests.
        is_once = not code.co_flags & inspect.CO_OPTIMIZED
        self._lines[code.co_filename][line].add("" if is_once else self._current)
        return _monitoring.DISABLE

    def _begin(self, name: str) -> None:
        self._current = name
        _monitoring.restart_events()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        began = time.monotonic()
        self._begin(item.nodeid.partition("::")[0])
        try:
            return (yield)
        finally:
            self._seconds[item.nodeid] = time.monotonic() - began
            self._begin("")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        self._begin(item.nodeid)
        try:
            return (yield)
        finally:
            self._begin(item.nodeid.partition("::")[0])

    def stop(self) -> None:
        _monitoring.set_events(_TOOL, 0)
        _monitoring.free_tool_id(_TOOL)

    def pytest_sessionfinish(self) -> None:
        self.stop()
        lines = {
            path: {line: sorted(names) for line, names in found.items()}
            for path, found in self._lines.items()
        }
        self._into.write_text(json.dumps({"lines": lines, "seconds": self._seconds}))


def pytest_configure(config: pytest.Config) -> None:
    into = os.environ.get("EXECUTED_INTO")
    if into and IS_POSSIBLE:
        below = os.environ["EXECUTED_BELOW"]
        config.pluginmanager.register(_Executed(below, Path(into)), "executed lines")


def stop(config: pytest.Config) -> None:
    """Stop recording, and write nothing."""
    if isinstance(noting := config.pluginmanager.get_plugin("executed lines"), _Executed):
        noting.stop()
        config.pluginmanager.unregister(noting)
