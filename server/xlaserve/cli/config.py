"""`xlaserve config`: the settings that result from a file, the environment and the defaults."""

import json
import os
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from xlaserve.cli.printable import printable
from xlaserve.cli.serve.settings_file import merged, read_file
from xlaserve.settings import Settings
from xlaserve.settings.description import SettingDescription, describe_settings

_REPOSITORY = "repository"

File: TypeAlias = Annotated[Path, typer.Argument(help="The TOML file.")]
MaybeFile: TypeAlias = Annotated[
    Path | None,
    typer.Argument(help="A TOML file; by default, only environment variables are read."),
]


def config() -> typer.Typer:
    """Return the group of commands."""
    group = typer.Typer(help="Check and show settings.", no_args_is_help=True)
    group.command("check")(check)
    group.command("show")(show)
    return group


def check(path: File) -> None:
    """Check that a server could start with the settings in a file and the environment."""
    _settings(path)
    typer.echo(f"{path}: {len(read_file(path))} settings")


def show(
    path: MaybeFile = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Include settings with default values.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show each setting's value and whether the file, the environment or a default provides it."""
    settings = _settings(path)
    given = {} if path is None else read_file(path)
    rows = [
        (row.name, _shown(getattr(settings, row.name)), _source(row, settings, given))
        for row in describe_settings()
    ]
    rows = [row for row in rows if everything or row[2] != "default"]
    if as_json:
        typer.echo(
            json.dumps({name: {"value": value, "from": source} for name, value, source in rows})
        )
        return
    table = Table("setting", "value", "from")
    for row in rows:
        table.add_row(*(Text(printable(part)) for part in row))
    Console().print(table if rows else "all settings have their default values")


def _settings(path: Path | None) -> Settings:
    """Return the settings; a missing repository is accepted, since a flag may provide it."""
    there = _REPOSITORY_VARIABLES & os.environ.keys()
    in_file = path is not None and {_REPOSITORY, "model_repository"} & read_file(path).keys()
    return merged(path, {} if there or in_file else {_REPOSITORY: "."})


_REPOSITORY_VARIABLES = frozenset({"XLASERVE_REPOSITORY", "XLASERVE_MODEL_REPOSITORY"})


def _source(row: SettingDescription, settings: Settings, given: dict[str, Any]) -> str:
    if row.variable in os.environ:
        return row.variable
    if row.name in given:
        return "file"
    if row.name == _REPOSITORY:
        return "default" if not settings.model_repository else "model_repository"
    at_default = getattr(settings, row.name) == Settings.__dataclass_fields__[row.name].default
    # Memory requests of a Kubernetes pod, and SageMaker's variables.
    return "default" if at_default else "environment"


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
