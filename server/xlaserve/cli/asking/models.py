"""`xlaserve models`: lists and controls the models of any V2 server, over gRPC or REST."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

import typer
from rich.console import Console

from xlaserve.cli.asking import models_display
from xlaserve.cli.asking.advice import advised
from xlaserve.cli.asking.connection import Reach, ask_server, reaching
from xlaserve.cli.asking.model_facts import model_facts
from xlaserve.cli.printable import printable
from xlaserve.dialing.interface import CallFailed, IndexEntry, Json, ServerClient
from xlaserve.errors import InvalidRequest

T = TypeVar("T")

_FAILED = 1
_READY = "READY"
_ASK_SECONDS = 30.0
_LOAD_SECONDS = 900.0

AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Name: TypeAlias = Annotated[str, typer.Argument(help="Name of the model.")]
Names: TypeAlias = Annotated[list[str], typer.Argument(help="Names of the models.")]
Version: TypeAlias = Annotated[
    str, typer.Option("--version", help="Defaults to the newest version.")
]


def models() -> typer.Typer:
    """Return the group of commands."""
    group = typer.Typer(help="List, load and unload the models of a server.", no_args_is_help=True)
    commands = {
        "list": list_,
        "show": show,
        "load": load,
        "unload": unload,
        "stats": stats,
        "config": config,
        "watch": watch,
    }
    for name, command in commands.items():
        group.command(name)(command)
    return group


@reaching(_ASK_SECONDS)
def list_(
    reach: Reach,
    ready: Annotated[bool, typer.Option("--ready", help="Only versions that are ready.")] = False,
    failed: Annotated[
        bool, typer.Option("--failed", help="Only versions with a failure reason.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List models and versions with state, reason, and memory if the server reports it."""
    entries, sizes = ask_server(_listed(reach))
    rows = [
        entry
        for entry in entries
        if (not ready or entry.state == _READY)
        and (not failed or (entry.reason and entry.state != _READY))
    ]
    if as_json:
        _print_json([_entry_json(entry, sizes) for entry in rows])
    else:
        Console().print(models_display.index_table(rows, sizes))


def _entry_json(entry: IndexEntry, sizes: Mapping[tuple[str, str], int]) -> Json:
    size = sizes.get((entry.name, entry.version))
    return asdict(entry) | ({} if size is None else {"size_bytes": size})


async def _listed(reach: Reach) -> tuple[list[IndexEntry], dict[tuple[str, str], int]]:
    async with reach.dial() as client:
        return await client.index(), await _sizes(client)


async def _sizes(client: ServerClient) -> dict[tuple[str, str], int]:
    """Return the memory of each version; empty if the server has no statistics extension."""
    try:
        found = await client.statistics()
    except Exception as error:
        if not isinstance(error, CallFailed) and client.failure(error) is None:
            raise
        return {}
    sized = ((row, models_display.memory_of(row)) for row in found)
    return {(row.get("name", ""), row.get("version", "")): size for row, size in sized if size}


@reaching(_ASK_SECONDS)
def show(reach: Reach, name: Name, version: Version = "", as_json: AsJson = False) -> None:
    """Show a model: inputs, outputs, versions, and its configuration in words."""
    found = ask_server(_with(reach, name, lambda client: model_facts(client, name, version)))
    if as_json:
        _print_json(found)
    else:
        typer.echo("\n".join(models_display.model_lines(found)))


@reaching(_ASK_SECONDS)
def config(reach: Reach, name: Name, version: Version = "") -> None:
    """Print the configuration of a model as JSON."""
    _print_json(ask_server(_with(reach, name, lambda c: c.configuration(name, version))))


@reaching(_ASK_SECONDS)
def stats(
    reach: Reach,
    name: Annotated[str, typer.Argument(help="Name of the model; all models by default.")] = "",
    version: Version = "",
    as_json: AsJson = False,
) -> None:
    """Show requests, failures, batches, mean times and memory since each model was loaded."""
    found = ask_server(_with(reach, name, lambda client: client.statistics(name, version)))
    if as_json:
        _print_json(found)
    else:
        Console().print(models_display.statistics_table(found))


