"""Parses addresses of V2 servers: gRPC or REST, with or without TLS."""

import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urlsplit

from xlaserve.errors import InvalidRequest

_UNIX = "unix:"
_THIS_MACHINE = "port"
"""Host name in `port:N`, the form of endpoint settings, which means this machine."""
_TOKEN = re.compile(r"[!-~]{1,8192}")
"""Valid tokens: visible ASCII characters, which a header can carry."""


@dataclass(frozen=True, slots=True)
class _Scheme:
    rest: bool
    tls: bool
    port: int | None
    """The default port; None if the URL must have a port."""
    unix: bool = False
    """Whether the URL has the path of a unix socket instead of host and port."""


_SCHEMES: Mapping[str, _Scheme] = MappingProxyType(
    {
        "grpc": _Scheme(rest=False, tls=False, port=None),
        "grpcs": _Scheme(rest=False, tls=True, port=None),
        "http": _Scheme(rest=True, tls=False, port=80),
        "https": _Scheme(rest=True, tls=True, port=443),
        "http+unix": _Scheme(rest=True, tls=False, port=None, unix=True),
    }
)


class InvalidAddress(InvalidRequest):
    """The URL is invalid, or does not match the TLS options."""

    def __init__(self, url: str, expected: str) -> None:
        super().__init__(f"--url: expected {expected}, got '{url}'")


class InvalidToken(InvalidRequest):
    """The token is invalid. The message does not show it, because it may be part of a secret."""

    def __init__(self, source: str) -> None:
        super().__init__(f"{source}: expected one line of 1 to 8192 visible ASCII characters")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """A client's TLS options; all files are PEM."""

    authorities: Path | None = None
    """Certificate authorities to trust instead of the system's."""
    certificate: Path | None = None
    """The client's certificate chain, for servers that require one."""
    key: Path | None = None
    """The client's private key; None if it is in the file of the certificate."""
    insecure: bool = False
    """Whether to skip verification of the server's certificate."""


_NO_FILES = TlsFiles()


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """A parsed server address, with protocol, TLS context and token."""

    url: str
    """The original text of the address."""
    rest: bool = False
    host: str = ""
    port: int = 0
    socket_path: str = ""
    """Path of a unix socket, used instead of host and port."""
    prefix: str = ""
    """Path prefix for all REST requests, for servers behind a gateway."""
    tls: ssl.SSLContext | None = None
    token: str = field(default="", repr=False)
    """Bearer token sent with every request (RFC 6750 2.1); empty for none."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Return the headers to send with every request; their names are in lower case."""
        return {"authorization": f"Bearer {self.token}"} if self.token else {}

    @property
    def authority(self) -> str:
        """Return host and port in the form of the `:authority` or `Host` header."""
        if self.socket_path:
            return "localhost"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def parse_address(url: str, files: TlsFiles = _NO_FILES, token: str = "") -> ServerAddress:
    """Parse a server URL; without a scheme, it is gRPC.

    `port:N`, the form of endpoint settings, means a port on this machine. Raises InvalidAddress,
    and InvalidToken for a token that a header cannot carry.
    """
    if token and _TOKEN.fullmatch(token) is None:
        raise InvalidToken("token")
    name, separator, rest = url.partition("://")
    scheme = _SCHEMES.get(name.lower() if separator else "grpc")
    if scheme is None:
        schemes = ", ".join(f"{name}://" for name in _SCHEMES)
        raise InvalidAddress(url, f"one of {schemes} or unix:PATH")
    if files != _NO_FILES and not scheme.tls:
        raise InvalidAddress(url, "grpcs:// or https:// with options for TLS")
    place = (rest if separator else url).rstrip("/")
    if scheme.unix:
        if not place:
            raise InvalidAddress(url, "http+unix:// and the path of a unix socket")
        return ServerAddress(url, rest=True, socket_path=place, token=token)
    tls = _context(url, files, rest=scheme.rest) if scheme.tls else None
    if place.startswith(_UNIX) and not scheme.rest:
        return ServerAddress(url, socket_path=place.removeprefix(_UNIX), tls=tls, token=token)
    try:
        parts = urlsplit(f"//{place}")
        host, port, path = parts.hostname or "", parts.port or scheme.port, parts.path
    except ValueError:
        host, port, path = "", None, ""
    if not host or port is None or "@" in place or (path and not scheme.rest):
        expected = "http://host:port" if scheme.rest else "host:port or unix:path"
        raise InvalidAddress(url, expected)
    host = "localhost" if host == _THIS_MACHINE and not separator else host
    return ServerAddress(url, scheme.rest, host, port, prefix=path, tls=tls, token=token)


def _context(url: str, files: TlsFiles, *, rest: bool) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=files.authorities)
        if files.certificate:
            context.load_cert_chain(files.certificate, files.key)
    except OSError as error:  # a missing file, or an SSLError for one that is not PEM
        named = ", ".join(str(p) for p in (files.authorities, files.certificate, files.key) if p)
        raise InvalidAddress(url, f"files in PEM for TLS ({named}: {error})") from error
    if files.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if not rest:
        context.set_alpn_protocols(["h2"])
    return context
