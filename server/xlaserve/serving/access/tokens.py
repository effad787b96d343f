"""Random bearer tokens, of which only digests are stored."""

import hashlib
import re
import secrets

PREFIX = "sha256:"
_BEARER = re.compile(r"[Bb][Ee][Aa][Rr][Ee][Rr] +([!-~]+)")
"""An `authorization` header with a bearer token (RFC 6750 2.1); the scheme is case-insensitive."""
_TOKEN_BYTES = 32
_DIGEST = re.compile(f"{PREFIX}[0-9a-f]{{64}}")


def new_token() -> str:
    """Return a new random token of 256 bits."""
    return f"xla_{secrets.token_urlsafe(_TOKEN_BYTES)}"


def digest_of(token: str) -> str:
    """Return the digest stored in rules; for 256 random bits an unsalted hash is safe."""
    return PREFIX + hashlib.sha256(token.encode()).hexdigest()


def is_digest(text: str) -> bool:
    """Tell whether a text has the form of `digest_of`."""
    return _DIGEST.fullmatch(text) is not None


def bearer(authorization: str | None) -> str | None:
    """Return the bearer token of an `authorization` header, or None if it has none."""
    found = None if authorization is None else _BEARER.fullmatch(authorization)
    return None if found is None else found[1]
