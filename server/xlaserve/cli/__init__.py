"""The command line, `xlaserve COMMAND`: serve, infer, export, adopt, import, plan, warm, ..."""

import errno
import os
import sys
from typing import Annotated, NoReturn

import typer

from xlaserve import build
from xlaserve.cli.commands import Commands, listed
from xlaserve.errors import XlaserveError
from xlaserve.process import HANDED
from xlaserve.process.best_effort import best_effort, finish, flushed, open_standard_streams

_FAILED = 1
_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
"""Raised for wrong flags; typer has no name for it."""


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"xlaserve {build.version()}")
        raise typer.Exit


def application() -> typer.Typer:
    """Return the command with all its commands, none of which is imported yet."""
    made = typer.Typer(
        name="xlaserve",
        cls=Commands,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    made.callback()(_application)
    listed(made)
    return made


def main() -> None:
    """Run the command line; what the user can mend is one line on stderr and exit status 1."""
    open_standard_streams()
    # Progress, warnings and the log are told as well as they can be; answers are not lost quietly.
    sys.stderr = best_effort(sys.stderr)
    # Before the start takes it out.
    is_replacement = HANDED in os.environ
    end = _log_failure if is_replacement else _fail
    try:
        # A replacement's wrong flags raise what typer would print.
        application()(standalone_mode=not is_replacement)
    except _USAGE_ERROR as error:
        end(str(error))
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


def _application(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", callback=_show_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Serve JAX models over the V2 (Open Inference) protocol."""


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
