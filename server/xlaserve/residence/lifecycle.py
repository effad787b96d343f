"""The state table of one model version."""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class State(StrEnum):
    """A state of a model version."""

    UNAVAILABLE = "UNAVAILABLE"
    """Not loaded: never loaded, unloaded, or failed to load."""
    LOADING = "LOADING"
    READY = "READY"
    RELOADING = "RELOADING"
    """Answering from the loaded instance while its replacement is being loaded."""
    UNLOADING = "UNLOADING"

    @property
    def answers(self) -> bool:
        """Tell whether a version in this state serves requests."""
        return self in (State.READY, State.RELOADING)

    @property
    def public(self) -> str:
        """Return the state as the repository index names it (model repository extension)."""
        return State.READY.value if self is State.RELOADING else self.value


class Event(StrEnum):
    """An event in the life of a model version."""

    LOAD = "load"
    LOADED = "loaded"
    FAILED = "failed"
    UNLOAD = "unload"
    UNLOADED = "unloaded"


TRANSITIONS: Mapping[tuple[State, Event], State] = MappingProxyType(
    {
        (State.UNAVAILABLE, Event.LOAD): State.LOADING,
        (State.LOADING, Event.LOADED): State.READY,
        (State.LOADING, Event.FAILED): State.UNAVAILABLE,
        (State.READY, Event.LOAD): State.RELOADING,
        (State.RELOADING, Event.LOADED): State.READY,
        (State.RELOADING, Event.FAILED): State.READY,
        (State.READY, Event.UNLOAD): State.UNLOADING,
        (State.UNLOADING, Event.UNLOADED): State.UNAVAILABLE,
    }
)
"""Allowed transitions; every other pair of state and event is forbidden."""


class ForbiddenTransition(AssertionError):
    """An event in a state that does not allow it: a bug of the server."""

    def __init__(self, state: State, event: Event) -> None:
        super().__init__(f"{event.value} while {state.value}")


class Lifecycle:
    """The state of one model version and the reason for it."""

    __slots__ = ("reason", "state")

    def __init__(self) -> None:
        self.state = State.UNAVAILABLE
        self.reason = ""

    def apply(self, event: Event, reason: str = "") -> None:
        """Change the state according to the transition table; raises ForbiddenTransition."""
        following = TRANSITIONS.get((self.state, event))
        if following is None:
            raise ForbiddenTransition(self.state, event)
        self.state = following
        self.reason = reason

    def follow(self, state: State, reason: str) -> None:
        """Copy the state from the process that loads the model, which has checked the table."""
        self.state = state
        self.reason = reason
