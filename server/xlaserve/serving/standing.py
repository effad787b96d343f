"""The states of a repository as a whole, and their answers for absent models."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from xlaserve.errors import ModelNotFound, RepositoryUnreadable, StillStarting, VersionNotFound


class State(StrEnum):
    """States of the repository, from the first connection on."""

    UNREAD = "unread"
    AWAY = "away"
    LOADING = "loading"
    SETTLED = "settled"
    MISSING = "missing"
    DOUBTED = "doubted"


@dataclass(frozen=True, slots=True)
class Row:
    """The answers of one state, the same at every door."""

    says: str
    """The repository's state, in words for clients."""
    is_settled: bool
    """Whether all that is loaded at the start was tried: then the server may be ready, and a model
    that is not there is not found. Before, it may still come."""
    is_listed: bool
    """Whether lists of models can be answered."""


STATES: Mapping[State, Row] = MappingProxyType(
    {
        State.UNREAD: Row("the model repository has not been read yet", False, False),
        State.AWAY: Row("the model repository could not be read yet", False, False),
        State.LOADING: Row("models are being loaded for the first time", False, True),
        State.SETTLED: Row(
            "the model repository was read and its models were loaded or refused", True, True
        ),
        State.MISSING: Row(
            "the model repository is currently unreadable, its models stay loaded", True, True
        ),
        State.DOUBTED: Row(
            "most models disappeared from the model repository, the next poll decides",
            True,
            True,
        ),
    }
)
"""Asked by readiness, by lists of models, and by everything that looks a model up by its name."""

RETRY_SECONDS = 1
"""Retry-After for models that may still appear."""


class Standing:
    """The state of the repository of this process. Of the event loop."""

    def __init__(self, state: State = State.UNREAD) -> None:
        self.state = state

    @property
    def row(self) -> Row:
        """Return the row of the state."""
        return STATES[self.state]

    def absent(
        self,
        model: str,
        version: str = "",
        *,
        detail: str = "is not found",
        is_other: bool = False,
    ) -> Exception:
        """Return the error for an unknown model.

        With `is_other` another version of it is ready. Callers that may not see a model get the
        same error, so that hidden and missing models look alike.
        """
        row = self.row
        if not row.is_settled:
            return StillStarting(model, version, row.says)
        kind = VersionNotFound if is_other else ModelNotFound
        return kind(model, version, detail=detail)

    def require_settled(self, model: str = "", version: str = "") -> None:
        """Raise StillStarting while the loaded models may be incomplete."""
        if not self.row.is_settled:
            raise StillStarting(model, version, self.row.says)

    def require_listed(self, place: str) -> None:
        """Raise RepositoryUnreadable while the models are unknown."""
        if not self.row.is_listed:
            raise RepositoryUnreadable(place, self.row.says)
