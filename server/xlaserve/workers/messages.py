"""Messages between parent and worker, each a tagged class in JSON.

Nothing that is received is executed or unpickled: a message is one of the classes below, or the
channel fails.
"""

from enum import StrEnum
from typing import Any, TypeAlias

import msgspec

from xlaserve.concurrency.control_plane import ChangeText
from xlaserve.serving.observability.events import Event, Kept


class Part(StrEnum):
    """Parts of the server that processes have."""

    WORKER = "worker"
    """Has clients and models."""
    ENGINE = "engine"
    """Has the devices and the models."""
    FRONT_END = "front end"
    """Has clients, and passes their inferences to the engine."""


LOADED = "loaded"
"""The question of the parent which models a worker has loaded, by their names."""


class _Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    pass


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An error, on its way to the worker that raises it again."""

    error: str
    """Its class."""
    text: str
    facts: dict[str, str | int | float] = {}
    """Those of its attributes that are plain, as the parameter that an InvalidParameter names."""

    @property
    def said(self) -> tuple[str, str, dict[str, str | int | float]]:
        """Return it as records of bridges have it."""
        return self.error, self.text, self.facts


class WorkerAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer of one worker, or its error."""

    worker: int
    said: Any = None
    problem: str = ""


# --- from the parent ---------------------------------------------------------------------------


class Begin(_Message, frozen=True):
    """Tells a worker who it is; the first message to it."""

    worker: int
    """From 0 on; a replacement has the number of the worker that it replaces."""
    settings: dict[str, Any]
    """The worker's share of the settings, by name."""
    endpoints: list[tuple[str, str, int]]
    """Setting, address shown to clients, and the descriptor on which connections are handed."""
    answer_seconds: float
    """Seconds without a sign of life after which the worker is replaced."""
    quotas: int = -1
    """The descriptor of the shared quota table; -1 without quotas."""
    part: Part = Part.WORKER
    bridges: int = -1
    """The descriptor on which ends of bridges to other processes are handed; -1 where there are
    none."""
    board: int = -1
    """The descriptor of the board of the workers; -1 where none executes batches of others."""
    outputs: tuple[int, int] = (1, 2)
    """The descriptors that stdout and stderr had before the parent had its output logged."""


class Go(_Message, frozen=True):
    """Lets a worker make the change that it asked for; Done follows."""

    number: int


class Do(_Message, frozen=True):
    """Has a worker make a change that another one asked for; Did follows."""

    number: int
    change: ChangeText


class Hold(_Message, frozen=True):
    """Has a worker report the models of a change as not ready; Noted follows.

    Versions that are loaded already stay ready through a reload.
    """

    number: int
    models: list[str]
    reloads: bool
    """Whether the change loads them, so that loaded versions keep serving."""


class Release(_Message, frozen=True):
    """Ends a Hold, once all workers have made the change or none has; Noted follows."""

    number: int


class Settled(_Message, frozen=True):
    """Reports that a change requested by the worker was made everywhere, or undone."""

    number: int
    failure: Failure | None = None


class State(_Message, frozen=True):
    """The server-wide state."""

    is_ready: bool
    leads: bool
    has_started: bool = False
    """Whether all workers have been ready."""
    is_whole: bool = True
    """Whether the engine has every model that clients loaded: a replacement gets them once it is
    ready."""
    silent: list[int] = []
    """The processes that do not respond."""


class Ping(_Message, frozen=True):
    """Asks a worker for a sign of life; Alive follows."""


class GiveUp(_Message, frozen=True):
    """Cancels a Do whose client has left; Did follows, as without it.

    Sent to the parent, cancels an Ask; Settled follows.
    """

    number: int


class Question(_Message, frozen=True):
    """Forwards a worker's question to another worker; Reply follows."""

    number: int
    name: str
    said: Any = None


class Answers(_Message, frozen=True):
    """Gives the answers to a question."""

    number: int
    answers: list[WorkerAnswer]


class EventsAre(_Message, frozen=True):
    """Gives the events of the server."""

    number: int
    kept: Kept


class Reload(_Message, frozen=True):
    """Tells a worker to read again what SIGHUP reads again."""


class Stop(_Message, frozen=True):
    """Tells a worker to drain and to end."""


# --- from a worker -----------------------------------------------------------------------------


class Listening(_Message, frozen=True):
    """Says that connections may be handed to the worker."""


class Ready(_Message, frozen=True):
    """Says that the start is done."""


class Reloading(_Message, frozen=True):
    """Says that a reload begins; Reloaded follows."""


class Reloaded(_Message, frozen=True):
    """Says that a reload has ended, which may be one within the start."""


class Alive(_Message, frozen=True):
    """Answers a Ping: the event loop goes round."""


class Connections(_Message, frozen=True):
    """Says which connections the worker has, so that the next goes to the one with the fewest."""

    open: int
    received: int
    """All that were handed to it by now: those that are on their way are not among them."""


class Ask(_Message, frozen=True):
    """Asks for a change; Go follows, when it is its turn, and in the end Settled."""

    number: int
    change: ChangeText
    is_limited: bool = False
    """Whether its client may not see every model: what it may, only that worker knows."""


class Done(_Message, frozen=True):
    """Reports the outcome of the change that the worker was permitted."""

    number: int
    failure: Failure | None = None
    was_loaded: bool = False
    """Whether the model was loaded before: then nothing brings it back."""


class Did(_Message, frozen=True):
    """Says how a change went that another worker asked for."""

    number: int
    failure: Failure | None = None
    was_loaded: bool = False


class Noted(_Message, frozen=True):
    """Says that the worker does what Hold or Release says."""

    number: int
    is_loaded: bool = False
    """Whether it has one of the models that are held."""


class AskAll(_Message, frozen=True):
    """Asks all others a question; Answers follows."""

    number: int
    name: str
    said: Any = None


class Reply(_Message, frozen=True):
    """Answers a question."""

    number: int
    said: Any = None
    problem: str = ""


class Happened(_Message, frozen=True):
    """Says what happened in the worker; the parent has the event log."""

    event: Event


class AskEvents(_Message, frozen=True):
    """Asks for the events of the server; EventsAre follows."""

    number: int


class Here(_Message, frozen=True):
    """Says whether the worker itself is ready."""

    is_ready: bool


class Failed(_Message, frozen=True):
    """Says why the worker ends before it is ready."""

    error: str
    """The class of the error."""
    text: str


ToWorker: TypeAlias = (
    Begin
    | Ping
    | Go
    | Do
    | GiveUp
    | Hold
    | Release
    | Settled
    | State
    | Question
    | Answers
    | EventsAre
    | Reload
    | Stop
)
FromWorker: TypeAlias = (
    Listening
    | Ready
    | Reloading
    | Reloaded
    | Alive
    | Connections
    | Ask
    | GiveUp
    | Done
    | Did
    | Noted
    | AskAll
    | Reply
    | Happened
    | AskEvents
    | Here
    | Failed
)
