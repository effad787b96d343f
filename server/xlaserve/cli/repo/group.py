"""`xlaserve repo`: the group of commands on a repository."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from xlaserve.cli.repo import check, diff, listing
from xlaserve.cli.termination import unwinding_on_signals

_FAILED = 1


def repo() -> typer.Typer:
    """Return the group of commands."""
    group = typer.Typer(
        help="List, check, compare and migrate the models of a repository.", no_args_is_help=True
    )
    group.command("list")(listing.list_)
    group.command("diff")(diff.diff)
    group.command("check")(check.check)
    group.command("migrate")(migrate)
    return group


def migrate(
    path: Annotated[
        Path, typer.Argument(help="A repository, a model, a version, or a *.jaxexp file.")
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be done, and write nothing.")
    ] = False,
    undo: Annotated[
        bool,
        typer.Option(
            "--undo", help="Restore replaced files of versions that have not been loaded since."
        ),
    ] = False,
) -> None:
    """Convert models to the format that later versions of JAX can read, and replace refused ones.

    Replaced files are kept in .replaced next to the model until a server has loaded the new ones;
    after that, the old files cannot be restored.
    """
    from xlaserve.authoring import migration
    from xlaserve.runtime.devices import device

    device.start("cpu")
    table = Table()
    for column in ("version", "result", "what"):
        table.add_column(column, overflow="fold")
    failed = False
    with unwinding_on_signals():
        change = migration.undo if undo else migration.migrate
        outcomes = list(change(path, dry_run=dry_run))
    for outcome in outcomes:
        failed |= outcome.result is migration.Result.FAILED
        inside = outcome.path != path and outcome.path.is_relative_to(path)
        shown = outcome.path.relative_to(path) if inside else outcome.path
        detail = "; ".join(filter(None, (outcome.detail, outcome.notes)))
        table.add_row(escape(str(shown)), outcome.result, escape(detail))
    if table.row_count:
        Console().print(table)
    else:
        typer.echo(f"{path}: nothing to undo" if undo else f"{path}: no models")
    if failed:
        raise typer.Exit(_FAILED)
