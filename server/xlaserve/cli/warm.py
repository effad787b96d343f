"""`xlaserve warm`: compile the models of a repository before there is a server to wait for it."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from xlaserve.cli.printable import printable
from xlaserve.cli.termination import unwinding_on_signals
from xlaserve.core.residence.repository import ModelSource, Repository
from xlaserve.errors import InvalidSettings, XlaserveError
from xlaserve.models import compilation, device, warming
from xlaserve.models.loaded import LoadContext
from xlaserve.models.warming import Warmed
from xlaserve.settings import Settings

HERE = "here"
"""The target that is the device of this machine."""

_FAILED = 1


def warm(
    repository: Annotated[
        Path, typer.Argument(help="Directory of the models, as `serve` takes it.")
    ],
    cache: Annotated[
        Path, typer.Option(help="The server's --compilation-cache-directory.", show_default=False)
    ],
    target: Annotated[str, typer.Option(help="What to compile for: here, cpu.")] = HERE,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, a line for each version.")
    ] = False,
) -> None:
    """Compile every model of a repository into a compilation cache, for servers to start with.

    Run it as the user that the server runs as: it uses no file of another one.
    """
    settings = Settings.read(repository=repository, compilation_cache_directory=str(cache))
    outcomes: list[Warmed] = []
    with unwinding_on_signals():
        for outcome in _warmed(settings, target):
            outcomes.append(outcome)
            if as_json:
                typer.echo(json.dumps(asdict(outcome)))
    if not as_json:
        Console().print(_table(outcomes))
    if any(outcome.problem for outcome in outcomes):
        raise typer.Exit(_FAILED)


def _warmed(settings: Settings, target: str) -> Iterator[Warmed]:
    sources = list(_sources(settings))
    if not sources:
        raise InvalidSettings("repository", "a directory of models", settings.repository)
    found = compilation.of_settings(settings)
    asked = settings.device.value if target == HERE else target
    platform = device.start(asked, found.cache, memory_fraction=settings.gpu_memory_fraction)
    for source in sources:
        if isinstance(source, Warmed):
            yield source
            continue
        for version in source.versions:
            context = LoadContext(
                model=source.name,
                version=str(version.number),
                config=source.config,
                device=platform,
                max_on_demand_shapes=settings.max_on_demand_shapes,
                roots=version.roots,
                compilation=found,
            )
            yield warming.warm_here(version.directory, context)
            device.release_memory()


def _sources(settings: Settings) -> Iterator[ModelSource | Warmed]:
    """Yield the models that a server would load, and what is wrong with the others."""
    repository = Repository(
        settings.repository,
        extra_roots=settings.model_root,
        max_models=settings.max_models,
        max_config_bytes=settings.max_config_bytes,
        bare_name=settings.bare_model,
    )
    for name in repository.names():
        try:
            source = repository.find(name)
        except XlaserveError as error:
            yield Warmed(name, "", problem=str(error))
            continue
        # An ensemble has no programs of its own.
        if not source.config.is_ensemble:
            yield source


def _table(outcomes: list[Warmed]) -> Table:
    table = Table("model", "version")
    for column in ("compiled", "there already", "seconds"):
        table.add_column(column, justify="right")
    table.add_column("problem", overflow="fold")
    for row in outcomes:
        counts = (
            ("", "", "")
            if row.problem
            else (str(row.compiled), str(row.cached), f"{row.seconds:.2f}")
        )
        table.add_row(
            Text(printable(row.model)), row.version, *counts, Text(printable(row.problem))
        )
    return table
