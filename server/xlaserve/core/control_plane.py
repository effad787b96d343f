"""The control plane: what changes the server, and what asks all of it, passes here.

With one process a change is made and that is all. With several, every process makes it, in one
order for each subject, and only then is the client answered.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, TypeAlias, TypeVar

T = TypeVar("T")


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
    """Unload everything, and cancel what loads."""
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
"""Changes of what is loaded."""

OF_LOADS = frozenset({ChangeKind.LOAD, ChangeKind.FOLLOW, ChangeKind.LOAD_AT, ChangeKind.LOAD_URL})
"""Changes that end, and are undone, when the client that asked for them has left."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the server, as data: another process can make it too."""

    kind: ChangeKind
    subject: str = ""
    """The model or the region; changes of one subject are made one after the other."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Any value that JSON can hold."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Contents that are too long for a message."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The reply of one process to a question that is asked of all."""

    worker: int
    said: Any = None
    """Any value that JSON can hold; None where it did not answer."""
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
        """Whether this process loads models; a front end is told what its engine has loaded."""
        ...

    def conceals(self, model: str, version: str = "") -> bool:
        """Tell whether a model is not ready, whatever this process says, as others lack it."""
        ...

    def handle(self, kind: ChangeKind, make: Make) -> None:
        """Say how changes that others ask for are made here."""

    def answer(self, question: str, reply: Reply) -> None:
        """Say how a question that others ask is answered here."""

    async def apply(self, change: Change, here: Callable[[], Awaitable[T]]) -> T:
        """Make a change here by `here`, then everywhere else; return what `here` returned.

        Raises what `here` raises, and then nothing is changed elsewhere; or what another process
        raises, and then it is undone everywhere. A caller that is cancelled takes a load back.
        """
        ...

    async def ask_all(self, question: str, said: Any = None) -> Sequence[Answer]:
        """Return the answers of all other processes, those that gave none among them."""
        ...


class OneProcess:
    """The control plane of a server that is one process."""

    is_ready = True
    has_started = True
    leads = True
    loads = True

    def conceals(self, model: str, version: str = "") -> bool:
        """Return false: there are no others."""
        return False

    def handle(self, kind: ChangeKind, make: Make) -> None:
        """Do nothing: nobody else asks."""

    def answer(self, question: str, reply: Reply) -> None:
        """Do nothing: nobody else asks."""

    async def apply(self, change: Change, here: Callable[[], Awaitable[T]]) -> T:
        """Make the change."""
        return await here()

    async def ask_all(self, question: str, said: Any = None) -> Sequence[Answer]:
        """Return nothing: there is nobody else."""
        return ()
