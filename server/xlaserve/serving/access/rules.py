"""Access rules: identification of callers, and their permissions."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from xlaserve.serving.access.principal import KnownBy, Principal
from xlaserve.serving.access.tokens import digest_of
from xlaserve.serving.call import Operation, Peer

IMPLIED: Mapping[Operation, frozenset[Operation]] = MappingProxyType(
    dict.fromkeys((Operation.INFER, Operation.METADATA), frozenset((Operation.READINESS,)))
)
"""Operations implied by others: using a model or reading its metadata includes its readiness."""

ANY_SUBJECT = "*"


@dataclass(frozen=True, slots=True)
class Quota:
    """The quota of a principal; None means unlimited."""

    requests_per_second: float | None = None
    burst: float = 1.0
    """Requests admitted immediately after an idle period."""
    concurrent_requests: int | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """An entry of the rules: one caller, or several with equal permissions."""

    name: str
    allow: frozenset[Operation]
    tokens: frozenset[str] = frozenset()
    """Digests of the caller's tokens."""
    tls: frozenset[str] = frozenset()
    """Subjects and alternative names of the caller's client certificates."""
    unix_users: frozenset[int] = frozenset()
    subjects: frozenset[str] = frozenset()
    """Subjects of the caller's signed tokens."""
    models: frozenset[str] | None = None
    """Names and patterns of the models that the caller may use; None for all."""
    anyone: bool = False
    """Whether the entry applies to everybody."""
    listeners: frozenset[str] = frozenset()
    """Endpoints that the caller may use; empty for all."""
    quota: Quota | None = None

    @property
    def may(self) -> frozenset[Operation]:
        """Return all permitted operations, including implied ones."""
        return self.allow.union(*(IMPLIED.get(one, ()) for one in self.allow))

    def known_by_peer(self, peer: Peer) -> KnownBy | None:
        """Return how the connection identifies this caller, or None if it does not."""
        if peer.tls_identity is not None and not self.tls.isdisjoint(
            (f"subject:{peer.tls_identity}", *peer.tls_names)
        ):
            return KnownBy.TLS
        if peer.unix_user is not None and peer.unix_user in self.unix_users:
            return KnownBy.UNIX_USER
        return KnownBy.NOTHING if self.anyone else None


@dataclass(frozen=True, slots=True)
class SignedTokens:
    """An issuer of signed tokens, and required claims."""

    keys: str
    """Key set of the issuer (RFC 7517): a file, or a URL on this machine."""
    issuer: str
    audience: str
    leeway_seconds: float = 30.0
    """Tolerated clock difference between issuer and server."""
    refresh_seconds: float = 300.0
    """Interval at which the keys are read again."""


@dataclass(frozen=True, slots=True)
class MatchedCaller:
    """A caller that applies to a call, with the resulting principal."""

    caller: Caller
    principal: Principal


@dataclass(frozen=True, slots=True)
class Rules:
    """The contents of a rules file."""

    callers: tuple[Caller, ...] = ()
    signed: SignedTokens | None = None
    by_token: Mapping[str, tuple[Caller, ...]] = field(init=False)

    def __post_init__(self) -> None:
        by_token: dict[str, tuple[Caller, ...]] = {}
        for caller in self.callers:
            for digest in caller.tokens:
                by_token[digest] = (*by_token.get(digest, ()), caller)
        object.__setattr__(self, "by_token", by_token)

    def of_token(self, token: str, peer: Peer) -> Iterator[MatchedCaller]:
        """Yield the callers with this token.

        The lookup is by digest, so its timing reveals nothing about existing tokens.
        """
        for caller in self.by_token.get(digest_of(token), ()):
            if _listens(caller, peer):
                yield MatchedCaller(caller, Principal(caller.name, KnownBy.TOKEN))

    def of_subject(self, subject: str, peer: Peer) -> Iterator[MatchedCaller]:
        """Yield the callers with this subject of a signed token."""
        for caller in self.callers:
            is_it = subject in caller.subjects or ANY_SUBJECT in caller.subjects
            if is_it and _listens(caller, peer):
                name = f"{caller.name}/{subject}"
                yield MatchedCaller(caller, Principal(name, KnownBy.SIGNED_TOKEN))

    def of_peer(self, peer: Peer) -> Iterator[MatchedCaller]:
        """Yield the callers that the connection identifies, then callers that match everybody."""
        found = [
            MatchedCaller(caller, Principal(caller.name, known_by))
            for caller in self.callers
            if _listens(caller, peer) and (known_by := caller.known_by_peer(peer)) is not None
        ]
        yield from (one for one in found if one.principal.known_by is not KnownBy.NOTHING)
        yield from (one for one in found if one.principal.known_by is KnownBy.NOTHING)


def _listens(caller: Caller, peer: Peer) -> bool:
    return not caller.listeners or peer.listener in caller.listeners
