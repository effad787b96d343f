"""`xlaserve health`: whether a server is ready, or live, as the exit status that a probe reads."""

import asyncio
from typing import Annotated

import typer

from xlaserve.cli.connection import (
    URL_HELP,
    TlsCa,
    TlsCertificate,
    TlsInsecure,
    TlsKey,
    TokenFile,
    server_address,
)
from xlaserve.transport.address import ServerAddress, TlsFiles
from xlaserve.transport.client import CallFailed
from xlaserve.transport.dialing import dial


def health(  # noqa: PLR0917, typer reads the parameters of a command from its signature
    url: Annotated[
        str,
        typer.Option(
            envvar="XLASERVE_GRPC_ENDPOINT",
            help=f"{URL_HELP} port:n is this machine.",
        ),
    ] = "127.0.0.1:8001",
    live: Annotated[
        bool, typer.Option("--live", help="Ask whether it is live, not whether it is ready.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the answer.")] = 5.0,
    tls_ca: TlsCa = None,
    tls_certificate: TlsCertificate = None,
    tls_key: TlsKey = None,
    tls_insecure: TlsInsecure = False,
    token_file: TokenFile = None,
) -> None:
    """Exit with 0 when a server is ready, else with 1 and one line that says why."""
    tls = TlsFiles(tls_ca, tls_certificate, tls_key, tls_insecure)
    address = server_address(url, tls, token_file)
    state = "live" if live else "ready"
    if not asyncio.run(_ask(address, timeout, live=live)):
        raise CallFailed(url, f"the server is not {state}")
    typer.echo(f"{url}: {state}")


async def _ask(address: ServerAddress, timeout: float, *, live: bool) -> bool:
    async with dial(address, timeout=timeout) as client:
        return await (client.live() if live else client.ready())
