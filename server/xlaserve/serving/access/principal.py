"""The authenticated caller of a call."""

from dataclasses import dataclass
from enum import Enum


class KnownBy(Enum):
    """Kinds of credentials that identify a caller."""

    NOTHING = "nothing"
    """No credentials; for entries that apply to everybody."""
    TOKEN = "token"
    """A token from the rules file, in the `authorization` header."""
    SIGNED_TOKEN = "signed token"
    """A JSON Web Token signed by an issuer named in the rules."""
    TLS = "tls"
    """The verified client certificate of the connection."""
    UNIX_USER = "unix user"
    """The user of the process at the other end of a unix socket."""


@dataclass(frozen=True, slots=True)
class Principal:
    """An identified caller, as used by logs, quotas and models."""

    name: str
    """Name in the rules, followed by the subject of a signed token."""
    known_by: KnownBy = KnownBy.NOTHING
