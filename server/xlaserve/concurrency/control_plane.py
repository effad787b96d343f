"""The control plane: changes to the server, and questions to all of its processes.

In a server with several processes, every process makes each change, in the same order per subject,
before the client is answered.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, TypeAlias, TypeVar

import msgspec

from xlaserve.errors import ShuttingDown

T = TypeVar("T")
LEFT_BEHIND = "left behind"
"""Question for counts, by name, of state that a replacement process cannot take over."""
ANSWERING = "answering"
"""Question to a loading process: which models does it serve, and which failed to load?"""


class ChangeKind(StrEnum):
    """Kinds of changes."""

    LOAD = "load"
    """Load a model from the repository, on a client's request."""
    FOLLOW = "follow"
    """Load a model from the repository because its files have changed."""
    UNLOAD = "unload"
    LOAD_AT = "load_at"
    """Load a model from the path that a mesh specifies."""
    LOAD_URL = "load_url"
    """Load a model from its URL, for a multi-model container."""
    EVICT = "evict"
    """Unload a model and forget its name."""
    PURGE = "purge"
    """Unload all models and cancel all loads."""
    LOG = "log"
    TRACE = "trace"
    REGISTER = "register"
    """Register a shared memory region."""
    UNREGISTER = "unregister"


OF_MODELS = frozenset(
    {
        *(ChangeKind.LOAD, ChangeKind.FOLLOW, ChangeKind.UNLOAD, ChangeKind.PURGE),
        *(ChangeKind.LOAD_AT, ChangeKind.LOAD_URL, ChangeKind.EVICT),
    }
)
"""Changes to loaded models."""

OF_LOADS = frozenset({ChangeKind.LOAD, ChangeKind.FOLLOW, ChangeKind.LOAD_AT, ChangeKind.LOAD_URL})
"""Changes that are cancelled and undone when the requesting client disconnects."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change to the server in serializable form, so that other processes can make it too."""

    kind: ChangeKind
    subject: str = ""
    """The model or region to change. Changes to the same subject are serialized."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Any JSON values."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """File contents that are too long for a message."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The reply of one process to a question to all processes."""

    worker: int
    said: Any = None
    """Any JSON value; None if the process did not answer."""
    problem: str = ""
    """Why the process did not answer, or an empty string."""


Make: TypeAlias = Callable[[Change], Awaitable[object]]
"""Makes a change in this process."""
Reply: TypeAlias = Callable[[Any], Awaitable[Any]]
"""Answers a question on behalf of this process."""


class ControlPlane(Protocol):
    """Makes changes in every process of the server."""

    @property
    def is_ready(self) -> bool:
        """Whether every process is ready."""
        ...

    @property
    def has_started(self) -> bool:
        """Whether every process has been ready at least once."""
        ...

    @property
    def leads(self) -> bool:
        """Whether this process watches the repository on behalf of all processes."""
        ...

    @property
    def loads(self) -> bool:
        """Whether this process loads models; a front end mirrors its engine's models instead."""
        ...

    def conceals(self, model: str, version: str = "") -> bool:
        """Tell whether a model must be reported as not ready because another process lacks it."""
        ...

    def handle(self, kind: ChangeKind, make: Make) -> None:
        """Register the function that makes changes requested by other processes."""

    def answer(self, question: str, reply: Reply) -> None:
        """Register the function that answers other processes' questions."""

    async def apply(self, change: Change, here: Callable[[], Awaitable[T]]) -> T:
        """Make a change with `here`, then in all other processes; return the result of `here`.

        If `here` raises, no other process is changed. If another process fails, the change is
        undone everywhere and its error raised. Cancelling the caller undoes a load.
        """
        ...

    async def ask_all(self, question: str, content: Any = None) -> Sequence[Answer]:
        """Ask all other processes; return one Answer per process, also for silent ones."""
        ...


class ChangeText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A change to the server in serialized form."""

    kind: ChangeKind
    subject: str
    arguments: dict[str, Any]
    files: str = ""
    """File with contents that are too long for a message; the parent process removes it."""


class Journal:
    """The changes since the server started, for a new process to repeat.

    Only the last change per subject is kept. Changes are in chronological order, except that a load
    which replaces a load of the same model takes the position of the first one.
    """

    def __init__(self) -> None:
        self._changes: dict[tuple[str, str], ChangeText] = {}

    def changes(self, kinds: Collection[ChangeKind] = frozenset(ChangeKind)) -> list[ChangeText]:
        """Return the changes of these kinds, in the journal's order."""
        return [change for change in self._changes.values() if change.kind in kinds]

    def last(self, change: ChangeText) -> ChangeText | None:
        """Return the last recorded change with the same subject, or None."""
        return self._changes.get(_key(change.kind, change.subject))

    def remember(self, change: ChangeText) -> list[ChangeText]:
        """Record a change, and return the changes that it replaces.

        A load that replaces a load keeps its position, before ensembles that need the model.
        """
        key = _key(change.kind, change.subject)
        last = self._changes.get(key)
        if change.kind in OF_LOADS and last is not None and last.kind in OF_LOADS:
            self._changes[key] = change
            return [last]
        left = self._pop(key)
        match change.kind:
            case ChangeKind.EVICT:
                return left
            case ChangeKind.UNREGISTER:
                regions = [one.subject for one in self.changes({ChangeKind.REGISTER})]
                gone = regions if not change.subject else [change.subject]
                return [one for name in gone for one in self._pop(_key(ChangeKind.REGISTER, name))]
            case ChangeKind.UNLOAD:
                # Record one unload per model, because each may be loaded again individually.
                for name in change.arguments.get("models", ()):
                    left += self._pop(_key(change.kind, name))
                    own = ChangeText(change.kind, name, {"models": [name]})
                    self._changes[_key(change.kind, name)] = own
            case ChangeKind.LOG | ChangeKind.TRACE if left:
                arguments = {**left[0].arguments, **change.arguments}
                change = ChangeText(change.kind, change.subject, arguments)
            case _:
                pass
        self._changes[key] = change
        return left

    def forget_models(self) -> list[ChangeText]:
        """Remove and return all changes to models."""
        models = [key for key, change in self._changes.items() if change.kind in OF_MODELS]
        return [one for key in models for one in self._pop(key)]

    def _pop(self, key: tuple[str, str]) -> list[ChangeText]:
        found = self._changes.pop(key, None)
        return [] if found is None else [found]


