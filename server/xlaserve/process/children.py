"""Child processes shielded from signals that terminals and systemd send to the whole group.

Only the server handles those signals, and then ends its children. A child that ended first would
look like a crash, which is logged, retried, and attributed to a model.
"""

import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from xlaserve.process import own_code

FOR_THE_SERVER = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR2})
"""Signals that stop, reload or replace the server."""


def start_shielded(command: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
    """Start a process with the server's signals blocked; `options` are Popen's.

    A module of this package runs the code with which this server was started. Raises OSError if the
    process cannot be started.
    """
    words, descriptors = own_code.command(command)
    options["pass_fds"] = (*options.get("pass_fds", ()), *descriptors)
    with shielded_start():
        return subprocess.Popen(words, **options)


@contextmanager
def shielded_start() -> Iterator[None]:
    """Within this context, this thread's child processes start with the server's signals blocked.

    They inherit the signal mask, so it is in effect from their first instruction.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THE_SERVER)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def shield_from_signals() -> None:
    """Shield this process, but not its children, from the signals meant for the server.

    For a process that runs user code, which may start child processes and stop them by a signal.
    """
    for number in FOR_THE_SERVER:
        # Not SIG_IGN, which child processes would inherit.
        signal.signal(number, _nothing)
    forking = _Forking()
    os.register_at_fork(
        before=forking.begin, after_in_parent=forking.end, after_in_child=forking.end_in_child
    )
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FOR_THE_SERVER)


class _Forking(threading.local):
    """Blocks the signals around a fork, until the child has restored their default actions."""

    def begin(self) -> None:
        self.before = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THE_SERVER)

    def end(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self.before)

    def end_in_child(self) -> None:
        for number in FOR_THE_SERVER:
            # Keep handlers that the user code has installed.
            if signal.getsignal(number) is _nothing:
                signal.signal(number, signal.SIG_DFL)
        self.end()


def _nothing(_number: int, _frame: FrameType | None) -> None:
    """Do nothing. Unlike SIG_IGN, programs started with exec do not inherit this handler."""
