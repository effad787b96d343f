"""The server process of `xlaserve.serve`; it reports its startup over a pipe.

It reads its settings from the first line of stdin, as JSON. When stdin is closed it drains and
exits, so it does not outlive its parent, however the parent ends.
"""

import faulthandler
import json
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, TextIO

import uvloop

from xlaserve.app.display import Addresses, ModelRow, NoDisplay
from xlaserve.app.server import run
from xlaserve.errors import XlaserveError
from xlaserve.process import own_code, signals
from xlaserve.process.output import logged_output
from xlaserve.process.systemd import Systemd
from xlaserve.settings import Settings

FAILED = 1
"""Exit status of a server that has reported why it could not start."""


class StartupReport(NoDisplay):
    """Reports the server's addresses, then its models, as one line of JSON each."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def say(self, **what: Any) -> None:
        """Send a report to the parent, which may have exited."""
        with suppress(OSError, ValueError):
            self._stream.write(json.dumps(what) + "\n")
            self._stream.flush()

    def listening(self, addresses: Addresses) -> None:
        """Report the addresses of the endpoints."""
        self.say(grpc=addresses.grpc, http=addresses.http or "")

    def started(self, rows: Sequence[ModelRow]) -> None:
        """Report how each model's load at startup has ended."""
        entries = [row.entry for row in rows]
        self.say(models=[[one.name, one.version, one.state, one.reason] for one in entries])


def main() -> None:
    """Serve until stdin is closed or SIGTERM arrives."""
    output = StartupReport(os.fdopen(os.dup(1), "w"))
    # Redirect the models' output to stderr, which is the log.
    os.dup2(2, 1)
    given = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_stdin, name="ends with its parent", daemon=True).start()
    own_code.keep()
    signals.ignore()
    faulthandler.enable(sys.stderr)
    try:
        left = _serve(given, output)
    except* (XlaserveError, OSError) as group:
        output.say(failed=str(_first(group)))
        os._exit(FAILED)
    if left:
        # Exit without waiting for threads that hang.
        os._exit(0)


def _serve(given: Mapping[str, Any], output: StartupReport) -> bool:
    settings = Settings.read(os.environ, **given)
    level = settings.log_level
    with logged_output("info" if level == "auto" else level):
        return uvloop.run(run(settings, output, Systemd.of({})))


def _first(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


def _end_with_stdin() -> None:
    with suppress(OSError):
        while sys.stdin.buffer.read(1 << 16):
            pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