def _key(kind: ChangeKind, subject: str) -> tuple[str, str]:
    return ("model" if kind in OF_MODELS else str(kind), subject)


class ChangesInProgress:
    """Changes in progress, and the kinds of changes refused while the server is replaced.

    The replacement process repeats the clients' changes; changes made afterwards would be lost.
    """

    def __init__(self) -> None:
        self._refused: Collection[ChangeKind] = ()
        self._kinds: list[ChangeKind] = []
        self._ended = asyncio.Event()
        """Set whenever a change has ended."""

    def refuses(self, kind: ChangeKind) -> bool:
        """Tell whether changes of a kind are refused."""
        return kind in self._refused

    @contextmanager
    def making(self, kind: ChangeKind) -> Iterator[None]:
        """Count a change as in progress within a block."""
        self._kinds.append(kind)
        try:
            yield
        finally:
            self._kinds.remove(kind)
            self._ended.set()

    async def hold(self, kinds: Collection[ChangeKind]) -> None:
        """Refuse changes of these kinds; return once none of them is in progress."""
        self._refused = kinds
        while any(kind in kinds for kind in self._kinds):
            self._ended.clear()
            await self._ended.wait()

    def go_on(self) -> None:
        """Accept all changes again."""
        self._refused = ()


class OneProcess:
    """The control plane of a single-process server."""

    is_ready = True
    has_started = True
    leads = True
    loads = True

    def __init__(self) -> None:
        self.files_of_model: Callable[[str], Mapping[str, bytes]] = lambda _: {}
        """Returns the files that a client sent to load a model; reads the disk."""
        self._makes: dict[ChangeKind, Make] = {}
        self._replies: dict[str, Reply] = {}
        self._journal = Journal()
        self._in_progress = ChangesInProgress()

    def conceals(self, model: str, version: str = "") -> bool:
        """Return false: no other process can lack a model."""
        return False

    def handle(self, kind: ChangeKind, make: Make) -> None:
        """Register the function that repeats changes of a replaced process."""
        self._makes[kind] = make

    def answer(self, question: str, reply: Reply) -> None:
        """Register the function that answers a question; only this process asks it."""
        self._replies[question] = reply

    async def apply(self, change: Change, here: Callable[[], Awaitable[T]]) -> T:
        """Make the change; raises like `here`, or ShuttingDown while changes are refused."""
        if self._in_progress.refuses(change.kind):
            raise ShuttingDown
        with self._in_progress.making(change.kind):
            result = await here()
            self._remember(change)
            return result

    def _remember(self, change: Change) -> None:
        if change.kind is ChangeKind.PURGE:
            self._journal.forget_models()
        else:
            self._journal.remember(ChangeText(change.kind, change.subject, dict(change.arguments)))

    async def ask_all(self, question: str, content: Any = None) -> Sequence[Answer]:
        """Return an empty sequence: there are no other processes."""
        return ()

    # --- replacement of a process ---

    async def hold(self, kinds: Collection[ChangeKind]) -> Sequence[ChangeText]:
        """Refuse changes of these kinds; return the recorded ones once none is in progress."""
        await self._in_progress.hold(kinds)
        return self._journal.changes(kinds)

    def go_on(self) -> None:
        """Accept changes again."""
        self._in_progress.go_on()

    def files_of(self, change: ChangeText) -> Mapping[str, bytes]:
        """Return the files that belong to a change; blocks on the disk."""
        return self.files_of_model(change.subject) if change.kind is ChangeKind.LOAD else {}

    async def replies(self, question: str) -> Sequence[Any]:
        """Return this process's answer to a question, if it has one."""
        reply = self._replies.get(question)
        return [] if reply is None else [await reply(None)]

    async def replay_change(self, change: Change) -> None:
        """Repeat a change of the replaced process; raises the errors of the change."""
        await self._makes[change.kind](change)
        self._remember(change)
