"""The command line, `xlaserve COMMAND`: serve, infer, export, adopt, import, plan, warm, ..."""

import errno
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, NoReturn

import typer

from xlaserve import build
from xlaserve.best_effort import best_effort, finish, flushed, open_standard_streams
from xlaserve.cli import (
    adopt,
    bench,
    cache,
    completion,
    config,
    doctor,
    export,
    health,
    import_onnx,
    infer,
    init,
    models,
    plan,
    repo,
    serve,
    token,
    top,
    warm,
)
from xlaserve.cli.serve_help import ServeCommand
from xlaserve.errors import XlaserveError

_FAILED = 1


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"xlaserve {build.version()}")
        raise typer.Exit


def application() -> typer.Typer:
    """Return the command with all its commands."""
    made = typer.Typer(
        name="xlaserve",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    made.callback()(_application)
    for panel, commands in _commands().items():
        for name, command in commands.items():
            if isinstance(command, typer.Typer):
                made.add_typer(command, name=name, rich_help_panel=panel)
            else:
                kind = ServeCommand if name == "serve" else None
                made.command(name, cls=kind, rich_help_panel=panel)(command)
    return made


def _commands() -> Mapping[str, Mapping[str, Callable[..., None] | typer.Typer]]:
    """Return the commands by the heading of the help that they stand below."""
    return {
        "Serve": {
            "serve": serve.command(),
            "init": init.init,
            "doctor": doctor.doctor,
            "config": config.config(),
        },
        "Ask a server": {
            "infer": infer.infer,
            "models": models.models(),
            "top": top.top,
            "health": health.health,
            "bench": bench.bench,
        },
        "Make models": {
            "export": export.export,
            "import": import_onnx.import_onnx,
            "adopt": adopt.adopt,
        },
        "Look after a repository": {
            "repo": repo.repo(),
            "plan": plan.plan,
            "warm": warm.warm,
            "cache": cache.cache(),
        },
        "Other": {"token": token.token, "completion": completion.completion},
    }


def main() -> None:
    """Run the command line; what the user can mend is one line on stderr and exit status 1."""
    open_standard_streams()
    # Progress, warnings and the log are told as well as they can be; answers are not lost quietly.
    sys.stderr = best_effort(sys.stderr)
    try:
        application()()
    except XlaserveError as error:
        _fail(str(error))
    except OSError as error:
        if error.filename is None:
            # Where it was stdout that failed, what it still holds fails again: told once.
            _write_out()
        _fail(f"{error.filename or 'output'}: {error.strerror or error}")
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


def _fail(text: str) -> NoReturn:
    sys.stderr.write(f"error: {text}\n")
    sys.exit(_FAILED)
