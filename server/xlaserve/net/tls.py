"""TLS contexts of the listeners: one certificate for all, reloadable at any time."""

import ssl
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from xlaserve.errors import InvalidSettings
from xlaserve.net.alerts import AlertingContext
from xlaserve.settings import Settings
from xlaserve.settings.choices import TlsEndpoint

MakeContext: TypeAlias = Callable[[], ssl.SSLContext]
"""Returns the current TLS context, for a new handshake."""

_PROTOCOLS: Mapping[TlsEndpoint, str] = MappingProxyType(
    {
        TlsEndpoint.GRPC: "h2",  # RFC 9113 3.2
        TlsEndpoint.HTTP: "http/1.1",
        TlsEndpoint.METRICS: "http/1.1",
    }
)
"""Endpoint -> ALPN protocol (RFC 7301)."""

_MOST_BYTES = 1 << 20
"""Maximum bytes inspected of a key file."""
_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""TLS 1.2 ciphers: forward secrecy and AEAD only, as in TLS 1.3."""


class ServerTls:
    """Creates TLS contexts per ALPN protocol from the files in the settings.

    There are none until the first `reload`.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        named = (settings.tls_certificate, settings.tls_key, settings.tls_client_ca)
        self.files = tuple(Path(name) for name in named if name)
        """The files that `reload` reads."""
        self._contexts: Mapping[str, ssl.SSLContext] = {}

    def reload(self) -> None:
        """Read the files again; new handshakes use the new contexts.

        Raises InvalidSettings, naming the setting, if a file cannot be used; nothing changes then,
        because new contexts are created instead of modifying the current ones.
        """
        protocols = sorted(set(_PROTOCOLS.values()))
        self._contexts = {protocol: _context(self._settings, protocol) for protocol in protocols}

    def of(self, endpoint: TlsEndpoint) -> MakeContext | None:
        """Return the context factory of an endpoint, or None if it does not use TLS."""
        if endpoint not in self._settings.tls_endpoints:
            return None
        protocol = _PROTOCOLS[endpoint]
        return lambda: self._contexts[protocol]


def server_tls(settings: Settings) -> ServerTls | None:
    """Return the listeners' TLS, before its first `reload`; None if no certificate is set.

    Raises InvalidSettings if the TLS settings are inconsistent.
    """
    if not settings.tls_certificate:
        for name in ("tls_key", "tls_client_ca"):
            if getattr(settings, name):
                raise InvalidSettings("tls_certificate", f"a file, since {name} is set", "")
        return None
    if not settings.tls_endpoints:
        raise InvalidSettings("tls_endpoints", "an endpoint, since tls_certificate is set", "")
    return ServerTls(settings)


def _context(settings: Settings, protocol: str) -> ssl.SSLContext:
    context = AlertingContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(_CIPHERS)
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.options |= ssl.OP_CIPHER_SERVER_PREFERENCE
    context.set_alpn_protocols([protocol])
    context.agreed = protocol
    try:
        # Pass a password, so that an encrypted key is an error instead of a terminal prompt.
        context.load_cert_chain(settings.tls_certificate, settings.tls_key or None, password="")
    except (OSError, ssl.SSLError) as error:
        setting = "tls_key" if settings.tls_key else "tls_certificate"
        key = settings.tls_key or settings.tls_certificate
        if _has_password(Path(key)):
            expected = "a key without a password: openssl pkey -in KEY -out KEY-WITHOUT-PASSWORD"
            raise InvalidSettings(setting, expected, f"{key}, which is encrypted") from error
        got = f"{settings.tls_certificate}: {error}"
        raise InvalidSettings("tls_certificate", "a certificate chain and its key", got) from error
    if settings.tls_client_ca:
        _ask_clients(context, settings.tls_client_ca)
    return context


def _has_password(key: Path) -> bool:
    """Tell whether the private key in a PEM file is encrypted, from the headers of the file.

    See RFC 7468, section 11, and RFC 1421.
    """
    try:
        with key.open("rb") as file:
            return b"ENCRYPTED" in file.read(_MOST_BYTES)
    except OSError:
        return False


def _ask_clients(context: ssl.SSLContext, authorities: str) -> None:
    try:
        context.load_verify_locations(authorities)
    except (OSError, ssl.SSLError) as error:
        got = f"{authorities}: {error}"
        raise InvalidSettings("tls_client_ca", "certificates of authorities", got) from error
    context.verify_mode = ssl.CERT_REQUIRED
    # Disable session resumption, which skips the client certificate and could outlive it.
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
