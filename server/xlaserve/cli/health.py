"""`xlaserve health`: readiness or liveness as an exit status, for probes."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from xlaserve.app.probe import LIVE, READY
from xlaserve.cli.asking.connection import (
    URL_HELP,
    TlsCa,
    TlsCertificate,
    TlsInsecure,
    TlsKey,
    TokenFile,
    server_address,
)
from xlaserve.cli.printable import printable
from xlaserve.dialing.address import ServerAddress, TlsFiles
from xlaserve.dialing.dial import dial
from xlaserve.dialing.interface import CallFailed, IndexEntry, ServerClient
from xlaserve.dialing.spoken import advising
from xlaserve.residence.failed_loads import SHOWN, is_failure, named_models
from xlaserve.residence.lifecycle import State

_LOADING = State.LOADING.public


def health(  # noqa: PLR0917, typer reads the parameters of a command from its signature
    context: typer.Context,
    url: Annotated[
        str,
        typer.Option(
            envvar="XLASERVE_GRPC_ENDPOINT",
            help=f"{URL_HELP} port:n means this machine.",
        ),
    ] = "127.0.0.1:8001",
    live: Annotated[
        bool, typer.Option("--live", help="Check liveness instead of readiness.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the answer.")] = 5.0,
    socket: Annotated[
        str,
        typer.Option(
            envvar="XLASERVE_PROBE_SOCKET",
            help="Unix socket of the server's probe_socket, which needs no TLS and no token; used"
            " if it exists, unless --url is given.",
        ),
    ] = "",
    tls_ca: TlsCa = None,
    tls_certificate: TlsCertificate = None,
    tls_key: TlsKey = None,
    tls_insecure: TlsInsecure = False,
    token_file: TokenFile = None,
) -> None:
    """Exit with 0 if a server is ready, otherwise print the reason and exit with 1."""
    state = "live" if live else "ready"
    if socket and not _is_given(context, "url") and Path(socket).is_socket():
        url = f"unix:{socket}"
        why = asyncio.run(_ask_socket(url, socket, timeout, live=live))
    else:
        tls = TlsFiles(tls_ca, tls_certificate, tls_key, tls_insecure)
        address = server_address(url, tls, token_file)
        with advising(address):
            why = asyncio.run(_ask(address, timeout, live=live))
    if why is not None:
        raise CallFailed(url, f"the server is not {state}" + (f": {printable(why)}" if why else ""))
    typer.echo(f"{url}: {state}")


def _is_given(context: typer.Context, option: str) -> bool:
    """Tell whether an option was given on the command line, not by an environment variable."""
    source = context.get_parameter_source(option)
    return source is not None and source.name == "COMMANDLINE"


async def _ask_socket(url: str, path: str, timeout: float, *, live: bool) -> str | None:
    """Ask a probe socket for the server's state; raises CallFailed if it does not answer."""
    try:
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                answer = await reader.read()
            finally:
                writer.close()
    except TimeoutError:
        raise CallFailed(url, "no answer in time") from None
    except OSError as error:
        raise CallFailed(url, f"cannot connect: {error.strerror or error}") from None
    if answer == READY or (live and answer.startswith(LIVE)):
        return None
    return answer.removeprefix(LIVE).decode(errors="replace")


async def _ask(address: ServerAddress, timeout: float, *, live: bool) -> str | None:
    """Return None if a server is ready, or live with `live`; otherwise the reason or ''."""
    async with dial(address, timeout=timeout) as client:
        if await (client.live() if live else client.ready()):
            return None
        return "" if live else await _failures(client)


async def _failures(client: ServerClient) -> str:
    """Return the failed and loading models in a server's index, or why there is no index."""
    try:
        entries = await client.index()
    except Exception as error:
        failure = error if isinstance(error, CallFailed) else client.failure(error)
        if failure is None:
            raise
        return failure.problem if failure.status == "UNAVAILABLE" else ""
    failed = [entry for entry in entries if is_failure(entry.state, entry.reason)]
    shown = [f"{_named(entry)}: {entry.reason}" for entry in failed[:SHOWN]]
    more = [f"and {len(failed) - SHOWN} more"] if len(failed) > SHOWN else []
    loading = named_models([entry.name for entry in entries if entry.state == _LOADING])
    return "; ".join((*shown, *more, *([f"loading {loading}"] if loading else [])))


def _named(entry: IndexEntry) -> str:
    return f"'{entry.name}'" + (f" version {entry.version}" if entry.version else "")
