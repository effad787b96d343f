"""Child processes shielded from signals that terminals and systemd send to the whole group.

The server alone hears it, and ends what it has started: a child that ended first would look like
one that a model has ended, and be told, tried again, and blamed on that model.
"""

import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

FOR_THE_SERVER = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR2})
"""Signals that end, reload or replace a server."""


def start_deaf(command: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
    """Start a process shielded from those signals, with Popen's further arguments.

    Raises OSError where the system refuses.
    """
    with started_deaf():
        return subprocess.Popen(command, **options)


@contextmanager
def started_deaf() -> Iterator[None]:
    """Within this context, this thread's child processes are shielded from those signals.

    From their first instruction on: they inherit the mask, which no interpreter touches.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THE_SERVER)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stay_deaf() -> None:
    """Ignore those signals in this process, but not in its children.

    For a process that runs code of others, which may start processes and end them by a signal.
    """
    for number in FOR_THE_SERVER:
        # Not ignored, which programs inherit.
        signal.signal(number, _nothing)
    forking = _Forking()
    os.register_at_fork(
        before=forking.begin, after_in_parent=forking.end, after_in_child=forking.end_in_child
    )
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FOR_THE_SERVER)


class _Forking(threading.local):
    """Has no signal come between a fork and the moment from which on it ends the new process."""

    def begin(self) -> None:
        self.before = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THE_SERVER)

    def end(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self.before)

    def end_in_child(self) -> None:
        for number in FOR_THE_SERVER:
            # Unless the code of others has seen to it itself.
            if signal.getsignal(number) is _nothing:
                signal.signal(number, signal.SIG_DFL)
        self.end()


def _nothing(_number: int, _frame: FrameType | None) -> None:
    """Return to the interrupted code."""
