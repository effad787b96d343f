"""TLS alerts that tell clients why a handshake failed (RFC 8446 6.2; RFC 7301 3.2)."""

import ssl

MOST_HELLO_BYTES = 1 << 14
"""Maximum bytes inspected of a ClientHello: one TLS record."""
NO_APPLICATION_PROTOCOL = bytes.fromhex("15 0303 0002 02 78")
"""The fatal alert 120, unencrypted because there are no keys before the ServerHello."""
_HANDSHAKE, _CLIENT_HELLO, _ALPN = 22, 1, 16
_RECORD_BYTES = 5


class _AlertingObject(ssl.SSLObject):
    """Attaches OpenSSL's alert to the exception of a failed handshake.

    Event loops would lose the alert, because they close the connection when the handshake raises.
    """

    outgoing: ssl.MemoryBIO

    def do_handshake(self) -> None:
        """Continue the handshake; a fatal error gets the unsent bytes in its attribute `alert`."""
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            error.alert = self.outgoing.read()  # type: ignore[attr-defined]
            raise


class AlertingContext(ssl.SSLContext):
    """A server's TLS context that keeps the alerts of failed handshakes."""

    sslobject_class = _AlertingObject
    agreed = ""
    """The only ALPN protocol that the server accepts; clients without ALPN are accepted too."""

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        """Create a TLS connection over memory buffers; also keep its output buffer."""
        made = super().wrap_bio(incoming, outgoing, server_side, server_hostname, session)
        assert isinstance(made, _AlertingObject)
        made.outgoing = outgoing
        return made

    def refuses(self, hello: bytes) -> bool:
        """Tell whether a ClientHello offers ALPN protocols, but not the accepted one.

        An incomplete or unparsable ClientHello is not refused here, but left to OpenSSL.
        """
        offered = offered_protocols(hello)
        return offered is not None and self.agreed.encode() not in offered


def alert_of(error: BaseException) -> bytes:
    """Return the alert attached to a handshake error; empty if there is none."""
    return getattr(error, "alert", b"")


def offered_protocols(record: bytes) -> list[bytes] | None:
    """Return the ALPN protocols in a ClientHello; None if it has none or is incomplete.

    (RFC 8446 4.1.2, 5.1; RFC 7301 3.1.)
    """
    if record[:1] != bytes([_HANDSHAKE]) or record[_RECORD_BYTES : _RECORD_BYTES + 1] != b"\x01":
        return None
    reader = _Reader(record[_RECORD_BYTES : _RECORD_BYTES + int.from_bytes(record[3:5], "big")])
    try:
        reader.take(1)
        hello = _Reader(reader.vector(3))
        hello.take(2 + 32)
        for length_bytes in (1, 2, 1):  # session id, cipher suites, compression methods
            hello.vector(length_bytes)
        extensions = _Reader(hello.vector(2))
        while extensions.data:
            kind = int.from_bytes(extensions.take(2), "big")
            body = extensions.vector(2)
            if kind == _ALPN:
                return _Reader(_Reader(body).vector(2)).vectors(1)
    except EOFError:
        return None
    return None


class _Reader:
    """Parser for TLS vectors (RFC 8446 3.4)."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes; raise EOFError if there are fewer."""
        if count > len(self.data):
            raise EOFError
        taken, self.data = self.data[:count], self.data[count:]
        return taken

    def vector(self, length_bytes: int) -> bytes:
        """Return the next vector, whose length field has `length_bytes` bytes."""
        return self.take(int.from_bytes(self.take(length_bytes), "big"))

    def vectors(self, length_bytes: int) -> list[bytes]:
        """Return all remaining vectors."""
        found = []
        while self.data:
            found.append(self.vector(length_bytes))
        return found
