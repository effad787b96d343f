"""Peers of connections, read once from each transport."""

import asyncio
import os
import re
import socket
import struct
from typing import Any

from xlaserve.net.ledger import Account
from xlaserve.serving.call import UNIX, Peer

_ESCAPED, _ESCAPE = re.compile(r"[\\,]"), r"\\\g<0>"
_CREDENTIALS = struct.Struct("3i")
"""`struct ucred` of Linux: process, user, group."""
_SHOWN_CHARACTERS = 1024
"""Maximum length of a subject; a trusted authority may sign a longer one."""
_MOST_NAMES = 64
"""Maximum number of alternative names per certificate."""


def peer_of(
    transport: asyncio.BaseTransport, listener: str, account: Account | None = None
) -> Peer:
    """Return the peer of a new connection, after its TLS handshake if it has one.

    `listener` is the setting that names the endpoint.
    """
    name = transport.get_extra_info("peername")
    tls = transport.get_extra_info("ssl_object")
    connection = transport.get_extra_info("socket")
    is_unix = connection is not None and connection.family == socket.AF_UNIX
    certificate = None if tls is None else tls.getpeercert()
    return Peer(
        listener=listener,
        address=UNIX if is_unix else _address(name),
        tls_identity=_subject(certificate),
        unix_user=_user(connection) if is_unix else None,
        account=account,
        tls_names=_alternative_names(certificate),
    )


def _address(name: Any) -> str:
    if not isinstance(name, tuple):
        return ""  # the peer has disconnected
    host, port = name[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _subject(certificate: Any) -> str | None:
    """Return the subject of a verified certificate, or None if there is no certificate.

    Commas in values are escaped (RFC 4514 2.4), so that no value reads as another attribute.
    """
    if not certificate:
        return None
    names = (pair for relative in certificate.get("subject", ()) for pair in relative)
    text = ",".join(f"{name}={_ESCAPED.sub(_ESCAPE, value)}" for name, value in names)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _alternative_names(certificate: Any) -> tuple[str, ...]:
    """Return the alternative names of a verified certificate (RFC 5280 4.2.1.6)."""
    if not certificate:
        return ()
    found = certificate.get("subjectAltName", ())[:_MOST_NAMES]
    named = (f"{kind}:{name}" for kind, name in found if isinstance(name, str))
    return tuple(name for name in named if len(name) <= _SHOWN_CHARACTERS)


def _user(connection: Any) -> int | None:
    """Return the user id of the process that connected to a unix socket, or None if unknown."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return None
    try:
        # Use a duplicate: a transport may return a wrapper instead of a real socket.
        with socket.socket(fileno=os.dup(connection.fileno())) as copy:
            found = copy.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size)
    except OSError:
        return None  # the peer has disconnected
    user: int = _CREDENTIALS.unpack(found)[1]
    return user
