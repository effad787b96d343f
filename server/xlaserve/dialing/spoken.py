"""Detects which protocol a port speaks, after a call has failed."""

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum

from xlaserve.dialing.address import ServerAddress
from xlaserve.dialing.interface import NotReached

SECONDS = 2.0
"""Time limit of each of the two probes, because the user is waiting for the error."""
_QUESTION = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
_HTTP = b"HTTP/1"
_SETTINGS = b"\x04"
"""Frame type SETTINGS, after the length: an HTTP/2 server's first frame (RFC 9113 6.5)."""
_ALERT = b"\x15"
"""Record type of a TLS alert, the reply to bytes that are not TLS (RFC 8446 5.1)."""


class Spoken(StrEnum):
    """The protocol that a port speaks; the values are URL schemes."""

    GRPC = "grpc"
    GRPCS = "grpcs"
    HTTP = "http"
    HTTPS = "https"
    NOBODY = ""
    """Nothing listens at the address, or neither probe was answered."""


def spoken(address: ServerAddress) -> Spoken:
    """Probe an address without TLS, then with TLS; blocks."""
    with suppress(OSError):
        answer = _answer(address)
        if answer.startswith(_HTTP):
            return Spoken.HTTP
        if answer[3:4] == _SETTINGS:
            return Spoken.GRPC
        if not answer or answer.startswith(_ALERT):
            return _over_tls(address)
    return Spoken.NOBODY


def _connected(address: ServerAddress) -> socket.socket:
    if not address.socket_path:
        return socket.create_connection((address.host, address.port), SECONDS)
    found = socket.socket(socket.AF_UNIX)
    found.settimeout(SECONDS)
    try:
        found.connect(address.socket_path)
    except BaseException:
        found.close()
        raise
    return found


def _answer(address: ServerAddress) -> bytes:
    with _connected(address) as connection:
        connection.sendall(_QUESTION)
        with suppress(ConnectionError, TimeoutError):
            return connection.recv(64)
    return b""


def _over_tls(address: ServerAddress) -> Spoken:
    # No verification: only a handshake is made, and no data is sent.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    with (
        _connected(address) as connection,
        context.wrap_socket(connection, server_hostname=address.host or None) as tls,
    ):
        return Spoken.GRPCS if tls.selected_alpn_protocol() == "h2" else Spoken.HTTPS


@contextmanager
def advising(address: ServerAddress) -> Iterator[None]:
    """Context manager that adds a suggested URL to NotReached errors."""
    try:
        yield
    except NotReached as error:
        suggestion = advice(address)
        if not suggestion:
            raise
        raise NotReached(error.url, f"{error.problem}; {suggestion}", error.status) from error


def advice(address: ServerAddress) -> str:
    """Return a text that suggests another URL; empty if the protocol is right or unknown."""
    found = spoken(address)
    expected = f"{'http' if address.rest else 'grpc'}{'s' if address.tls else ''}"
    if found in (Spoken.NOBODY, expected):
        return ""
    if address.socket_path:
        place = f"{'http+unix://' if found is Spoken.HTTP else 'unix:'}{address.socket_path}"
    else:
        place = f"{found}://{address.authority}"
    return f"it seems to speak {_NAMES[found]}: try --url {place}"


_NAMES = {
    Spoken.GRPC: "gRPC",
    Spoken.GRPCS: "gRPC over TLS",
    Spoken.HTTP: "HTTP",
    Spoken.HTTPS: "HTTP over TLS",
}
