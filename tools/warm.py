"""Pytest plugin that collects once, and then runs any of the collected tests on request.

    WARM_CHANNEL=5 pytest -p warm tests/models/rows

Reads requests from a socket, one JSON object per line: `tests` to run (all if empty), and `edit`,
the path of a module with its text before and after. Each request runs in a fork, which continues as
pytest would after collection, with the new code in the module's functions. The plugin first sends
its number of threads, then for each request the fork's process id, and its exit status once it has
ended.
"""

import gc
import json
import os
import socket
import sys
from collections.abc import Generator, Iterator
from inspect import CO_OPTIMIZED
from itertools import zip_longest
from pathlib import Path
from types import CodeType, FunctionType

import pytest

import executed

UNLIKE = 77
"""Exit status of a fork if a function cannot take the new code, or no function has it."""
_THREADS = Path("/proc/self/task")


class _Warm:
    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._requests = channel.makefile()
        self._is_fork = False
        self._status = 0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        self._say(_threads())
        items = {item.nodeid: item for item in session.items}
        session.items = []
        for line in self._requests:
            request = json.loads(line)
            if (child := os.fork()) == 0:
                os.setsid()
                self._is_fork = True
                self._requests.close()
                self._channel.close()
                session.items = [items[one] for one in request["tests"] or items]
                if request["edit"]:
                    executed.stop(session.config)
                    if not edited(*request["edit"]):
                        os._exit(UNLIKE)
                break
            self._say(child)
            _, status = os.waitpid(child, 0)
            self._say(os.waitstatus_to_exitcode(status))
        return (yield)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._status = exitstatus

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        # Normal interpreter exit would wait forever for threads that do not exist in the fork.
        if self._is_fork:
            sys.stdout.flush()
            os._exit(self._status)

    def _say(self, number: int) -> None:
        self._channel.sendall(b"%d\n" % number)


def _threads() -> int:
    """Count the threads that a fork would lose, except one that onnxruntime does not need."""
    if not _THREADS.exists():
        return 2
    return len(list(_THREADS.iterdir())) - ("onnxruntime" in sys.modules)


def edited(path: str, before: str, after: str) -> bool:
    """Patch a module's functions with their new code; tell whether that was possible.

    Module-level code that an import has already executed is not run again.
    """
    codes = (list(_within(compile(text, path, "exec"))) for text in (before, after))
    changed: dict[tuple[int, str], CodeType] = {}
    for old, new in zip_longest(*codes):
        if old is None or new is None or old.co_qualname != new.co_qualname:
            return False
        is_of_function = old.co_flags & CO_OPTIMIZED
        if old != new and is_of_function and changed.setdefault(_place(old), new) is not new:
            return False
    gc.unfreeze()  # get_objects() does not list frozen objects
    every = (one for one in gc.get_objects() if type(one) is FunctionType)
    functions = [one for one in every if one.__code__.co_filename == path]
    gc.freeze()
    found = [one for one in functions if _place(one.__code__) in changed]
    for function in found:
        try:
            function.__code__ = changed[_place(function.__code__)]
        except ValueError:
            return False  # the new code has other free variables
    return bool(found)


def _within(code: CodeType) -> Iterator[CodeType]:
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _within(one)


def _place(code: CodeType) -> tuple[int, str]:
    return code.co_firstlineno, code.co_qualname


def pytest_configure(config: pytest.Config) -> None:
    if channel := os.environ.pop("WARM_CHANNEL", None):
        config.pluginmanager.register(_Warm(socket.socket(fileno=int(channel))), "forks")
