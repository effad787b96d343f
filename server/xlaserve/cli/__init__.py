"""The command line, `xlaserve COMMAND`: serve, infer, export, adopt, import, plan, warm, ..."""

import errno
import os
import sys
from typing import TYPE_CHECKING, NoReturn

from xlaserve import build
from xlaserve.errors import XlaserveError
from xlaserve.process import HANDED
from xlaserve.process.best_effort import best_effort, finish, flushed, open_standard_streams

if TYPE_CHECKING:
    import typer

_FAILED = 1
_VERSION = "--version"


def application() -> "typer.Typer":
    """Return the command line application, without importing any command yet."""
    # Importing typer takes most of the time of `xlaserve --version`, which does not need it.
    from xlaserve.cli.commands import application as made

    return made()


def main() -> None:
    """Run the command line; report user errors in one line on stderr, and exit with status 1."""
    open_standard_streams()
    # Failures to write progress, warnings or the log are ignored, but answers are not lost
    # silently.
    sys.stderr = best_effort(sys.stderr)
    # Read this before startup removes the variable.
    is_replacement = HANDED in os.environ
    end = _log_failure if is_replacement else _fail
    try:
        _run(is_replacement=is_replacement)
    except XlaserveError as error:
        end(str(error))
    except OSError as error:
        if error.filename is None:
            # If stdout failed, flush it again here, so that its error is reported only once.
            _write_out()
        end(f"{error.filename or 'output'}: {error.strerror or error}")
    finally:
        _write_out()
        finish(sys.stderr)


def _run(*, is_replacement: bool) -> None:
    if sys.argv[1:] == [_VERSION]:  # without typer, whose import takes most of the time
        sys.stdout.write(f"xlaserve {build.version()}\n")
    elif is_replacement:
        from xlaserve.cli.commands import UsageError

        try:
            application()(standalone_mode=False)
        except UsageError as error:
            _log_failure(str(error))
    else:
        application()()


def _write_out() -> None:
    error = flushed(sys.stdout)
    if error is None:
        return
    if error.errno == errno.EPIPE:  # the reader closed the pipe
        sys.exit(_FAILED)
    _fail(f"output: {error.strerror or error}")


def _log_failure(text: str) -> NoReturn:
    """Exit after logging the failure, because the server to be replaced writes to the same log."""
    import structlog

    from xlaserve.process import log

    log.configure()
    structlog.get_logger("serve").error("start failed", reason=text)
    sys.exit(_FAILED)


def _fail(text: str) -> NoReturn:
    sys.stderr.write(f"error: {text}\n")
    sys.exit(_FAILED)
