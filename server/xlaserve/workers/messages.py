"""Messages between parent and worker, as tagged classes in JSON.

Received data is never executed or unpickled: it decodes to one of these classes, or the channel
fails.
"""

from enum import StrEnum
from typing import Any, TypeAlias

import msgspec

from xlaserve.concurrency.control_plane import ChangeText
from xlaserve.serving.observability.events import Event, Kept


class Part(StrEnum):
    """The role of a process in the server."""

    WORKER = "worker"
    """Serves clients, and executes models."""
    ENGINE = "engine"
    """Owns the devices, and executes models for front ends."""
    FRONT_END = "front end"
    """Serves clients, and forwards their inferences to the engine."""


LOADED = "loaded"
"""The parent's question for the names of a worker's loaded models."""


class _Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    pass


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An exception to be raised again in another process."""

    error: str
    """Name of the exception's class."""
    text: str
    facts: dict[str, str | int | float] = {}
    """Attributes that are strings or numbers, such as the parameter of an InvalidParameter."""

    @property
    def fields(self) -> tuple[str, str, dict[str, str | int | float]]:
        """Return the fields in the form used by bridge records."""
        return self.error, self.text, self.facts


class WorkerAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One worker's answer to a question, or its error."""

    worker: int
    said: Any = None
    problem: str = ""


# --- From the parent ---------------------------------------------------------------------------


class Begin(_Message, frozen=True):
    """Configures a worker; always the first message."""

    worker: int
    """Number from 0; a replacement has the number of the worker it replaces."""
    settings: dict[str, Any]
    """Settings of this worker, by name."""
    endpoints: list[tuple[str, str, int]]
    """For each endpoint: setting, address shown to clients, and the descriptor for its
    connections."""
    answer_seconds: float
    """After this many seconds without a response the worker is replaced."""
    quotas: int = -1
    """Descriptor of the shared quota table; -1 without quotas."""
    part: Part = Part.WORKER
    bridges: int = -1
    """Descriptor that receives the ends of bridges to other processes; -1 if there are none."""
    board: int = -1
    """Descriptor of the workers' board; -1 without work stealing."""
    outputs: tuple[int, int] = (1, 2)
    """The original stdout and stderr descriptors of the parent."""


class Go(_Message, frozen=True):
    """Permits a worker to make the change it requested; the worker replies with Done."""

    number: int


class Do(_Message, frozen=True):
    """Makes a worker apply a change requested in another process; it replies with Did."""

    number: int
    change: ChangeText


class Hold(_Message, frozen=True):
    """Makes a worker report models as not ready during a change; it replies with Noted.

    During a reload, versions already loaded stay ready.
    """

    number: int
    models: list[str]
    reloads: bool
    """Whether the change loads the models, so that loaded versions keep serving."""


class Release(_Message, frozen=True):
    """Ends a Hold, after all workers have made the change or none has; replied to with Noted."""

    number: int


class Settled(_Message, frozen=True):
    """Reports the final result of a requested change: made everywhere, or failed."""

    number: int
    failure: Failure | None = None


class State(_Message, frozen=True):
    """State of the whole server."""

    is_ready: bool
    leads: bool
    has_started: bool = False
    """Whether all workers have been ready at some time."""
    is_whole: bool = True
    """Whether the engine has all models that clients loaded. A replacement gets them once it is
    ready."""
    silent: list[int] = []
    """Numbers of unresponsive processes."""


class Ping(_Message, frozen=True):
    """Checks that a worker responds; it replies with Alive."""


class GiveUp(_Message, frozen=True):
    """Cancels a change sent with Do, whose client has left; the worker still replies with Did.

    From a worker to the parent, it cancels an Ask; the parent still replies with Settled.
    """

    number: int


class Question(_Message, frozen=True):
    """Forwards a question to a worker; it replies with Reply."""

    number: int
    name: str
    said: Any = None


class Answers(_Message, frozen=True):
    """Returns the answers to a question."""

    number: int
    answers: list[WorkerAnswer]


class EventsAre(_Message, frozen=True):
    """Returns the event log of the server."""

    number: int
    kept: Kept


class Reload(_Message, frozen=True):
    """Makes a worker reload everything that SIGHUP reloads."""


class Stop(_Message, frozen=True):
    """Makes a worker drain and exit."""


# --- From a worker -----------------------------------------------------------------------------


class Listening(_Message, frozen=True):
    """Reports that the worker accepts connections."""


class Ready(_Message, frozen=True):
    """Reports that the worker's startup is complete."""


class Reloading(_Message, frozen=True):
    """Reports that a reload has begun; Reloaded reports its end."""


class Reloaded(_Message, frozen=True):
    """Reports that a reload has ended; also sent for a reload during startup."""


class Alive(_Message, frozen=True):
    """Answers a Ping: the event loop is running."""


class Connections(_Message, frozen=True):
    """Reports how many connections the worker has, for load balancing."""

    open: int
    received: int
    """Number of connections received so far, which excludes those in transit."""


class Ask(_Message, frozen=True):
    """Requests a change; the parent sends Go when it is its turn, and finally Settled."""

    number: int
    change: ChangeText
    is_limited: bool = False
    """Whether the client may see only some models; only the requesting worker knows which."""


class Done(_Message, frozen=True):
    """Reports the outcome of a change that Go permitted."""

    number: int
    failure: Failure | None = None
    was_loaded: bool = False
    """Whether the model was loaded before; the change then cannot be undone."""


class Did(_Message, frozen=True):
    """Reports the outcome of a change requested by Do."""

    number: int
    failure: Failure | None = None
    was_loaded: bool = False


class Noted(_Message, frozen=True):
    """Acknowledges a Hold or Release."""

    number: int
    is_loaded: bool = False
    """Whether the worker has loaded one of the held models."""


class AskAll(_Message, frozen=True):
    """Sends a question to all other workers; the parent returns Answers."""

    number: int
    name: str
    said: Any = None


class Reply(_Message, frozen=True):
    """Answers a Question."""

    number: int
    said: Any = None
    problem: str = ""


class Happened(_Message, frozen=True):
    """Reports an event for the parent's event log."""

    event: Event


class AskEvents(_Message, frozen=True):
    """Requests the event log of the server; the parent returns EventsAre."""

    number: int


class Here(_Message, frozen=True):
    """Reports whether the worker itself is ready."""

    is_ready: bool


class Failed(_Message, frozen=True):
    """Reports why the worker exits before it is ready."""

    error: str
    """Name of the exception's class."""
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
