"""Tokens: made with high entropy, and kept as their digests alone."""

import hashlib
import re
import secrets

PREFIX = "sha256:"
_BEARER = re.compile(r"[Bb][Ee][Aa][Rr][Ee][Rr] +([!-~]+)")
"""The value of `authorization` with a token (RFC 6750 2.1); the scheme in any case."""
_TOKEN_BYTES = 32
_DIGEST = re.compile(f"{PREFIX}[0-9a-f]{{64}}")


def new_token() -> str:
    """Return a random token of 256 bits."""
    return f"xla_{secrets.token_urlsafe(_TOKEN_BYTES)}"


def digest_of(token: str) -> str:
    """Return the digest kept in rules; of 256 random bits a plain one reveals nothing."""
    return PREFIX + hashlib.sha256(token.encode()).hexdigest()


def is_digest(text: str) -> bool:
    """Tell whether a text has the form of `digest_of`."""
    return _DIGEST.fullmatch(text) is not None


def bearer(authorization: str | None) -> str | None:
    """Return the bearer token of a request; None for a missing or different scheme."""
    found = None if authorization is None else _BEARER.fullmatch(authorization)
    return None if found is None else found[1]
