"""Verification of signed tokens (JWT, RFC 7519) with the keys of one issuer."""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from xlaserve.serving.access.key_set import IssuerKey
from xlaserve.serving.access.rules import SignedTokens

_MAX_CHARACTERS = 8192
"""Maximum length of a token."""
_MAX_CACHED = 1024
"""Number of verified tokens whose subjects are cached."""
_SUBJECT_CHARACTERS = 256
_SHAPE = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+")


class Subject(NamedTuple):
    """The subject of a verified token."""

    name: str
    until: float
    """Expiry of the token as wall-clock time, including the leeway."""


class Verifier:
    """Verifies the tokens of one issuer.

    The algorithm is the key's, never the one that the token names (RFC 8725 3.1).
    """

    def __init__(
        self, rules: SignedTokens, keys: Sequence[IssuerKey], clock: Callable[[], float]
    ) -> None:
        self._rules = rules
        self._keys = tuple(keys)
        self._clock = clock
        self._known: dict[str, Subject] = {}

    def subject_of(self, token: str) -> Subject | None:
        """Return the subject of a token, or None if the token is invalid."""
        known = self._known.get(token)
        if known is not None:
            return known if self._clock() < known.until else None
        if len(token) > _MAX_CHARACTERS or _SHAPE.fullmatch(token) is None:
            return None
        subject = self._verified(token)
        if subject is not None:
            if len(self._known) >= _MAX_CACHED:
                self._known.clear()
            self._known[token] = subject
        return subject

    def _verified(self, token: str) -> Subject | None:
        import jwt

        try:
            header = jwt.get_unverified_header(token)
            key = self._key_for(header)
            if key is None:
                return None
            claims = jwt.decode(
                token,
                key.key,
                algorithms=[key.algorithm],
                audience=self._rules.audience,
                issuer=self._rules.issuer,
                leeway=self._rules.leeway_seconds,
                options={"require": ["exp", "iss", "aud", "sub"]},
            )
            subject = Subject(claims["sub"], int(claims["exp"]) + self._rules.leeway_seconds)
        except (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError):
            return None
        is_usual = subject.name.isprintable() and 0 < len(subject.name) <= _SUBJECT_CHARACTERS
        return subject if is_usual else None

    def _key_for(self, header: dict[str, Any]) -> IssuerKey | None:
        """Return the key that signed the token, or None if there is not exactly one candidate."""
        if "crit" in header:
            # RFC 7515 4.1.11: critical extensions, none of which are supported; old PyJWT ignores
            # them.
            return None
        identifier = header.get("kid")
        keys = [
            key
            for key in self._keys
            if key.algorithm == header.get("alg") and (identifier is None or key.id == identifier)
        ]
        return keys[0] if len(keys) == 1 else None