@reaching(_LOAD_SECONDS)
def load(
    reach: Reach,
    names: Names,
    config: Annotated[
        Path | None,
        typer.Option("--config", help="A JSON configuration that replaces the model's own."),
    ] = None,
    version: Annotated[
        int | None,
        typer.Option(
            "--version",
            min=1,
            help="Serve only this version, with the current configuration (a rollback in one"
            " step). A load without --version undoes it.",
        ),
    ] = None,
) -> None:
    """Load or reload models one after the other, and print each result."""
    text = "" if config is None else _config_text(config)

    async def _load(client: ServerClient, name: str) -> None:
        if version is None:
            await client.load(name, text)
            return
        configuration = json.loads(text) if text else await client.configuration(name)
        policy = {"specific": {"versions": [version]}}
        await client.load(name, json.dumps(configuration | {"version_policy": policy}))

    done = "loaded" if version is None else f"version {version} answers"
    ask_server(_each(reach, names, done, _load))


@reaching(_LOAD_SECONDS)
def unload(
    reach: Reach,
    names: Names,
    dependents: Annotated[
        bool, typer.Option("--unload-dependents", help="Also unload the steps of an ensemble.")
    ] = False,
) -> None:
    """Unload models one after the other, and print each result."""
    ask_server(
        _each(reach, names, "unloaded", lambda c, name: c.unload(name, dependents=dependents))
    )


def _config_text(path: Path) -> str:
    try:
        text = path.read_text()
        json.loads(text)
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"--config: '{path}' is not a JSON file: {error}") from error
    return text


async def _each(
    reach: Reach,
    names: Sequence[str],
    done: str,
    change: Callable[[ServerClient, str], Awaitable[None]],
) -> None:
    """Apply a change to each model, continuing after failures; exit with 1 if one failed."""
    failed = 0
    async with reach.dial() as client:
        for number, name in enumerate(names, 1):
            counted = f"[{number}/{len(names)}] " if len(names) > 1 else ""
            try:
                await advised(client, name, change(client, name))
            except CallFailed as error:
                if len(names) == 1:
                    raise
                failed += 1
                typer.echo(f"{counted}error: {error}", err=True)
            else:
                typer.echo(f"{counted}{printable(name)}: {done}")
    if failed:
        raise typer.Exit(_FAILED)


@reaching(_ASK_SECONDS)
def watch(
    reach: Reach,
    interval: Annotated[
        float, typer.Option("--interval", min=0.05, help="Seconds between polls.")
    ] = 1.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per line.")
    ] = False,
) -> None:
    """Print the states of models, and then every change, until interrupted."""
    try:
        ask_server(_watch(reach, interval, as_json=as_json))
    except KeyboardInterrupt:
        return


async def _watch(reach: Reach, interval: float, *, as_json: bool) -> None:
    before: dict[tuple[str, str], IndexEntry] = {}
    problem = ""
    async with reach.dial() as client:
        # Fail if the first request fails; report later failures and go on.
        entries = await client.index()
        while True:
            now = {(entry.name, entry.version): entry for entry in entries}
            for entry in models_display.changes(before, now):
                _tell(entry, as_json=as_json)
            before = now
            while True:
                await asyncio.sleep(interval)
                try:
                    entries = await client.index()
                except Exception as error:
                    failure = error if isinstance(error, CallFailed) else client.failure(error)
                    if failure is None:
                        raise
                    if str(failure) != problem:
                        problem = str(failure)
                        typer.echo(json.dumps({"error": problem}) if as_json else problem)
                    continue
                problem = ""
                break


def _tell(entry: IndexEntry, *, as_json: bool) -> None:
    typer.echo(
        json.dumps(asdict(entry)) if as_json else models_display.state_line(entry),
    )


async def _with(reach: Reach, name: str, ask: Callable[[ServerClient], Awaitable[T]]) -> T:
    async with reach.dial() as client:
        if not name:
            return await ask(client)
        return await advised(client, name, ask(client))


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))
