"""`xlaserve repo check`: whether a server would serve each model of a repository."""

import importlib.util
import json
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import structlog
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from xlaserve.cli.printable import printable
from xlaserve.cli.termination import unwinding_on_signals
from xlaserve.errors import ModelNotFound
from xlaserve.language.text_settings import text_limits
from xlaserve.offline.checkup import Checkup, Finding, ModelReport
from xlaserve.offline.local_copy import LocalCopy, local_copy
from xlaserve.process import log
from xlaserve.residence.host import compile_processes
from xlaserve.residence.repository.repositories import open_repositories
from xlaserve.residence.repository.sources import ModelSource, VersionSource
from xlaserve.runtime import loaders
from xlaserve.runtime.calls import Arrays, Change, NestedRequest, Replies
from xlaserve.runtime.devices import device
from xlaserve.runtime.host import PythonHost
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.metrics import ModelMetrics
from xlaserve.runtime.programs import compilation
from xlaserve.settings import Settings

_FAILED = 1
_COLOURS = {Finding.WORKS: "green", Finding.NOTES: "yellow", Finding.REFUSED: "red"}


def check(
    repository: Annotated[
        list[Path], typer.Argument(help="Model directories or URLs, as for `serve`.")
    ],
    cache: Annotated[
        str,
        typer.Option(
            help="The server's --compilation-cache-directory, to keep compiled programs and"
            " converted models; nothing is kept by default."
        ),
    ] = compilation.NO_CACHE,
    allow_python_models: Annotated[
        bool, typer.Option("--allow-python-models", help="Run the code of Python models too.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line per model.")] = False,
) -> None:
    """Check for each model whether a server would serve it, and why not.

    Models are loaded one after the other, as in a server. ONNX models are converted, and compared
    with onnxruntime if it is installed. The exit status is 1 if a model would be refused.
    """
    log.configure("error")
    settings = Settings.read(
        model_repository=repository,
        compilation_cache_directory=cache,
        allow_python_models=allow_python_models,
    )
    reports: list[ModelReport] = []
    with unwinding_on_signals(), local_copy(settings) as copy:
        for report in _checked(copy):
            reports.append(report)
            if as_json:
                typer.echo(json.dumps({**asdict(report), "finding": report.finding}))
    if not as_json:
        _show(Console(), settings, reports)
    if not reports or any(report.finding is Finding.REFUSED for report in reports):
        raise typer.Exit(_FAILED)


def _checked(copy: LocalCopy) -> Iterator[ModelReport]:
    for name, reason in copy.failures.items():
        yield ModelReport(name, reason=reason)
    settings = copy.settings
    runs_python = settings.allow_python_models
    # Lower models in separate processes, as a server does.
    made = compilation.of_settings(settings, compare=True, processes=compile_processes(settings))
    platform = device.start(settings.device.value, made.cache)
    if importlib.util.find_spec("onnxruntime") is None:
        structlog.get_logger("check").warning("no comparison: onnxruntime is not installed")

    def context(source: ModelSource, version: VersionSource) -> LoadContext:
        return LoadContext(
            source.name,
            str(version.number),
            source.config,
            platform,
            max_on_demand_shapes=settings.max_on_demand_shapes,
            max_sequences=settings.max_sequences_per_model,
            text_limits=text_limits(settings),
            python=PythonHost(_NoCalls(), ModelMetrics()) if runs_python else None,
            compilation=made,
        )

    models = open_repositories(settings)
    with closing(made):
        yield from Checkup(models, loaders.load, context, runs_python=runs_python).run()


class _NoCalls:
    """Refuses calls of other models: a check loads only one model at a time."""

    def infer(self, request: NestedRequest, within: object) -> "Future[Arrays]":
        """Raise ModelNotFound."""
        raise ModelNotFound(request.model, request.version)

    def stream(
        self, request: NestedRequest, within: object, replies: Replies | None = None
    ) -> Replies:
        """Raise ModelNotFound."""
        raise ModelNotFound(request.model, request.version)

    def change(self, change: Change, within: object) -> "Future[None]":
        """Raise ModelNotFound."""
        raise ModelNotFound(change.model)

    def is_ready(self, model: str, version: str, within: object) -> bool:
        """Return False."""
        return False


def _show(console: Console, settings: Settings, reports: list[ModelReport]) -> None:
    if not reports:
        typer.echo(f"{settings.repository}: no models")
        return
    table = Table("model", "kind", "versions", "a server", "why, and notes")
    for column in table.columns:
        column.overflow = "fold"
    for row in sorted(reports, key=lambda report: report.model):
        lines = "\n".join(filter(None, (row.reason, *row.notes)))
        table.add_row(
            Text(printable(row.model)),
            row.kind,
            ", ".join(row.versions),
            Text(row.finding, style=_COLOURS[row.finding]),
            Text("\n".join(map(printable, lines.splitlines()))),
        )
    console.print(table)
    for row in reports:
        if row.configuration:
            typer.echo(f"\n# {printable(row.model)}/config.pbtxt, for its model-settings.json")
            typer.echo("\n".join(map(printable, row.configuration.splitlines())))
