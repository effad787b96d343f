"""Process that logs the output of other processes, and outlives them.

It reads only output that reaches stdout or stderr without passing through Python.

Run with `python -m`; stdin is a socket with SO_PASSCRED set, and stderr is the log. The process
ends once no process can write to the socket, so it gets the last lines of a server that crashed.
"""

import json
import math
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial

from xlaserve.process.best_effort import BestEffortStream
from xlaserve.process.endings import continue_with_parent

_CREDENTIALS = struct.Struct("iii")
"""The credentials of a writer: its process, user and group ids."""
_KIND = getattr(socket, "SCM_CREDENTIALS", 2)
_LAST_SECONDS = 1.0
CHUNK_BYTES = 1 << 16
_MOST_BYTES = 4096
"""Maximum number of bytes of a line that are logged; the remaining ones are counted."""
_MOST_RECORD_BYTES = 8192
_MOST_PARTS = 256
"""Maximum number of unfinished lines held, one per process."""
_PART_MS = 1000
"""Milliseconds of silence after which unfinished lines are logged."""
_PART_SECONDS = 5.0
"""Age in seconds at which an unfinished line is logged even if other processes keep writing."""


class _Line:
    """A line that one process has not finished."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.data = bytearray()
        self.cut_bytes = 0

    def add(self, data: bytes) -> None:
        taken = data[: _MOST_BYTES - len(self.data)]
        self.data += taken
        self.cut_bytes += len(data) - len(taken)


class OutputLines:
    """Joins output into lines per process; logs lines that are complete or have waited too long."""

    def __init__(
        self, show: Callable[[int, str, int], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`show` is called with a line's process id, its text, and the number of bytes cut off."""
        self._show_line = show
        self._clock = clock
        self._parts: dict[int, _Line] = {}
        """Unfinished lines by process, the oldest first."""

    def read(self, descriptor: int, receive: Callable[[], tuple[int, bytes]]) -> None:
        """Read until no process can write to the descriptor; `receive` returns pid and bytes."""
        waiting = select.poll()
        waiting.register(descriptor, select.POLLIN)
        while True:
            if not waiting.poll(_PART_MS if self._parts else None):
                self._flush()
                continue
            pid, data = receive()
            if not data:
                break
            self._take(pid, data)
        self._flush()

    def _take(self, pid: int, data: bytes) -> None:
        now = self._clock()
        *ended, rest = data.split(b"\n")
        for one in ended:
            line = self._parts.pop(pid, None) or _Line(now)
            line.add(one)
            self._show(pid, line)
        if rest:
            self._parts.setdefault(pid, _Line(now)).add(rest)
        self._flush(now - _PART_SECONDS if len(self._parts) <= _MOST_PARTS else now)

    def _flush(self, until: float = math.inf) -> None:
        """Show the unfinished lines that began before a time."""
        for pid, line in list(self._parts.items()):
            if line.began > until:
                break
            del self._parts[pid]
            self._show(pid, line)

    def _show(self, pid: int, line: _Line) -> None:
        text = line.data.decode("utf-8", "backslashreplace").rstrip()
        if text or line.cut_bytes:
            self._show_line(pid, text, line.cut_bytes)


class Records:
    """Writes a record of each line to the log."""

    def __init__(self, log: BestEffortStream) -> None:
        self._log = log

    def write(self, pid: int, line: str, cut_bytes: int) -> None:
        """Write the record of a line; a line that is too long for a record is shortened."""
        record = {"event": "raw output printed", "pid": pid, "line": line, "level": "warning"}
        if cut_bytes:
            record["cut_bytes"] = cut_bytes
        if self._log.lost:
            record["lost_before"] = self._log.lost
        record["timestamp"] = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        shown = json.dumps(record)
        while len(shown) > _MOST_RECORD_BYTES:
            line = line[: len(line) * 3 // 4]
            shown = json.dumps({**record, "line": f"{line}..."})
        self._log.write(shown + "\n")


def received(source: socket.socket) -> tuple[int, bytes]:
    """Return output with the id of the process that wrote it; empty once no process can write."""
    space = socket.CMSG_SPACE(_CREDENTIALS.size)
    data, about, _, _ = source.recvmsg(CHUNK_BYTES, space)
    pids = [_CREDENTIALS.unpack(value)[0] for _, kind, value in about if kind == _KIND]
    return pids[0] if pids else 0, data


def main() -> None:
    """Read output from the socket on stdin, and write log records to stderr."""
    continue_with_parent()
    log = BestEffortStream(sys.stderr)
    with socket.socket(fileno=os.dup(0)) as source:
        OutputLines(Records(log).write).read(source.fileno(), partial(received, source))
    log.finish(_LAST_SECONDS)


if __name__ == "__main__":
    main()
