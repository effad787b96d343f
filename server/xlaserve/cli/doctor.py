"""`xlaserve doctor`: checks whether a server could start here, and what would slow it down."""

import json
import os
import platform
import resource
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from xlaserve import build
from xlaserve.cli.printable import printable
from xlaserve.cli.serve.settings_file import merged
from xlaserve.cli.sizes import format_bytes
from xlaserve.errors import XlaserveError
from xlaserve.offline import probe
from xlaserve.process.endpoints import Endpoint
from xlaserve.process.open_files import wanted_files
from xlaserve.residence import host
from xlaserve.runtime.devices import device, plugins
from xlaserve.runtime.programs import compilation
from xlaserve.settings import Settings

_FAILED = 1
_LEAST_MEMORY = 1 << 30
_NVIDIA = Path("/proc/driver/nvidia/version")
_MAPPINGS = Path("/proc/sys/vm/max_map_count")
_ENDPOINTS = ("grpc_endpoint", "grpc_data_endpoint", "http_endpoint", "metrics_endpoint")


class Result(StrEnum):
    """The result of a check."""

    OK = "ok"
    WARNING = "warning"
    """A server can start, but something will be slower or smaller than it could be."""
    FAILED = "failed"
    """A server cannot start."""


_COLOURS = {Result.OK: "green", Result.WARNING: "yellow", Result.FAILED: "red"}


@dataclass(frozen=True, slots=True)
class Check:
    """A check and its result."""

    name: str
    result: Result
    text: str


def doctor(
    config: Annotated[Path | None, typer.Option("--config", help="A settings file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check Python, JAX, devices, limits, ports and directories; exit with 1 on a failure."""
    settings = merged(config, {} if "XLASERVE_REPOSITORY" in os.environ else {"repository": "."})
    checks = list(checked(settings))
    if as_json:
        typer.echo(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        table = Table("check", "result")
        table.add_column("what", overflow="fold")
        for check in checks:
            coloured = Text(check.result, style=_COLOURS[check.result])
            table.add_row(check.name, coloured, Text(printable(check.text)))
        Console().print(table)
    if any(check.result is Result.FAILED for check in checks):
        raise typer.Exit(_FAILED)


def checked(settings: Settings) -> Iterator[Check]:
    """Check each requirement of a server with these settings."""
    yield Check("python", Result.OK, platform.python_version())
    yield Check("xlaserve", Result.OK, build.version())
    yield from _limits(settings)
    yield from _endpoints(settings)
    yield from _directories(settings)
    yield from _devices(settings)


def _limits(settings: Settings) -> Iterator[Check]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = wanted_files(settings)
    enough = hard == resource.RLIM_INFINITY or hard >= wanted
    most = "any number" if hard == resource.RLIM_INFINITY else str(hard)
    text = f"{most} open files allowed, up to {wanted} needed"
    advice = "" if enough else "; raise the limit (ulimit -Hn) or lower max_connections"
    yield Check("open files", _warning(not enough), text + advice)
    memory = host.memory_limit_bytes()
    yield Check("memory", _warning(memory < _LEAST_MEMORY), format_bytes(memory))
    if _MAPPINGS.exists():
        yield Check("memory mappings", Result.OK, _MAPPINGS.read_text().strip())


def _warning(holds: bool) -> Result:
    return Result.WARNING if holds else Result.OK


def _endpoints(settings: Settings) -> Iterator[Check]:
    for name in _ENDPOINTS:
        text = getattr(settings, name)
        if ":" not in text:  # "none", or the name of another endpoint
            continue
        try:
            endpoint = Endpoint.parse(name, text)
        except XlaserveError as error:
            yield Check(name, Result.FAILED, str(error))
            continue
        if endpoint is None or endpoint.name:
            continue
        if endpoint.path is not None:
            yield _writable(name, endpoint.path.parent, Result.FAILED)
        elif endpoint.port is not None:
            yield _port(name, settings.host, endpoint.port)


def _port(name: str, on: str, port: int) -> Check:
    where = f"{on} port {port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            on, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as tried:
            # As in the server: a port in TIME_WAIT may be reused.
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(address)
            tried.listen()
    except OSError as error:
        return Check(name, Result.FAILED, f"{where}: {error.strerror or error}")
    return Check(name, Result.OK, f"{where} is free")


def _directories(settings: Settings) -> Iterator[Check]:
    scratch = settings.scratch_directory
    yield _writable("scratch directory", scratch, Result.FAILED)
    cache = compilation.of_settings(settings).cache
    if cache is None:
        yield Check("compilation cache", Result.WARNING, "none: every start compiles all models")
        return
    chosen = settings.compilation_cache_directory != compilation.AUTO
    otherwise = Result.FAILED if chosen else Result.WARNING
    yield _writable("compilation cache", cache.directory, otherwise)


def _writable(name: str, directory: Path, otherwise: Result) -> Check:
    """Check that a directory, or its nearest existing parent, is writable."""
    there = directory
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        with tempfile.TemporaryFile(dir=there):
            return Check(name, Result.OK, f"{directory} is writable")
    except OSError as error:
        return Check(name, otherwise, f"{there} cannot be written: {error.strerror or error}")


def _devices(settings: Settings) -> Iterator[Check]:
    yield Check("jax", Result.OK, f"{metadata.version('jax')}, jaxlib {metadata.version('jaxlib')}")
    has_driver = _NVIDIA.exists()
    if has_driver:
        yield Check("driver", Result.OK, " ".join(_NVIDIA.read_text().splitlines()[0].split()))
    try:
        started = device.start(settings.device)
        found = device.devices(started)
    except XlaserveError as error:
        yield Check("devices", Result.FAILED, str(error))
        return
    unused = has_driver and started == "cpu" and settings.device != "cpu"
    text = f"{len(found.names)} of {started}"
    if unused:
        text += f"; {plugins.missing('cuda') or 'JAX does not use the GPU'}"
    yield Check("devices", _warning(unused), text)
    try:
        seconds = probe.compile_seconds()
    except Exception as error:
        yield Check("compile", Result.FAILED, f"the probe program failed to compile: {error}")
        return
    yield Check("compile", Result.OK, f"the probe program took {seconds:.2f} s")
