"""TLS for the gRPC port: HTTP/2 by ALPN, and clients by their certificates where that is asked."""

import ssl

from xlaserve.errors import InvalidSettings
from xlaserve.settings import Settings


def grpc_tls(settings: Settings) -> ssl.SSLContext | None:
    """Return what the gRPC port speaks TLS with; None where no certificate is set.

    Raises InvalidSettings with the setting whose file cannot be used (RFC 9113, 9.2).
    """
    if not settings.grpc_tls_certificate:
        for name in ("grpc_tls_key", "grpc_tls_client_ca"):
            if getattr(settings, name):
                raise InvalidSettings("grpc_tls_certificate", f"a file, as {name} is set", "")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["h2"])
    try:
        context.load_cert_chain(settings.grpc_tls_certificate, settings.grpc_tls_key or None)
    except (OSError, ssl.SSLError) as error:
        got = f"{settings.grpc_tls_certificate}: {error}"
        raise InvalidSettings(
            "grpc_tls_certificate", "a certificate chain and its key", got
        ) from error
    if settings.grpc_tls_client_ca:
        _ask_clients(context, settings.grpc_tls_client_ca)
    return context


def _ask_clients(context: ssl.SSLContext, authorities: str) -> None:
    try:
        context.load_verify_locations(authorities)
    except (OSError, ssl.SSLError) as error:
        got = f"{authorities}: {error}"
        raise InvalidSettings("grpc_tls_client_ca", "certificates of authorities", got) from error
    context.verify_mode = ssl.CERT_REQUIRED
