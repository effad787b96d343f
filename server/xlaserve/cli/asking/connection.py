"""The connection options shared by commands that call a server."""

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec, TypeAlias, TypeVar

import typer

from xlaserve.dialing.address import InvalidToken, ServerAddress, TlsFiles, parse_address
from xlaserve.dialing.dial import dial
from xlaserve.dialing.interface import ServerClient
from xlaserve.dialing.spoken import advising
from xlaserve.errors import InvalidRequest

P = ParamSpec("P")
T = TypeVar("T")

URL_HELP = (
    "host:port or unix:path for gRPC, http://host:port for REST; grpcs:// and https:// over TLS."
)

TOKEN_FILE = "V2_TOKEN_FILE"
"""Environment variable for `--token-file`. It does not begin with `XLASERVE_`, because a server
refuses unknown settings, and probes share the server's environment."""
_MOST_BYTES = 1 << 14
"""Maximum size of a token file."""

_PANEL = "TLS, with grpcs:// or https://"

TlsCa: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca",
        help="PEM file of trusted CA certificates; defaults to the system's.",
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
    typer.Option(
        "--tls-key",
        help="PEM file of the certificate's key; by default in the same file.",
        rich_help_panel=_PANEL,
    ),
]
TlsInsecure: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--tls-insecure",
        help="Do not verify the server's certificate.",
        rich_help_panel=_PANEL,
    ),
]
TokenFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        envvar=TOKEN_FILE,
        help="File with the token to send (docs/access.md); /dev/stdin for a pipe.",
    ),
]


@dataclass(frozen=True, slots=True)
class Reach:
    """The server given by a command's options."""

    address: ServerAddress
    timeout: float
    """Seconds to wait for each answer."""

    def dial(self) -> ServerClient:
        """Return a client of the server; it connects on the first call."""
        return dial(self.address, timeout=self.timeout)


def ask_server(asking: Coroutine[Any, Any, T]) -> T:
    """Run a command's requests in a new event loop, and return the result."""
    return asyncio.run(asking)


def reaching(
    seconds: float, url: str = "127.0.0.1:8001"
) -> Callable[[Callable[Concatenate[Reach, P], None]], Callable[..., None]]:
    """Add connection options to a command, which receives them as a Reach in its first argument.

    `seconds` is the default of `--timeout`, `url` that of `--url`.
    """

    def _decorate(command: Callable[Concatenate[Reach, P], None]) -> Callable[..., None]:
        own = list(inspect.signature(command).parameters.values())[1:]
        parameters = [*own, *_server_parameters(seconds, url)]

        def _reached(**values: Any) -> None:
            tls = TlsFiles(*(values.pop(f"tls_{part}") for part in _TLS_PARTS))
            address = server_address(values.pop("url"), tls, values.pop("token_file"))
            with advising(address):
                command(Reach(address, values.pop("timeout")), **values)  # type: ignore[call-arg]

        _reached.__doc__ = command.__doc__
        _reached.__name__ = command.__name__
        _reached.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        _reached.__annotations__ = {each.name: each.annotation for each in parameters}
        return _reached

    return _decorate


_TLS_PARTS = ("ca", "certificate", "key", "insecure")


def _server_parameters(seconds: float, url: str) -> list[inspect.Parameter]:
    rows: tuple[tuple[str, Any, object], ...] = (
        ("url", Annotated[str, typer.Option("--url", help=URL_HELP)], url),
        (
            "timeout",
            Annotated[float, typer.Option("--timeout", help="Seconds to wait for each answer.")],
            seconds,
        ),
        ("tls_ca", TlsCa, None),
        ("tls_certificate", TlsCertificate, None),
        ("tls_key", TlsKey, None),
        ("tls_insecure", TlsInsecure, False),
        ("token_file", TokenFile, None),
    )
    return [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
        )
        for name, annotation, default in rows
    ]


def server_address(url: str, tls: TlsFiles, token_file: Path | None) -> ServerAddress:
    """Return the address and credentials of a server; raises InvalidAddress or InvalidToken."""
    token = "" if token_file is None else token_in(token_file)
    return parse_address(url, tls, token)


def token_in(path: Path) -> str:
    """Return the token in a file, without surrounding whitespace; raises InvalidRequest."""
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
