"""The caller of a call, as the permission gate found it."""

from dataclasses import dataclass
from enum import Enum


class KnownBy(Enum):
    """Credentials that a caller can be known by."""

    NOTHING = "nothing"
    """By nothing: the entry is for anybody."""
    TOKEN = "token"
    """A token of the rules, in `authorization`."""
    SIGNED_TOKEN = "signed token"
    """A JSON Web Token that an issuer of the rules signed."""
    TLS = "tls"
    """The verified certificate of its connection."""
    UNIX_USER = "unix user"
    """The user of the process at the other end of a unix socket."""


@dataclass(frozen=True, slots=True)
class Principal:
    """One caller, as the log, the quotas and the models know it."""

    name: str
    """Its name in the rules, followed by the subject of a signed token."""
    known_by: KnownBy = KnownBy.NOTHING
