"""Peers of connections, each read from its transport once."""

import asyncio
import os
import socket
import struct
from typing import Any

from xlaserve.core.serving.call import Peer
from xlaserve.core.serving.ledger import Account

_UNIX = "unix"
_CREDENTIALS = struct.Struct("3i")
"""`struct ucred` of Linux: process, user, group."""
_SHOWN_CHARACTERS = 1024
"""Most characters of a subject: a trusted authority may sign a long one."""


def peer_of(
    transport: asyncio.BaseTransport, listener: str, account: Account | None = None
) -> Peer:
    """Return the peer of a new connection, behind its handshake where it has one.

    `listener` is the setting of the endpoint that it came to.
    """
    name = transport.get_extra_info("peername")
    tls = transport.get_extra_info("ssl_object")
    connection = transport.get_extra_info("socket")
    is_unix = connection is not None and connection.family == socket.AF_UNIX
    return Peer(
        listener=listener,
        address=_UNIX if is_unix else _address(name),
        tls_identity=None if tls is None else _subject(tls.getpeercert()),
        unix_user=_user(connection) if is_unix else None,
        account=account,
    )


def _address(name: Any) -> str:
    if not isinstance(name, tuple):
        return ""  # it is gone already
    host, port = name[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _subject(certificate: Any) -> str | None:
    """Return the subject of a certificate that was verified: of others nothing is told."""
    if not certificate:
        return None
    names = (pair for relative in certificate.get("subject", ()) for pair in relative)
    return ",".join(f"{name}={value}" for name, value in names)[:_SHOWN_CHARACTERS]


def _user(connection: Any) -> int | None:
    """Return the user id of the process that connected to a unix socket, where that is told."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return None
    try:
        # A copy: the socket of a transport may be one in name only.
        with socket.socket(fileno=os.dup(connection.fileno())) as copy:
            found = copy.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size)
    except OSError:
        return None  # it is gone already
    user: int = _CREDENTIALS.unpack(found)[1]
    return user
