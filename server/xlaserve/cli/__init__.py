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
    """Return the command with all its commands, none of which is imported yet."""
    # Typer takes most of the time of `xlaserve --version`, which asks for none of it.
    from xlaserve.cli.commands import application as made

    return made()


def main() -> None:
    """Run the command line; what the user can mend is one line on stderr and exit status 1."""
    open_standard_streams()
    # Progress, warnings and the log are told as well as they can be; answers are not lost quietly.
    sys.stderr = best_effort(sys.stderr)
    # Before the start takes it out.
    is_replacement = HANDED in os.environ
    end = _log_failure if is_replacement else _fail
    try:
        _run(is_replacement=is_replacement)
    except XlaserveError as error:
        end(str(error))
    except OSError as error:
        if error.filename is None:
            # Where it was stdout that failed, what it still holds fails again: told once.
            _write_out()
        end(f"{error.filename or 'output'}: {error.strerror or error}")
    finally:
        _write_out()
        finish(sys.stderr)


def _run(*, is_replacement: bool) -> None:
    if sys.argv[1:] == [_VERSION]:  # without typer, which takes most of its time
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
    if error.errno == errno.EPIPE:  # nobody wants the rest
        sys.exit(_FAILED)
    _fail(f"output: {error.strerror or error}")


def _log_failure(text: str) -> NoReturn:
    """End with a record in the log, whose other lines are of the server that is not replaced."""
    import structlog

    from xlaserve.process import log

    log.configure()
    structlog.get_logger("serve").error("start failed", reason=text)
    sys.exit(_FAILED)


def _fail(text: str) -> NoReturn:
    sys.stderr.write(f"error: {text}\n")
    sys.exit(_FAILED)
