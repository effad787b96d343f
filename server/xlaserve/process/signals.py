"""Signal handlers: a first SIGTERM or SIGINT drains the server, a second one ends it.

SIGHUP reloads settings and never ends the server, even when a terminal closes. SIGUSR2 replaces the
process.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn, Protocol

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SERVING = frozenset({signal.SIGHUP, signal.SIGUSR2})
"""Signals that are handled only while the server serves."""
_ONCE_SECONDS = 1.0
"""Stop signals within this time count as one. Process managers may signal both a group and its
parent, or send SIGINT and SIGTERM; the second signal must not abort the drain."""
_SIGNALLED = 128
"""Shells report a process killed by signal N as exit status 128 + N."""
_INIT = 1
"""Process id of a container's first process, for which signals have no default action."""


class Replacing(Protocol):
    """Starts a new process that replaces this server."""

    @property
    def has_taken_over(self) -> bool:
        """Tell whether the replacement serves, so that this process is stopping."""
        ...

    def start(self) -> None:
        """Start the replacement."""

    def close(self) -> None:
        """Terminate the replacement, unless it has taken over."""


@contextmanager
def handled(
    task: "asyncio.Task[Any]",
    reload: Callable[[], None],
    replacing: Replacing | None = None,
) -> Iterator[None]:
    """Within this context, stop signals cancel a task, SIGHUP reloads, and SIGUSR2 replaces.

    SIGHUP and SIGUSR2 are ignored afterwards. After a first stop signal, another one ends the
    process, except within the first second, when it counts as a repetition. A replaced server stops
    itself with a signal, which does not count as the first one.
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
        # Handle it even if ignored: shells ignore SIGINT for background jobs, but it may be sent.
        _call_at(number, loop, stop)
    _call_at(signal.SIGHUP, loop, reload)
    if replacing is not None:
        _call_at(signal.SIGUSR2, loop, replacing.start)
    try:
        yield
    finally:
        ignore()


def _call_at(number: int, loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    """Call something on the event loop at a signal.

    Removing a handler of `add_signal_handler` restores the default action until another one is
    set. A signal that a thread takes meanwhile would end the process, and blocking it concerns the
    calling thread only. These handlers are replaced in one step.
    """

    server = os.getpid()

    def post(number: int, _frame: FrameType | None) -> None:
        if os.getpid() == server:
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(call)
                return
        # In a fork as well, whose copy of the event loop does not run.
        end_at_once(number)
        os.kill(os.getpid(), number)

    signal.signal(number, post)
    # Native code that waits in this thread resumes, as with handlers of the event loop.
    signal.siginterrupt(number, False)


def _end_by_the_next(loop: asyncio.AbstractEventLoop) -> None:
    """Let another stop signal end the process, once `_ONCE_SECONDS` have passed."""
    since = time.monotonic()

    def end() -> None:
        for number in STOP_SIGNALS:
            end_at_once(number)

    def again(number: int, _frame: FrameType | None) -> None:
        # Check the time as well: the timer may be late, and stops with the event loop.
        if time.monotonic() - since >= _ONCE_SECONDS:
            end()
            os.kill(os.getpid(), number)

    for number in STOP_SIGNALS:
        signal.signal(number, again)
    loop.call_later(_ONCE_SECONDS, end)


def ignore() -> None:
    """Ignore SIGHUP and SIGUSR2, which have no meaning during startup and shutdown."""
    for number in _SERVING:
        signal.signal(number, signal.SIG_IGN)


def end_at_once(number: int) -> None:
    """Let a signal end the process immediately, even if the process hangs."""
    if os.getpid() == _INIT:
        signal.signal(number, _exit)
    else:
        # The kernel then ends the process, even while native code runs.
        signal.signal(number, signal.SIG_DFL)


def _exit(number: int, _frame: FrameType | None) -> NoReturn:
    os._exit(_SIGNALLED + number)
