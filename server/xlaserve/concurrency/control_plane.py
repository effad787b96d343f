"""The control plane: what changes the server, and what asks all of it, passes here.

With one process a change is made and that is all. With several, every process makes it, in one
order for each subject, and only then is the client answered.
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
"""Asks for state that a replacement cannot get: counts, by name."""
ANSWERING = "answering"
"""The question which models a process that loads answers for, and which failed to load."""


class ChangeKind(StrEnum):
    """Kinds of changes."""

    LOAD = "load"
    """A model of the repository, as a client asks for it."""
    FOLLOW = "follow"
    """A model of the repository, since its files have changed."""
    UNLOAD = "unload"
    LOAD_AT = "load_at"
    """A model from where a mesh says it is."""
    LOAD_URL = "load_url"
    """A model of a multi-model container, from its url."""
    EVICT = "evict"
    """Unload, and forget the name."""
    PURGE = "purge"
    """Unload everything, and cancel loads."""
    LOG = "log"
    TRACE = "trace"
    REGISTER = "register"
    """A region of shared memory."""
    UNREGISTER = "unregister"


OF_MODELS = frozenset(
    {
        *(ChangeKind.LOAD, ChangeKind.FOLLOW, ChangeKind.UNLOAD, ChangeKind.PURGE),
        *(ChangeKind.LOAD_AT, ChangeKind.LOAD_URL, ChangeKind.EVICT),
    }
)
"""Changes of loaded models."""

OF_LOADS = frozenset({ChangeKind.LOAD, ChangeKind.FOLLOW, ChangeKind.LOAD_AT, ChangeKind.LOAD_URL})
"""Changes that end, and are undone, when the client that asked for them has left."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the server, as data: another process can make it too."""

    kind: ChangeKind
    subject: str = ""
    """The model or the region; changes of one subject are serialized."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Any value that JSON can hold."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Contents too long for a message."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One process's reply to a question to all."""

    worker: int
    said: Any = None
    """Any JSON value; None without an answer."""
    problem: str = ""
    """Why it did not answer."""


Make: TypeAlias = Callable[[Change], Awaitable[object]]
"""Makes a change in this process only."""
Reply: TypeAlias = Callable[[Any], Awaitable[Any]]
"""Answers a question for this process only."""


class ControlPlane(Protocol):
    """Has changes made in every process of the server."""

    @property
    def is_ready(self) -> bool:
        """Whether every process is ready."""
        ...

    @property
    def has_started(self) -> bool:
        """Whether every process has been ready."""
        ...

    @property
    def leads(self) -> bool:
        """Whether this process follows the repository for all."""
        ...

    @property
    def loads(self) -> bool:
        """Whether this process loads models; a front end mirrors its engine's."""
        ...

    def conceals(self, model: str, version: str = "") -> bool:
        """Tell whether a model is hidden as not ready, since other processes lack it."""
        ...

    def handle(self, kind: ChangeKind, make: Make) -> None:
        """Register the handler of other processes' changes."""

    def answer(self, question: str, reply: Reply) -> None:
        """Register the reply to other processes' questions."""

    async def apply(self, change: Change, here: Callable[[], Awaitable[T]]) -> T:
        """Make a change with `here`, then in every other process; return the result of `here`.

        Raises what `here` raises, and then nothing is changed elsewhere; or what another process
        raises, and then it is undone everywhere. A caller that is cancelled takes a load back.
        """
        ...

    async def ask_all(self, question: str, said: Any = None) -> Sequence[Answer]:
        """Return the answers of all other processes, naming silent ones."""
        ...


