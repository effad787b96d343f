"""Signals: the first SIGTERM or SIGINT drains the server, a later one ends it.

SIGHUP never ends it, also where a terminal is closed: what can be reloaded is. SIGUSR2 replaces it.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn, Protocol

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SERVING = frozenset({signal.SIGHUP, signal.SIGUSR2})
"""Signals to a server that serves."""
_ONCE_SECONDS = 1.0
"""Signals to stop within this time are one: managers of processes tell a group and its parent, or
send SIGINT and SIGTERM, and each must not cut off what the other lets end."""
_SIGNALLED = 128
"""Added to the number of the signal that ended a process, this is its exit status in a shell."""
_INIT = 1
"""Process id of the first process of a container, for which signals have no default action."""


class Replacing(Protocol):
    """Replaces the server by a new process."""

    @property
    def has_taken_over(self) -> bool:
        """Tell whether the replacement serves, and this process is stopping."""
        ...

    def start(self) -> None:
        """Start the new one."""

    def close(self) -> None:
        """End the new one, unless it has taken over."""


@contextmanager
def handled(
    task: "asyncio.Task[Any]",
    reload: Callable[[], None],
    replacing: Replacing | None = None,
) -> Iterator[None]:
    """Within this context, stop signals cancel a task, SIGHUP reloads, and SIGUSR2 replaces.

    Behind the block the two are ignored, and a signal to stop that comes a second later, or more,
    ends the process: those before it are the first one, told twice. That with
    which a replaced server stops itself does not count: whoever stops it too has sent one only.
    """
    loop = asyncio.get_running_loop()
    is_stopping = False

    def stop() -> None:
        nonlocal is_stopping
        if is_stopping or replacing is None or not replacing.has_taken_over:
            _end_by_the_next(loop)
        if is_stopping:
            return
        is_stopping = True
        if replacing is not None:
            replacing.close()
        task.cancel()

    for number in STOP_SIGNALS:
        # Also where it is ignored: a shell has SIGINT ignored for what it runs in the background,
        # and somebody may still send it.
        loop.add_signal_handler(number, stop)
    loop.add_signal_handler(signal.SIGHUP, reload)
    if replacing is not None:
        loop.add_signal_handler(signal.SIGUSR2, replacing.start)
    try:
        yield
    finally:
        # Between the two the default action would end the process.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SERVING)
        for number in _SERVING:
            loop.remove_signal_handler(number)
        ignore()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SERVING)


def _end_by_the_next(loop: asyncio.AbstractEventLoop) -> None:
    """Have a signal to stop end the process once that is no repetition of the one before."""
    since = time.monotonic()

    def end() -> None:
        for number in STOP_SIGNALS:
            end_at_once(number)

    def again(number: int, _frame: FrameType | None) -> None:
        # The timer may be late, and is gone with the loop.
        if time.monotonic() - since >= _ONCE_SECONDS:
            end()
            os.kill(os.getpid(), number)

    # Between the two lines the default action would end the process.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    for number in STOP_SIGNALS:
        loop.remove_signal_handler(number)
        signal.signal(number, again)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    loop.call_later(_ONCE_SECONDS, end)


def ignore() -> None:
    """Ignore SIGHUP and SIGUSR2, before and after there is anything to reload or replace."""
    for number in _SERVING:
        signal.signal(number, signal.SIG_IGN)


def end_at_once(number: int) -> None:
    """Have a signal end the process, whatever the process does."""
    if os.getpid() == _INIT:
        signal.signal(number, _exit)
    else:
        # The kernel does it, also while no Python code runs.
        signal.signal(number, signal.SIG_DFL)


def _exit(number: int, _frame: FrameType | None) -> NoReturn:
    os._exit(_SIGNALLED + number)
