"""The lines that the process of a model prints, in the log of the server."""

import subprocess
import time
from typing import Any

_SHOWN = 2000
_LINES_PER_SECOND = 200
"""The most lines that a process prints which the log takes in a second."""


def log_printed(process: "subprocess.Popen[bytes]", log: Any) -> None:
    """Write what a process prints into a log, until it prints no more. Blocks."""
    assert process.stdout is not None
    second, count, dropped = 0, 0, 0
    with process.stdout as lines:
        while line := lines.readline(_SHOWN):
            now = int(time.monotonic())
            if now != second:
                if dropped:
                    log.warning("lines that a model printed are not shown", lines=dropped)
                second, count, dropped = now, 0, 0
            count += 1
            if count > _LINES_PER_SECOND:
                dropped += 1
            else:
                text = line.decode(errors="replace").rstrip()
                log.info("the process of a model printed", line=text)
    if dropped:
        log.warning("lines that a model printed are not shown", lines=dropped)
