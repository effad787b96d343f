"""`xlaserve logs`: shows a server's JSON log in readable form."""

import io
import json
import sys
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from xlaserve.cli.printable import printable

_FIRST = ("timestamp", "level", "event")
_COLORS = {"warning": "yellow", "error": "red", "critical": "red"}


class Level(StrEnum):
    """Levels of records, the lowest first."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


_ORDER = (*Level, "critical")


def logs(
    path: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="The log file; standard input by default."),
    ] = None,
    level: Annotated[
        Level, typer.Option(help="Only records of this level and above.")
    ] = Level.DEBUG,
    model: Annotated[str, typer.Option(help="Only records of this model.")] = "",
) -> None:
    """Show a server's JSON log in readable form.

    For example, `kubectl logs --follow POD | xlaserve logs --level warning`. Lines that are not
    JSON are shown unchanged.
    """
    try:
        if path is None:
            if isinstance(sys.stdin, io.TextIOWrapper):
                sys.stdin.reconfigure(errors="replace")
            _show(sys.stdin, level, model)
        else:
            with path.open(errors="replace") as file:
                _show(file, level, model)
    except KeyboardInterrupt:
        return


def _show(file: TextIO, level: Level, model: str) -> None:
    for line in shown(file, level, model):
        typer.echo(line)
        sys.stdout.flush()


def shown(lines: Iterable[str], level: Level = Level.DEBUG, model: str = "") -> Iterator[str]:
    """Yield the selected lines of a log in readable form."""
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict) or "event" not in record:
            # Lines without a record, such as a crash's traceback, are shown unless one model is
            # selected.
            if not model:
                yield printable(line.rstrip("\n"))
            continue
        written = str(record.get("level", Level.INFO))
        too_low = written in _ORDER and _ORDER.index(written) < _ORDER.index(level)
        if not too_low and (not model or record.get("model") == model):
            yield _line(record, written)


def _line(record: dict[str, Any], level: str) -> str:
    rest = " ".join(
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in record.items()
        if key not in _FIRST and key != "exception"
    )
    word = typer.style(f"{printable(level):8}", fg=_COLORS.get(level))
    head = printable(f"{record.get('timestamp', '')} ").lstrip()
    text = f"{head}{word} {printable(str(record['event']))}  {printable(rest)}".rstrip()
    trace = record.get("exception")
    if isinstance(trace, str):
        return "\n".join([text, *(f"    {printable(one)}" for one in trace.splitlines())])
    return text
