"""The options by which commands find a server; `bench`, `health` and `infer` share them."""

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from xlaserve.transport.address import ServerAddress, TlsFiles, parse_address

URL_HELP = (
    "host:port or unix:path for gRPC, http://host:port for REST; grpcs:// and https:// over TLS."
)
"""Help text of `--url`."""

_PANEL = "TLS, with grpcs:// or https://"

TlsCa: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca",
        help="PEM file of the authorities to trust; else the system's.",
        rich_help_panel=_PANEL,
    ),
]
TlsCertificate: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--tls-certificate",
        help="PEM file of the client's own certificate chain.",
        rich_help_panel=_PANEL,
    ),
]
TlsKey: TypeAlias = Annotated[
    Path | None,
    typer.Option("--tls-key", help="Its key, if another file holds it.", rich_help_panel=_PANEL),
]
TlsInsecure: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--tls-insecure",
        help="Do not look at the server's certificate.",
        rich_help_panel=_PANEL,
    ),
]


def server_address(
    url: str,
    *,
    ca: Path | None,
    certificate: Path | None,
    key: Path | None,
    insecure: bool,
) -> ServerAddress:
    """Return where a server is; raises InvalidAddress."""
    return parse_address(url, TlsFiles(ca, certificate, key, insecure))
