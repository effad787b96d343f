"""`xlaserve health`: whether a server is ready, or live, as the exit status that a probe reads."""

import asyncio
from typing import Annotated

import typer

from xlaserve.transport.grpc.client import CallFailed, Client


def health(
    url: Annotated[
        str,
        typer.Option(
            envvar="XLASERVE_GRPC_ENDPOINT",
            help="Where the server is: host:port, unix:path, or port:n on this machine.",
        ),
    ] = "127.0.0.1:8001",
    live: Annotated[
        bool, typer.Option("--live", help="Ask whether it is live, not whether it is ready.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the answer.")] = 5.0,
) -> None:
    """Exit with 0 when a server is ready, else with 1 and one line that says why."""
    state = "live" if live else "ready"
    if not asyncio.run(_ask(url, timeout, live=live)):
        raise CallFailed(url, f"the server is not {state}")
    typer.echo(f"{url}: {state}")


async def _ask(url: str, timeout: float, *, live: bool) -> bool:
    async with Client(url, timeout=timeout) as client:
        return await (client.live() if live else client.ready())
