"""The table of commands, and the group that imports each on demand."""

from collections.abc import Callable, Iterator, Mapping
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
    """The command's class as `module.Class`, or empty for typer's."""


_SERVE, _ASK, _MAKE = "Serve", "Ask a server", "Make models"
_REPOSITORY, _OTHER = "Maintain a repository", "Other"

COMMANDS: Mapping[str, Row] = MappingProxyType(
    {
        "serve": Row(
            _SERVE,
            "Serve the models of a repository until interrupted.",
            "serve.command",
            "command",
            is_maker=True,
            kind="serve.help.ServeCommand",
        ),
        "init": Row(
            _SERVE,
            "Create a repository with a model, a settings file and a client.",
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
            _ASK,
            "List, load and unload the models of a server.",
            "asking.models",
            "models",
            is_maker=True,
        ),
        "top": Row(
            _ASK,
            "Show live request rates, latencies and memory per model; q or Ctrl-C ends it.",
            "top.command",
            "top",
        ),
        "events": Row(
            _ASK,
            "Show a server's loads, unloads and failures, and who asked for them.",
            "asking.events",
            "events",
        ),
        "health": Row(
            _ASK,
            "Exit with 0 if a server is ready, otherwise print the reason and exit with 1.",
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
            "Export a JAX function and its parameters as a model.",
            "export",
            "export",
        ),
        "import": Row(
            _MAKE,
            "Convert an ONNX or PyTorch model, or a language model, to an xlaserve model.",
            "importing.command",
            "import_onnx",
        ),
        "adopt": Row(
            _MAKE,
            "Make a checked, named version directory from a jax.export file.",
            "adopt",
            "adopt",
        ),
        "repo": Row(
            _REPOSITORY,
            "List, check, compare and migrate the models of a repository.",
            "repo.group",
            "repo",
            is_maker=True,
        ),
        "plan": Row(
            _REPOSITORY,
            "Compile a repository for absent devices, and show what fits on them.",
            "offline.plan",
            "plan",
        ),
        "warm": Row(
            _REPOSITORY,
            "Compile every model of a repository into a compilation cache, before servers start.",
            "offline.warm",
            "warm",
        ),
        "cache": Row(
            _REPOSITORY,
            "List and remove compiled programs.",
            "offline.cache",
            "cache",
            is_maker=True,
        ),
        "logs": Row(
            _OTHER,
            "Show a server's JSON log in readable form.",
            "logs",
            "logs",
        ),
        "access": Row(_OTHER, "Check access rules.", "access", "access", is_maker=True),
        "token": Row(
            _OTHER, "Create a token for the access rules (docs/access.md).", "token", "token"
        ),
        "completion": Row(
            _OTHER,
            'Print the completion script of a shell, for `eval "$(xlaserve completion bash)"`.',
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


def _show_version(requested: bool) -> None:
    if requested:
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
    found = get_group(group).commands[name]
    for each in _with_subcommands(found):
        _take_synonyms(each)
        if not row.kind:  # otherwise it formats its help itself
            _escape_help(each)
    return found


def _with_subcommands(command: Any) -> Iterator[Any]:
    yield command
    for each in getattr(command, "commands", {}).values():
        yield from _with_subcommands(each)


def _take_synonyms(command: Any) -> None:
    """Have commands with an option `--version` accept `--model-version` too; the help has one."""
    if any("--version" in parameter.opts for parameter in command.params):
        command.context_settings["token_normalize_func"] = _flag


def _flag(name: str) -> str:
    return "version" if name == "model-version" else name


def _escape_help(command: Any) -> None:
    """Escape brackets in the help texts of a command, in which rich would read markup."""
    for described in (command, *command.params):
        text = getattr(described, "help", None) or ""
        if "[" in text:
            from rich.markup import escape

            described.help = escape(text)


def _imported(module: str, name: str) -> Any:
    return getattr(import_module(f"xlaserve.cli.{module}"), name)
