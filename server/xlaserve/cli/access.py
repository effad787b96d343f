"""`xlaserve access check`: shows the permissions in an access rules file, without a server."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from xlaserve.cli.asking.connection import TOKEN_FILE, token_in
from xlaserve.cli.printable import printable
from xlaserve.errors import InvalidRequest
from xlaserve.serving.access.models import OF_MODELS, ModelNames
from xlaserve.serving.access.rules import ANY_SUBJECT, Caller, Rules
from xlaserve.serving.access.rules_file import read_rules
from xlaserve.serving.access.tokens import digest_of
from xlaserve.serving.call import Operation

_FAILED = 1
_SUBJECT = "subject:"


def access() -> typer.Typer:
    """Return the group of commands."""
    group = typer.Typer(help="Check access rules.", no_args_is_help=True)
    group.callback()(_access)
    group.command("check")(check)
    return group


def _access() -> None:
    """Check access rules."""


def check(
    path: Annotated[Path, typer.Argument(metavar="RULES", help="The access rules file.")],
    caller: Annotated[
        str,
        typer.Option("--as", help="Name of a caller, or subject:NAME of its signed tokens."),
    ] = "",
    token_file: Annotated[
        Path | None,
        typer.Option(
            envvar=TOKEN_FILE,
            help="File with the caller's token; /dev/stdin for a pipe.",
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="Show only permissions for this model.")] = "",
) -> None:
    """Check an access rules file and show a caller's permissions; exit with 1 if there are none."""
    rules = read_rules(path)
    found = _chosen(rules, caller, token_file)
    rows = [
        (one, operation)
        for one in found
        for operation in Operation
        if operation in one.may
        if not model or _covers(one, operation, model)
    ]
    if not rows:
        with_model = f" with model '{printable(model)}'" if model else ""
        typer.echo(f"{path}: no operation is allowed{with_model}")
        raise typer.Exit(_FAILED)
    table = Table("caller", "may", "models", "listeners")
    for one, operation in rows:
        models = _names(one.models) if operation in OF_MODELS else ""
        cells = (one.name, operation.value, models, _names(one.listeners or None))
        table.add_row(*(Text(printable(cell)) for cell in cells))
    Console().print(table)


def _chosen(rules: Rules, name: str, token_file: Path | None) -> Sequence[Caller]:
    """Return the selected callers, and the anyone entry; raises InvalidRequest if none match."""
    if name and token_file is not None:
        raise InvalidRequest("expected either --as or --token-file, got both")
    subject = name.removeprefix(_SUBJECT)
    if token_file is not None:
        callers = rules.by_token.get(digest_of(token_in(token_file)), ())
        if not callers:
            raise InvalidRequest(f"--token-file: no caller has the token in '{token_file}'")
    elif name != subject:
        callers = tuple(
            one for one in rules.callers if not one.subjects.isdisjoint((subject, ANY_SUBJECT))
        )
    else:
        callers = tuple(one for one in rules.callers if name in {"", one.name})
    if name and not callers:
        known = ", ".join(sorted({one.name for one in rules.callers})) or "none"
        raise InvalidRequest(f"--as: expected a caller of the rules ({known}), got '{name}'")
    anyone = (one for one in rules.callers if one.anyone and one not in callers)
    return [*callers, *anyone]


def _covers(caller: Caller, operation: Operation, model: str) -> bool:
    if operation not in OF_MODELS:
        return False
    return caller.models is None or model in ModelNames(caller.models)


def _names(found: frozenset[str] | None) -> str:
    return "all" if found is None else ", ".join(sorted(found))
