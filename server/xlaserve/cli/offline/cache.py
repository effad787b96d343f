"""`xlaserve cache`: lists and removes compiled programs by the versions that compiled them."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from xlaserve.cli.printable import printable
from xlaserve.cli.sizes import format_bytes
from xlaserve.errors import InvalidSettings
from xlaserve.offline import cache_contents
from xlaserve.offline.cache_contents import Group
from xlaserve.runtime.programs import compilation
from xlaserve.runtime.programs.compilation_cache import SETTING
from xlaserve.settings import Settings

_COLUMNS = ("jax", "jaxlib", "target", "programs")
_VERSIONS = ("jax", "jaxlib")
"""Fields of an environment that `--other-versions` compares with the installed versions."""
_Directory = Annotated[
    Path | None,
    typer.Argument(help="The directory; defaults to compilation_cache_directory."),
]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON line per environment.")]


def cache() -> typer.Typer:
    """Return the group of commands."""
    group = typer.Typer(help="List and remove compiled programs.", no_args_is_help=True)
    group.command("list")(list_)
    group.command("prune")(prune)
    return group


def list_(directory: _Directory = None, as_json: _Json = False) -> None:
    """List the compilation environments with versions, programs, bytes and last use."""
    place = _place(directory)
    found = cache_contents.grouped(cache_contents.programs(place))
    _print(found, place, as_json=as_json, verb="has")


def prune(  # noqa: PLR0917, typer reads the parameters of a command from its signature
    directory: _Directory = None,
    max_bytes: Annotated[
        int | None,
        typer.Option(min=0, help="Remove the least recently used programs beyond this size."),
    ] = None,
    days: Annotated[
        float | None, typer.Option(min=0, help="Remove programs not used for this many days.")
    ] = None,
    other_versions: Annotated[
        bool,
        typer.Option(
            "--other-versions", help="Remove programs compiled by other versions of jax or jaxlib."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be removed, and remove nothing.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Remove compiled programs. A server that needs one compiles it again.

    Servers may use the directory at the same time.
    """
    if max_bytes is None and days is None and not other_versions:
        raise typer.BadParameter("expected --max-bytes, --days or --other-versions")
    place = _place(directory)
    versions = {name: metadata.version(name) for name in _VERSIONS} if other_versions else None
    removed = cache_contents.chosen(
        cache_contents.programs(place), most_bytes=max_bytes, most_days=days, versions=versions
    )
    found = cache_contents.grouped(removed)
    if not dry_run:
        cache_contents.remove(place, removed)
    _print(found, place, as_json=as_json, verb="would lose" if dry_run else "lost")


def _place(directory: Path | None) -> Path:
    given: dict[str, Any] = {} if directory is None else {SETTING: str(directory)}
    made = compilation.of_settings(Settings.read(repository=Path(), **given))
    if made.cache is None:
        raise InvalidSettings(SETTING, "a directory", "none")
    return made.cache.directory


def _print(found: Sequence[Group], place: Path, *, as_json: bool, verb: str) -> None:
    if as_json:
        for group in found:
            typer.echo(json.dumps(_facts(group)))
        return
    table = Table()
    for column in (*_COLUMNS, "size", "last used"):
        right = column in ("programs", "size")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for group in found:
        facts = _facts(group)
        table.add_row(
            *(Text(printable(str(facts[name]))) for name in _COLUMNS),
            format_bytes(group.bytes),
            facts["last_used"],
        )
    if found:
        Console().print(table)
    programs = sum(len(group.programs) for group in found)
    size = format_bytes(sum(group.bytes for group in found))
    typer.echo(f"{place} {verb} {programs} programs of {len(found)} environments, {size}")


def _facts(group: Group) -> dict[str, Any]:
    return {
        **{name: group.environment.get(name, "") for name in _VERSIONS},
        "target": group.target,
        "programs": len(group.programs),
        "bytes": group.bytes,
        "last_used": f"{datetime.fromtimestamp(group.used, UTC):%Y-%m-%dT%H:%M:%SZ}",
        "environment": dict(group.environment),
    }
