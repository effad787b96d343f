"""Key sets of signed-token issuers (JWKS, RFC 7517); each key has one algorithm."""

import json
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

import structlog

from xlaserve.errors import InvalidSettings
from xlaserve.serving.access.rules_file import MAX_BYTES

SETTING = "access_rules: signed_tokens.keys"
MISSING = "PyJWT with cryptography, for signed tokens: pip install 'xlaserve[jwt]'"
_SECONDS = 5.0
_LEAST_RSA_BITS = 2048
"""Minimum size of RSA keys (RFC 7518 3.3)."""

_log = structlog.get_logger("access")


@dataclass(frozen=True, slots=True)
class IssuerKey:
    """A public key with its algorithm, which a token cannot choose."""

    id: str | None
    algorithm: str
    key: Any


def check_library() -> None:
    """Raise InvalidSettings if PyJWT or cryptography is missing."""
    try:
        import cryptography as _cryptography
        import jwt as _jwt
    except ImportError as error:
        raise InvalidSettings("access_rules: signed_tokens", MISSING, str(error)) from None
    del _cryptography, _jwt


def is_url(keys: str) -> bool:
    """Tell whether keys come from a URL; raises InvalidSettings for a URL of another machine.

    Over plain HTTP an attacker on the network could replace the keys.
    """
    if "://" not in keys:
        return False
    try:
        parts = urlsplit(keys)
        host = parts.hostname or ""
        is_ours = parts.scheme == "http" and "@" not in parts.netloc
        is_ours = is_ours and (host == "localhost" or ip_address(host).is_loopback)
    except ValueError:
        is_ours = False
    if not is_ours:
        raise InvalidSettings(SETTING, "a file, or http:// with an address of this machine", keys)
    return True


class _NoRedirect(HTTPRedirectHandler):
    def redirect_request(  # noqa: PLR0917, as it is called
        self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> None:
        """Refuse redirects, which may lead to another machine."""


def read_keys(keys: str) -> tuple[IssuerKey, ...]:
    """Return the usable keys of a file or URL; raises InvalidSettings if there are none.

    Blocks on disk or network: never call it on the event loop.
    """
    try:
        if is_url(keys):
            opener = build_opener(ProxyHandler({}), _NoRedirect())
            with opener.open(keys, timeout=_SECONDS) as answer:
                data = answer.read(MAX_BYTES + 1)
        else:
            with Path(keys).open("rb") as file:
                data = file.read(MAX_BYTES + 1)
    except (OSError, URLError) as error:
        raise InvalidSettings(SETTING, "a key set", f"{keys}: {error}") from error
    if len(data) > MAX_BYTES:
        raise InvalidSettings(SETTING, f"a key set of at most {MAX_BYTES} bytes", keys)
    try:
        return parse_keys(data, keys)
    except (ValueError, RecursionError) as error:
        raise InvalidSettings(SETTING, "a JSON Web Key Set", f"{keys}: {error}") from error


def parse_keys(data: bytes, name: str) -> tuple[IssuerKey, ...]:
    """Return the keys for RS256 and ES256; log the others."""
    value = json.loads(data)
    entries = value.get("keys") if type(value) is dict else None
    if type(entries) is not list:
        raise InvalidSettings(SETTING, "a JSON Web Key Set, {'keys': [...]}", name)
    found = tuple(key for entry in entries if (key := _key(entry, name)) is not None)
    if not found:
        raise InvalidSettings(SETTING, "at least one key for RS256 or ES256", name)
    return found


def _key(entry: Any, name: str) -> IssuerKey | None:
    try:
        return _read(entry)
    except Exception as error:  # cryptography and PyJWT raise many kinds of errors
        shown = entry.get("kid") if type(entry) is dict else None
        _log.warning("key ignored", keys=name, kid=str(shown), reason=str(error))
        return None


def _read(entry: Any) -> IssuerKey:
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePublicKey
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
    from jwt import PyJWK

    if entry.get("use", "sig") != "sig":
        raise ValueError("it is not a signing key")
    # Refuse private keys, which must have leaked, and secret keys ("oct"), which would let
    # everybody who can read the file sign tokens.
    if entry.get("kty") not in ("RSA", "EC") or "d" in entry:
        raise ValueError("expected a public key, RSA or EC")
    algorithm = "RS256" if entry["kty"] == "RSA" else "ES256"
    if entry.get("alg", algorithm) != algorithm:
        raise ValueError(f"expected alg {algorithm}, got {entry['alg']}")
    key = PyJWK(entry, algorithm).key
    if isinstance(key, RSAPublicKey):
        if key.key_size < _LEAST_RSA_BITS:
            raise ValueError(f"expected at least {_LEAST_RSA_BITS} bits, got {key.key_size}")
    elif not (isinstance(key, EllipticCurvePublicKey) and isinstance(key.curve, SECP256R1)):
        raise ValueError("expected the curve P-256")  # noqa: TRY004, it is a key of another curve
    identifier = entry.get("kid")
    return IssuerKey(None if identifier is None else str(identifier), algorithm, key)
