"""`xlaserve repo list`: lists the models of a repository with versions, formats and sizes."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from xlaserve.cli.printable import printable
from xlaserve.cli.sizes import format_bytes
from xlaserve.cli.termination import unwinding_on_signals
from xlaserve.offline.inventory import ModelEntry, VersionEntry, list_models
from xlaserve.offline.local_copy import with_schemes
from xlaserve.process import log
from xlaserve.residence.repository.repositories import open_repositories
from xlaserve.settings import Settings


def list_(
    repository: Annotated[
        list[Path], typer.Argument(help="Model directories or URLs, as for `serve`.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line per model.")] = False,
) -> None:
    """List models with versions, formats, sizes, and errors in their configurations.

    Nothing is loaded; for models in stores, only listings, configurations and headers are read. Use
    `xlaserve repo check` to find out whether a server would serve them.
    """
    log.configure("error")
    settings = with_schemes(Settings.read(model_repository=repository))
    models = open_repositories(settings)
    table = Table()
    for column in ("model", "version", "format", "size", "served", "configuration"):
        table.add_column(column, justify="right" if column == "size" else "left", overflow="fold")
    count = 0
    try:
        with unwinding_on_signals():
            for entry in list_models(models):
                count += 1
                if as_json:
                    typer.echo(json.dumps(asdict(entry)))
                else:
                    _add(table, entry)
    finally:
        models.remotes.close()
    for part in models.parts:
        if hint := part.hint(part.listing()):
            typer.echo(f"note: {printable(f'{part.place}: {hint}')}", err=True)
    if as_json:
        return
    if count:
        Console().print(table)
    else:
        typer.echo(f"{', '.join(part.place for part in models.parts)}: no models")


def _add(table: Table, entry: ModelEntry) -> None:
    unused = f"without effect: {', '.join(entry.without_effect)}" if entry.without_effect else ""
    remarks = filter(None, (entry.configuration, unused, entry.problem))
    name, text = Text(printable(entry.name)), Text(printable("; ".join(remarks) or "none"))
    if not entry.versions:
        table.add_row(name, "", "", "", "", text)
    for version in entry.versions:
        table.add_row(name, *_cells(version), text)
        name, text = Text(""), Text("")


def _cells(version: VersionEntry) -> tuple[Text, ...]:
    served = "yes" if version.served else "no"
    if version.problem:
        served = f"no: {version.problem}"
    shown = (str(version.number), version.kind, format_bytes(version.size_bytes), served)
    return tuple(Text(printable(text)) for text in shown)
