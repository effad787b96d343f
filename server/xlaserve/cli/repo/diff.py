"""`xlaserve repo diff`: shows the differences between versions, models or repositories."""

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from xlaserve.cli.printable import printable
from xlaserve.cli.termination import unwinding_on_signals
from xlaserve.errors import InvalidRequest, XlaserveError
from xlaserve.offline.comparison import Comparison, Difference, compare
from xlaserve.offline.contents import Item
from xlaserve.offline.local_copy import EVERY_VERSION, local_copy
from xlaserve.process import log
from xlaserve.residence.repository.names import is_version
from xlaserve.settings import Settings
from xlaserve.storage.urls import url_of

_DIFFER = 1
_FAILED = 2
_SHOWN_DIGITS = 8

Side = Annotated[
    Path,
    typer.Argument(
        help="REPOSITORY, REPOSITORY/MODEL, REPOSITORY/MODEL/VERSION or a file, or the URL of a "
        "repository or version."
    ),
]


def diff(
    before: Side,
    after: Side,
    model: Annotated[
        str, typer.Option("--model", help="Compare only this model in the two repositories.")
    ] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON line per difference.")
    ] = False,
) -> None:
    """Show differences in tensors, parameter hashes, configuration, platforms and files.

    The exit status is 0 if there are none, 1 if there are some, and 2 if the comparison failed.
    """
    log.configure("error")
    try:
        with unwinding_on_signals(), ExitStack() as stack:
            first, second = (_local(side, model, stack) for side in (before, after))
            found = compare(first, second, only=model)
    except (XlaserveError, OSError) as error:
        sys.stderr.write(f"error: {printable(str(error))}\n")
        raise typer.Exit(_FAILED) from None
    for note in found.notes:
        sys.stderr.write(f"note: {printable(note)}\n")
    if as_json:
        for one in found.differences:
            typer.echo(json.dumps(asdict(one)))
    elif found.differences:
        _show(Console(), found)
    if found.differences:
        raise typer.Exit(_DIFFER)


def _local(side: Path, model: str, stack: ExitStack) -> Path:
    """Return the directory of one side; a model in a store is fetched first."""
    url = url_of(side)
    if not url:
        return side
    *home, last = url.rstrip("/").split("/")
    version = last if is_version(last) else ""
    name = home.pop() if version else model
    root = "/".join(home) if version else url
    settings = Settings.read(model_repository=[Path(root)])
    copy = stack.enter_context(local_copy(settings, only=name, config_text=EVERY_VERSION))
    for failed, reason in copy.failures.items():
        raise InvalidRequest(f"{root}/{failed}: {reason}")
    here = copy.settings.repository
    path = here / name / version if version else here
    if not path.exists():
        raise InvalidRequest(f"no version found at {url}")
    return path


# --- Table ---


def _show(console: Console, found: Comparison) -> None:
    are_below = any(one.at for one in found.differences)
    table = Table()
    for column in (*([""] if are_below else ()), "what", "before", "after"):
        table.add_column(column, overflow="fold")
    shown = ""
    for one in found.differences:
        place = [one.at if one.at != shown else ""] if are_below else []
        shown = one.at
        table.add_row(*(Text(printable(cell)) for cell in (*place, *_cells(one))))
    console.print(table)


def _cells(one: Difference) -> Iterator[str]:
    yield f"{one.kind} {one.name}"
    for item in (one.before, one.after):
        yield "-" if item is None else _item(item) or "there"


def _item(item: Item) -> str:
    return ", ".join(filter(None, (item.text, item.sha256[:_SHOWN_DIGITS])))
