"""States of the model repository, and the errors for absent models in each of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from xlaserve.errors import ModelNotFound, RepositoryUnreadable, StillStarting, VersionNotFound


class State(StrEnum):
    """States of the repository from server start on."""

    UNREAD = "unread"
    AWAY = "away"
    LOADING = "loading"
    SETTLED = "settled"
    MISSING = "missing"
    DOUBTED = "doubted"


@dataclass(frozen=True, slots=True)
class Row:
    """How every protocol answers in one state."""

    says: str
    """Description of the state, for clients."""
    is_settled: bool
    """Whether loading at startup was attempted for all models. Then the server may be ready, and an
    unknown model is reported as not found; before that, it may still appear.
    """
    is_listed: bool
    """Whether model lists can be answered."""


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
"""Used by readiness checks, model lists, and every lookup of a model by name."""

RETRY_SECONDS = 1
"""Retry-After for models that may still appear."""


class Standing:
    """The repository state of this process; belongs to the event loop."""

    def __init__(self, state: State = State.UNREAD) -> None:
        self.state = state

    @property
    def row(self) -> Row:
        """Return the current state's row of `STATES`."""
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

        `is_other` says that another version of the model is ready. Callers who may not see a model
        get the same error, so that hidden and missing models look alike.
        """
        row = self.row
        if not row.is_settled:
            return StillStarting(model, version, row.says)
        kind = VersionNotFound if is_other else ModelNotFound
        return kind(model, version, detail=detail)

    def require_settled(self, model: str = "", version: str = "") -> None:
        """Raise StillStarting if startup loading is not finished."""
        if not self.row.is_settled:
            raise StillStarting(model, version, self.row.says)

    def require_listed(self, place: str) -> None:
        """Raise StillStarting or RepositoryUnreadable if the list of models is unknown."""
        if self.state is State.UNREAD:
            raise StillStarting("", "", self.row.says)
        if not self.row.is_listed:
            raise RepositoryUnreadable(place, self.row.says)
