"""Rules: how callers are recognised, and their permissions."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from xlaserve.serving.access.principal import KnownBy, Principal
from xlaserve.serving.access.tokens import digest_of
from xlaserve.serving.call import Operation, Peer

IMPLIED: Mapping[Operation, frozenset[Operation]] = MappingProxyType(
    dict.fromkeys((Operation.INFER, Operation.METADATA), frozenset((Operation.READINESS,)))
)
"""Operations that a permission includes: using or reading a model includes its readiness."""

ANY_SUBJECT = "*"


@dataclass(frozen=True, slots=True)
class Quota:
    """The quota of a principal; None is unlimited."""

    requests_per_second: float | None = None
    burst: float = 1.0
    """Requests admitted at once after an idle time."""
    concurrent_requests: int | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """One entry of the rules: a caller, or several treated alike."""

    name: str
    allow: frozenset[Operation]
    tokens: frozenset[str] = frozenset()
    """Digests of its tokens."""
    tls: frozenset[str] = frozenset()
    """Subjects and alternative names of its certificates."""
    unix_users: frozenset[int] = frozenset()
    subjects: frozenset[str] = frozenset()
    """Subjects of its signed tokens."""
    models: frozenset[str] | None = None
    """Names and patterns of its permitted models; None for all."""
    anyone: bool = False
    """Whether everybody is this caller."""
    listeners: frozenset[str] = frozenset()
    """Its allowed endpoints; empty for all."""
    quota: Quota | None = None

    @property
    def may(self) -> frozenset[Operation]:
        """Return every operation that it may do: the allowed ones, and those that they include."""
        return self.allow.union(*(IMPLIED.get(one, ()) for one in self.allow))

    def known_by_peer(self, peer: Peer) -> KnownBy | None:
        """Return which property of a connection identifies this caller; None for none."""
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
    """File of the issuer's keys (RFC 7517), or a URL of this machine."""
    issuer: str
    audience: str
    leeway_seconds: float = 30.0
    """Allowed difference between the clocks of issuer and server."""
    refresh_seconds: float = 300.0
    """Time after which the keys are read again."""


@dataclass(frozen=True, slots=True)
class Found:
    """A caller identified for a call."""

    caller: Caller
    principal: Principal


@dataclass(frozen=True, slots=True)
class Rules:
    """All entries of a file of rules."""

    callers: tuple[Caller, ...] = ()
    signed: SignedTokens | None = None
    by_token: Mapping[str, tuple[Caller, ...]] = field(init=False)

    def __post_init__(self) -> None:
        by_token: dict[str, tuple[Caller, ...]] = {}
        for caller in self.callers:
            for digest in caller.tokens:
                by_token[digest] = (*by_token.get(digest, ()), caller)
        object.__setattr__(self, "by_token", by_token)

    def of_token(self, token: str, peer: Peer) -> Iterator[Found]:
        """Find the callers that a token is of.

        It is looked up by its digest, which nobody can choose: how long that takes says nothing of
        the tokens there are.
        """
        for caller in self.by_token.get(digest_of(token), ()):
            if _listens(caller, peer):
                yield Found(caller, Principal(caller.name, KnownBy.TOKEN))

    def of_subject(self, subject: str, peer: Peer) -> Iterator[Found]:
        """Find the callers that the subject of a signed token is."""
        for caller in self.callers:
            is_it = subject in caller.subjects or ANY_SUBJECT in caller.subjects
            if is_it and _listens(caller, peer):
                name = f"{caller.name}/{subject}"
                yield Found(caller, Principal(name, KnownBy.SIGNED_TOKEN))

    def of_peer(self, peer: Peer) -> Iterator[Found]:
        """Find the callers of a connection, with those for anybody at the end."""
        found = [
            Found(caller, Principal(caller.name, known_by))
            for caller in self.callers
            if _listens(caller, peer) and (known_by := caller.known_by_peer(peer)) is not None
        ]
        yield from (one for one in found if one.principal.known_by is not KnownBy.NOTHING)
        yield from (one for one in found if one.principal.known_by is KnownBy.NOTHING)


def _listens(caller: Caller, peer: Peer) -> bool:
    return not caller.listeners or peer.listener in caller.listeners
