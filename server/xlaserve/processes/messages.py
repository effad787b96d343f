"""Messages between the parent and a worker, each a class with a tag of its own in JSON.

Nothing that is received is executed or unpickled: a message is one of the classes below, or the
channel fails.
"""

from typing import Any, TypeAlias

import msgspec


class _Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    pass


# --- from the parent ---------------------------------------------------------------------------


class Begin(_Message, frozen=True):
    """Tells a worker who it is; the first message to it."""

    worker: int
    """From 0 on; a replacement has the number of the worker that it replaces."""
    settings: dict[str, Any]
    """The worker's share of the settings, by name."""
    endpoints: list[tuple[str, str, int]]
    """Setting, address as clients are told, and the descriptor on which connections are handed."""
    watchdog_seconds: float
    """Seconds without a sign of life after which the worker is replaced; 0 for any."""


class Reload(_Message, frozen=True):
    """Tells a worker to read again what SIGHUP reads again."""


class Stop(_Message, frozen=True):
    """Tells a worker to drain and to end."""


# --- from a worker -----------------------------------------------------------------------------


class Listening(_Message, frozen=True):
    """Says that connections may be handed to the worker."""


class Ready(_Message, frozen=True):
    """Says that the start is done, or a reload."""


class Reloading(_Message, frozen=True):
    """Says that a reload begins; Ready follows."""


class Alive(_Message, frozen=True):
    """Says that the event loop goes round."""


class Connections(_Message, frozen=True):
    """Says which connections the worker has, so that the next goes to the one with the fewest."""

    open: int
    received: int
    """All that were handed to it by now: those that are on their way are not among them."""


class Failed(_Message, frozen=True):
    """Says why the worker ends before it is ready."""

    error: str
    """The class of the error."""
    text: str


ToWorker: TypeAlias = Begin | Reload | Stop
FromWorker: TypeAlias = Listening | Ready | Reloading | Alive | Connections | Failed
