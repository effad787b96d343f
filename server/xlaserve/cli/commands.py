"""The table of commands, and the group that imports each on demand."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

from xlaserve import build

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""Raised for wrong options; typer does not export it."""


@dataclass(frozen=True, slots=True)
class Row:
    """A command: its help line and its module."""

    panel: str
    """The help heading under which the command is listed."""
    text: str
    """First line of the command's help, available without importing the command."""
    module: str
    """The module of this package that contains it, imported when the command runs."""
    function: str
    is_maker: bool = False
    """Whether the function returns the command or the group of commands."""
    kind: str = ""
    """Its class as `module.Class`, or empty for typer's."""


_SERVE, _ASK, _MAKE = "Serve", "Ask a server", "Make models"
_REPOSITORY, _OTHER = "Look after a repository", "Other"

COMMANDS: Mapping[str, Row] = MappingProxyType(
    {
        "serve": Row(
            _SERVE,
            "Serve the models of a repository until told to stop.",
            "serve.command",
            "command",
            is_maker=True,
            kind="serve.help.ServeCommand",
        ),
        "init": Row(
            _SERVE,
            "Make a repository with a model, a file of settings and a client that asks it.",
            "init.command",
            "init",
        ),
        "doctor": Row(
            _SERVE,
            "Check Python, JAX, devices, limits, ports and directories; exit with 1 on a failure.",
            "doctor",
            "doctor",
        ),
        "config": Row(_SERVE, "Check and show settings.", "config", "config", is_maker=True),
        "infer": Row(
            _ASK, "Run one inference and print the values of the outputs.", "asking.infer", "infer"
        ),
        "models": Row(
            _ASK, "Look after the models of a server.", "asking.models", "models", is_maker=True
        ),
        "top": Row(
            _ASK,
            "Show the rates, times and memory of models, until q or Ctrl-C; in a pipe without"
            " keys.",
            "top.command",
            "top",
        ),
        "events": Row(
            _ASK,
            "Show what happened on a server, and who asked for it: loads, unloads, failures.",
            "asking.events",
            "events",
        ),
        "health": Row(
            _ASK,
            "Exit with 0 when a server is ready, else with 1 and one line that says why.",
            "health",
            "health",
        ),
        "bench": Row(
            _ASK,
            "Measure latency and throughput of a model; exit with 1 if a request failed.",
            "bench.command",
            "bench",
        ),
        "export": Row(
            _MAKE,
            "Export a JAX function and its parameters as data that any xlaserve can serve.",
            "export",
            "export",
        ),
        "import": Row(
            _MAKE,
            "Convert an ONNX, PyTorch or language model, once, to what any xlaserve can serve.",
            "importing.command",
            "import_onnx",
        ),
        "adopt": Row(
            _MAKE,
            "Make what any xlaserve can serve, checked and named, of a file that jax.export wrote.",
            "adopt",
            "adopt",
        ),
        "repo": Row(
            _REPOSITORY,
            "Look after the models of a repository.",
            "repo.group",
            "repo",
            is_maker=True,
        ),
        "plan": Row(
            _REPOSITORY,
            "Compile a repository for devices that are not there, and say what fits on them.",
            "offline.plan",
            "plan",
        ),
        "warm": Row(
            _REPOSITORY,
            "Compile every model of a repository into a compilation cache, for servers to start"
            " with.",
            "offline.warm",
            "warm",
        ),
        "cache": Row(
            _REPOSITORY, "Look after compiled programs.", "offline.cache", "cache", is_maker=True
        ),
        "logs": Row(
            _OTHER,
            "Show a server's log, which is lines of JSON, as one reads it.",
            "logs",
            "logs",
        ),
        "access": Row(
            _OTHER, "Look after a file of access rules.", "access", "access", is_maker=True
        ),
        "token": Row(
            _OTHER, "Make a token for the file of access rules (docs/access.md).", "token", "token"
        ),
        "completion": Row(
            _OTHER,
            'Print the completion script of a shell, as `eval "$(xlaserve completion bash)"`'
            " wants it.",
            "completion",
            "completion",
        ),
    }
)
"""Every command, in the order of the help."""


class Commands(TyperGroup):
    """Lists commands from their rows, and imports only the one that is run or completed."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the name of a command, the command, and the remaining arguments."""
        name, found, rest = super().resolve_command(ctx, args)
        return name, found and loaded(str(name)), rest


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"xlaserve {build.version()}")
        raise typer.Exit


def application() -> typer.Typer:
    """Return the command line application, without importing any command yet."""
    made = typer.Typer(
        name="xlaserve",
        cls=Commands,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    made.callback()(_application)
    listed(made)
    return made


def _application(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", callback=_show_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Serve JAX models over the V2 (Open Inference) protocol."""


def listed(group: typer.Typer, rows: Mapping[str, Row] = COMMANDS) -> None:
    """Add a placeholder for each command to a group, with the help text of its row."""
    for name, row in rows.items():
        group.command(name, help=row.text, rich_help_panel=row.panel)(_not_imported)


def _not_imported() -> None:
    """Placeholder for a command that was not imported yet."""


def loaded(name: str) -> Any:
    """Import a command, and return it as a click command."""
    row = COMMANDS[name]
    made = _imported(row.module, row.function)
    command: Callable[..., None] | typer.Typer = made() if row.is_maker else made
    # A Typer with only one command would drop its name, so add a callback to make it a group.
    group = typer.Typer()
    group.callback()(_not_imported)
    if isinstance(command, typer.Typer):
        group.add_typer(command, name=name, rich_help_panel=row.panel)
    else:
        kind = _imported(*row.kind.rsplit(".", 1)) if row.kind else None
        group.command(name, cls=kind, rich_help_panel=row.panel)(command)
    return get_group(group).commands[name]


def _imported(module: str, name: str) -> Any:
    return getattr(import_module(f"xlaserve.cli.{module}"), name)
