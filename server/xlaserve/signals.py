"""Signals of a server: the first SIGTERM or SIGINT drains it, the second one ends it at once.

SIGHUP never ends it, also where a terminal is closed: what can be reloaded is.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SIGNALLED = 128
"""Added to the number of the signal that ended a process, this is its exit status in a shell."""
_INIT = 1
"""Process id of the first process of a container, for which signals have no default action."""


@contextmanager
def handled(task: "asyncio.Task[Any]", reload: Callable[[], None]) -> Iterator[None]:
    """Have the first signal to stop cancel a task, and each SIGHUP reload, within a block.

    Behind the block SIGHUP is ignored, and the next signal to stop ends the process.
    """
    loop = asyncio.get_running_loop()

    def stop() -> None:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)
            end_at_once(number)
        task.cancel()

    for number in STOP_SIGNALS:
        # Also where it is ignored: a shell has SIGINT ignored for what it runs in the background,
        # and somebody may still send it.
        loop.add_signal_handler(number, stop)
    loop.add_signal_handler(signal.SIGHUP, reload)
    try:
        yield
    finally:
        # Between the two the default action would end the process.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        loop.remove_signal_handler(signal.SIGHUP)
        ignore_hangup()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})


def ignore_hangup() -> None:
    """Have SIGHUP do nothing: there is nothing to reload yet, or no more."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def end_at_once(number: int) -> None:
    """Have a signal end the process, whatever the process does."""
    if os.getpid() == _INIT:
        signal.signal(number, _exit)
    else:
        # The kernel does it, also while no Python code runs.
        signal.signal(number, signal.SIG_DFL)


def _exit(number: int, _frame: FrameType | None) -> NoReturn:
    os._exit(_SIGNALLED + number)