class ChangeText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A change of the server, as it is written down."""

    kind: ChangeKind
    subject: str
    arguments: dict[str, Any]
    files: str = ""
    """File of contents too long for a message; the parent removes it."""


class Journal:
    """The changes since the start, for a process that has to make them again.

    Of each subject only the last one counts. They are in the order in which they were made, but a
    load that replaces a load of the same model is where the first one was.
    """

    def __init__(self) -> None:
        self._changes: dict[tuple[str, str], ChangeText] = {}

    def changes(self, kinds: Collection[ChangeKind] = frozenset(ChangeKind)) -> list[ChangeText]:
        """Return the changes of some kinds, in the journal's order."""
        return [change for change in self._changes.values() if change.kind in kinds]

    def last(self, change: ChangeText) -> ChangeText | None:
        """Return the last change of a change's subject, or None."""
        return self._changes.get(_key(change.kind, change.subject))

    def remember(self, change: ChangeText) -> list[ChangeText]:
        """Record a change, and return those that it replaces.

        A load that replaces a load keeps its place, before the ensembles that need the model.
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
                # Each may be loaded again by itself.
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
        """Forget and return the changes of models."""
        models = [key for key, change in self._changes.items() if change.kind in OF_MODELS]
        return [one for key in models for one in self._pop(key)]

    def _pop(self, key: tuple[str, str]) -> list[ChangeText]:
        found = self._changes.pop(key, None)
        return [] if found is None else [found]


def _key(kind: ChangeKind, subject: str) -> tuple[str, str]:
    return ("model" if kind in OF_MODELS else str(kind), subject)


class ChangesInProgress:
    """Changes in progress, and the kinds refused while the server is being replaced.

    A replacement receives the changes of clients; later changes would be lost.
    """

    def __init__(self) -> None:
        self._refused: Collection[ChangeKind] = ()
        self._kinds: list[ChangeKind] = []
        self._ended = asyncio.Event()
        """Set when a change has ended."""

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
        """Refuse changes of some kinds from now on; return once none of them is in progress."""
        self._refused = kinds
        while any(kind in kinds for kind in self._kinds):
            self._ended.clear()
            await self._ended.wait()

    def go_on(self) -> None:
        """Refuse none."""
        self._refused = ()


class OneProcess:
    """The control plane of a single-process server."""

    is_ready = True
    has_started = True
    leads = True
    loads = True

    def __init__(self) -> None:
        self.files_of_model: Callable[[str], Mapping[str, bytes]] = lambda _: {}
        """Returns the files that a client loaded a model with; reads the disk."""
        self._makes: dict[ChangeKind, Make] = {}
        self._replies: dict[str, Reply] = {}
        self._journal = Journal()
        self._in_progress = ChangesInProgress()

    def conceals(self, model: str, version: str = "") -> bool:
        """Return false: this process is the only one."""
        return False

    def handle(self, kind: ChangeKind, make: Make) -> None:
        """Register the handler of changes from a replaced process."""
        self._makes[kind] = make

    def answer(self, question: str, reply: Reply) -> None:
        """Register the reply to a question, which only this process asks."""
        self._replies[question] = reply

    async def apply(self, change: Change, here: Callable[[], Awaitable[T]]) -> T:
        """Apply the change; raises like `here`, and ShuttingDown while changes are held."""
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

    async def ask_all(self, question: str, said: Any = None) -> Sequence[Answer]:
        """Return nothing: there is no other process."""
        return ()

    # --- a process that replaces this one, or that this one replaces ---

    async def hold(self, kinds: Collection[ChangeKind]) -> Sequence[ChangeText]:
        """Refuse changes from now on; return earlier ones once none is in progress."""
        await self._in_progress.hold(kinds)
        return self._journal.changes(kinds)

    def go_on(self) -> None:
        """Take changes again."""
        self._in_progress.go_on()

    def files_of(self, change: ChangeText) -> Mapping[str, bytes]:
        """Return the files of a change; waits for the disk."""
        return self.files_of_model(change.subject) if change.kind is ChangeKind.LOAD else {}

    async def replies(self, question: str) -> Sequence[Any]:
        """Return the answer of this process, if it has one."""
        reply = self._replies.get(question)
        return [] if reply is None else [await reply(None)]

    async def make_again(self, change: Change) -> None:
        """Apply a change of the replaced process; raises like the change."""
        await self._makes[change.kind](change)
        self._remember(change)
