"""Processes that end with their parent, and sessions that end with their leader."""

import ctypes
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_FAILED = 1
_MOST_DESCRIPTORS = 1 << 30
_ROUND_SECONDS = 0.01
_MOST_ROUNDS = 1000
"""Maximum number of passes that kill the survivors of a session: a process in a system call ends
only when the call returns."""


def end_with_parent(parent: int = 0) -> None:
    """Ask the kernel to kill this process when the thread that started it ends.

    Exits immediately if `parent`, the id of the process that started this one, has already ended.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent and os.getppid() != parent:
        os._exit(_FAILED)


def continue_with_parent() -> None:
    """Ask the kernel to resume this process (SIGCONT) when the thread that started it ends.

    For a process that ends by itself after its parent, even if it was stopped.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def end_session_with_this() -> None:
    """Arrange for this process's session to be killed once the process has ended.

    Processes that lead their own session are not killed. Call this before any thread starts,
    because it forks. The watching process is a grandchild, so that code here that waits for all its
    children does not wait for it.
    """
    leader = os.getpid()
    try:
        ended = os.pidfd_open(leader)
    except (AttributeError, OSError):
        return  # without pidfd_open, only the server kills this session
    with warnings.catch_warnings():
        # Imported libraries may have started threads; the forked code calls none of them.
        warnings.simplefilter("ignore", DeprecationWarning)
        first = os.fork()
    if first:
        os.close(ended)
        os.waitpid(first, 0)
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            if os.fork():
                return
        _watch(leader, ended)
    finally:
        os._exit(0)


def _watch(leader: int, ended: int) -> None:
    """Wait for a process to end, and kill the rest of its session."""
    # Leave the process group, because the server kills the whole group.
    os.setpgid(0, 0)
    # Other processes wait for these pipes and sockets to be closed.
    os.closerange(0, ended)
    os.closerange(ended + 1, _MOST_DESCRIPTORS)
    waiting = select.poll()
    waiting.register(ended, select.POLLIN)
    waiting.poll()
    end_session(leader)


def end_session(leader: int) -> None:
    """Kill the remaining processes of a session; its leader has ended, but has not been reaped.

    Both the leader's parent and its watcher call this, in case one of them is stopped (SIGSTOP).
    """
    for _ in range(_MOST_ROUNDS):
        ours = leader, os.getpid()
        left = [pid for pid in _processes() if pid not in ours and _is_of(pid, leader)]
        if not left:
            return
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_ROUND_SECONDS)


def _processes() -> Iterator[int]:
    return (int(one.name) for one in Path("/proc").iterdir() if one.name.isdigit())


def _is_of(pid: int, session: int) -> bool:
    """Tell whether a process belongs to a session and is not a zombie."""
    with suppress(OSError, IndexError):
        state, _, _, found = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:4]
        return int(found) == session and state not in "ZX"
    return False
