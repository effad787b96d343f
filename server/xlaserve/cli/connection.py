"""The options by which commands find a server; `bench`, `health` and `infer` share them."""

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from xlaserve.errors import InvalidRequest
from xlaserve.transport.address import InvalidToken, ServerAddress, TlsFiles, parse_address

URL_HELP = (
    "host:port or unix:path for gRPC, http://host:port for REST; grpcs:// and https:// over TLS."
)
"""Help text of `--url`."""

TOKEN_FILE = "V2_TOKEN_FILE"
"""Environment variable for `--token-file`. Of clients: a server refuses those of `XLASERVE_` that
are no settings of its own, and a probe runs with the environment of the server."""
_MOST_BYTES = 1 << 14
"""Bytes that are read of a file that has a token."""

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
TokenFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        envvar=TOKEN_FILE,
        help="File with the token to show (docs/access.md), /dev/stdin for a pipe.",
    ),
]


def server_address(url: str, tls: TlsFiles, token_file: Path | None) -> ServerAddress:
    """Return where a server is, and what it is shown; raises InvalidAddress or InvalidToken."""
    token = "" if token_file is None else _token(token_file)
    return parse_address(url, tls, token)


def _token(path: Path) -> str:
    """Return the token in a file, without the space around it."""
    option = f"--token-file: '{path}'"
    try:
        with path.open("rb") as file:
            token = file.read(_MOST_BYTES).decode("ascii").strip()
    except OSError as error:
        raise InvalidRequest(f"{option} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise InvalidToken(option) from None
    if not token:
        raise InvalidToken(option)
    return token
