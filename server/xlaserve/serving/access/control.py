"""The permission gate: authenticates callers, and checks permissions and quotas."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, TypeVar

import structlog

from xlaserve.errors import InvalidSettings
from xlaserve.errors.access import NotPermitted, Restricted, Unauthenticated
from xlaserve.serving.access.key_set import IssuerKey, check_library, is_url, read_keys
from xlaserve.serving.access.models import CallerSight, ModelNames
from xlaserve.serving.access.principal import KnownBy
from xlaserve.serving.access.quotas import Admits, Quotas
from xlaserve.serving.access.restrictions import Restrictions
from xlaserve.serving.access.rules import MatchedCaller, Rules
from xlaserve.serving.access.rules_file import read_rules
from xlaserve.serving.access.sight import Sees, everything, nothing
from xlaserve.serving.access.signed_tokens import Verifier
from xlaserve.serving.access.tokens import bearer
from xlaserve.serving.call import NOBODY, OPEN, Call, Operation, Peer, Sight
from xlaserve.serving.standing import Standing, State
from xlaserve.settings import Settings

_AGAIN_SECONDS = 5.0
"""Interval between attempts to read keys while there are none."""
_KEYS_SECONDS = 1.0
"""How long a reload waits for keys; keys that arrive later are still used."""
_MAX_GRANTED = 16
"""Maximum number of tokens cached per connection; only known and short ones are cached."""
_MAX_CHARACTERS = 4096

T = TypeVar("T")

_log = structlog.get_logger("access")


@dataclass(frozen=True, slots=True)
class _Files:
    """The contents of the rules file and of the key set."""

    rules: Rules
    keys: Sequence[IssuerKey]


_NO_FILES = _Files(Rules(), ())


@dataclass(frozen=True, slots=True)
class _State:
    """The rules with their verifier; replaced as a whole."""

    files: _Files
    rules: Rules
    verifier: Verifier | None


@dataclass(frozen=True, slots=True)
class _Permission:
    """The permission of a connection and token for one operation."""

    found: MatchedCaller
    """The first caller that allows the operation; provides the principal and the quota."""
    sight: Sight | None
    """The combined models of all callers that allow it; None for all models."""


@dataclass(frozen=True, slots=True)
class _Granted:
    """The permissions of a connection with a token; valid while the state is the same object."""

    state: _State
    by_operation: Mapping[Operation, _Permission]
    is_known: bool
    until: float | None = None
    """Expiry of the token; None if it does not expire."""


class Wait(Protocol):
    """Runs blocking I/O on a thread."""

    def __call__(self, call: Callable[[], T], /) -> Awaitable[T]:
        """Run a function on a thread, and return its result."""
        ...


class AccessControl:
    """Checks calls against the access rules, if there are any; the check of the gate `permission`.

    Belongs to the event loop, except for reading files, which threads do. Permissions cached for a
    connection are discarded when the rules change.
    """

    def __init__(
        self,
        path: Path | None,
        restrictions: Restrictions | None,
        *,
        max_principals: int,
        quotas: Admits | None = None,
        standing: Standing | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the rules; raises InvalidSettings if they are unusable.

        `quotas` is shared by all processes; None gives this process its own. `standing` decides the
        error for hidden models.
        """
        self._path = path
        self._standing = standing or Standing(State.SETTLED)
        self._restrictions = restrictions
        self._clock = clock
        self._quotas = quotas or Quotas(max_principals, monotonic)
        self._state: _State | None = None
        self._reloading = asyncio.Lock()
        """Held while rules are read, but not while keys are read."""
        self._reading_keys: set[asyncio.Task[None]] = set()
        if path is not None:
            self._take(self._read())

    @classmethod
    def of(
        cls, settings: Settings, quotas: Admits | None = None, standing: Standing | None = None
    ) -> "AccessControl":
        """Create the access control from the settings; raises InvalidSettings."""
        access = cls(
            Path(settings.access_rules) if settings.access_rules else None,
            Restrictions.of(settings.grpc_restricted_protocol, settings.http_restricted_api),
            max_principals=settings.max_principals,
            quotas=quotas,
            standing=standing,
        )
        if settings.modelmesh and access._state is not None:
            allowed = {operation for caller in access._rules.callers for operation in caller.allow}
            if Operation.RUNTIME not in allowed:
                _log.warning("mesh cannot load models", reason="no caller has permission `runtime`")
        return access

    @property
    def is_needed(self) -> bool:
        """Tell whether there are any rules or restrictions."""
        return self._state is not None or self._restrictions is not None

    # --- checking calls ---

    def check(self, call: Call) -> None:
        """Identify the caller; raise if the call is refused, without revealing which models exist.

        Nested calls are not checked, because their outermost call was permitted; nor are the
        server's own.
        """
        peer = call.peer
        if call.parent is not None or peer is NOBODY or call.operation in OPEN:
            return
        if self._restrictions is not None:
            self._restrictions.check(call)
        state = self._state
        if state is None:
            return
        authorization = call.headers.get("authorization")
        granted = peer.granted.get(authorization)
        if (
            type(granted) is not _Granted
            or granted.state is not state
            or (granted.until is not None and granted.until <= self._clock())
        ):
            granted = self._grant(state, peer, authorization)
        permission = granted.by_operation.get(call.operation)
        if permission is None:
            if not granted.is_known:
                raise Unauthenticated
            first = next(iter(granted.by_operation.values()))
            # Set for the access log, which names the refused caller.
            call.principal = first.found.principal
            raise NotPermitted(call.principal.name, call.operation.value)
        found = permission.found
        call.principal = found.principal
        if permission.sight is not None:
            call.sight = permission.sight
        quota = found.caller.quota
        if quota is not None and not call.carries_calls:
            self._quotas.admit(call, found.principal, quota)

    def permits(self, call: Call, operation: Operation) -> Sees:
        """Return the models on which a permitted call's client may perform another operation.

        Considers restrictions as well as rules. Used by the status page to hide actions that would
        fail.
        """
        if self._restrictions is not None:
            probe = Call()
            probe.operation, probe.headers, probe.peer = operation, call.headers, call.peer
            try:
                self._restrictions.check(probe)
            except Restricted:
                return nothing
        return self.sees(call, operation)

    def sees(self, call: Call | None, operation: Operation) -> Sees:
        """Return the models on which a call's client may perform another operation."""
        if self._state is None or call is None or call.peer is NOBODY:
            return everything
        granted = self._grant(self._state, call.peer, call.headers.get("authorization"))
        permission = granted.by_operation.get(operation)
        if permission is None:
            return nothing
        return everything if permission.sight is None else permission.sight.shows

    def _grant(self, state: _State, peer: Peer, authorization: str | None) -> _Granted:
        """Determine the permissions of a connection with a token; cache them for known tokens."""
        token = bearer(authorization)
        found: list[MatchedCaller] = []
        until = None
        if token is not None:
            found += state.rules.of_token(token, peer)
            subject = None
            if not found and state.verifier is not None:
                subject = state.verifier.subject_of(token)
            if subject is not None:
                until = subject.until
                found += state.rules.of_subject(subject.name, peer)
        is_remembered = authorization is None or (
            bool(found) and len(authorization) <= _MAX_CHARACTERS
        )
        found += state.rules.of_peer(peer)
        by_operation = _permissions(found, self._standing)
        is_known = any(one.principal.known_by is not KnownBy.NOTHING for one in found)
        granted = _Granted(state, MappingProxyType(by_operation), is_known, until)
        if is_remembered:
            if len(peer.granted) >= _MAX_GRANTED:
                peer.granted.clear()
            peer.granted[authorization] = granted
        return granted

    # --- reading files ---

    def _read(self) -> _Files:
        """Read rules and keys; raises InvalidSettings if they are unusable."""
        assert self._path is not None
        rules = read_rules(self._path)
        return _Files(rules, self._keys_of(rules))

    def _keys_of(self, rules: Rules) -> Sequence[IssuerKey]:
        """Return the keys of signed tokens; if their URL does not answer, the previous ones.

        `follow_keys` reads the keys of such a URL again later.
        """
        signed = rules.signed
        if signed is None:
            return ()
        check_library()
        try:
            return read_keys(signed.keys)
        except InvalidSettings as error:
            if not is_url(signed.keys):
                raise
            kept = self._kept_keys(rules)
            _log.warning("signed-token keys unavailable", kept_keys=len(kept), reason=str(error))
            return kept

    def _kept_keys(self, rules: Rules) -> Sequence[IssuerKey]:
        """Return the current keys if the new rules have the same key source."""
        old = _NO_FILES if self._state is None else self._state.files
        if rules.signed is None or old.rules.signed is None:
            return ()
        return old.keys if old.rules.signed.keys == rules.signed.keys else ()

    def _take(self, files: _Files) -> None:
        verifier = None
        if files.rules.signed is not None:
            verifier = Verifier(files.rules.signed, files.keys, self._clock)
        self._state = _State(files, files.rules, verifier)

    async def reload(self, wait: Wait) -> None:
        """Read the rules again, then the keys; raises InvalidSettings for invalid rules.

        Revocations take effect as soon as the rules are read: damaged or unavailable keys do not
        delay them. The previous keys are then kept.
        """
        if self._path is None:
            return
        async with self._reloading:
            rules = await wait(partial(read_rules, self._path))
            self._take(_Files(rules, self._kept_keys(rules)))
        callers = [caller.name for caller in self._rules.callers]
        _log.info("access rules loaded", callers=callers)
        reading = asyncio.ensure_future(self._read_keys(wait))
        self._reading_keys.add(reading)
        reading.add_done_callback(self._reading_keys.discard)
        # A key source that does not answer must not delay the next reload.
        await asyncio.wait([reading], timeout=_KEYS_SECONDS)

    async def _read_keys(self, wait: Wait) -> None:
        """Read the keys again, for the current rules."""
        rules = self._rules
        if rules.signed is None:
            return
        try:
            keys = await wait(partial(self._keys_of, rules))
        except InvalidSettings as error:
            kept = len(self._kept_keys(self._rules))
            _log.error("signed-token keys not updated", kept_keys=kept, reason=str(error))
            return
        now = self._rules
        if now.signed is not None and now.signed.keys == rules.signed.keys:
            self._take(_Files(now, keys))

    async def follow_keys(self, wait: Wait) -> None:
        """Read the keys periodically until cancelled."""
        while True:
            files = _NO_FILES if self._state is None else self._state.files
            signed = files.rules.signed
            wanted = _AGAIN_SECONDS if signed is None or not files.keys else signed.refresh_seconds
            await asyncio.sleep(wanted)
            await self._read_keys(wait)

    @property
    def _rules(self) -> Rules:
        return Rules() if self._state is None else self._state.rules


def _permissions(
    found: Sequence[MatchedCaller], standing: Standing
) -> dict[Operation, _Permission]:
    """Combine the permissions of all callers that apply, each with its own models."""
    allowing: dict[Operation, dict[int, MatchedCaller]] = {}
    for number, one in enumerate(found):
        for operation in one.caller.may:
            allowing.setdefault(operation, {})[number] = one
    known = ModelNames(name for one in found for name in one.caller.models or ())
    return {
        operation: _Permission(
            next(iter(those.values())), _sight(operation, tuple(those.values()), known, standing)
        )
        for operation, those in allowing.items()
    }


def _sight(
    operation: Operation, found: Sequence[MatchedCaller], known: ModelNames, standing: Standing
) -> Sight | None:
    names: set[str] = set()
    for one in found:
        if one.caller.models is None:
            return None
        names |= one.caller.models
    return CallerSight(found[0].principal.name, operation, ModelNames(names), known, standing)
