"""Remembers why models failed to load before any version of them was known."""

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from xlaserve.errors import (
    InvalidModel,
    LoadFailed,
    ModelNotFound,
    OutOfFiles,
    OutOfMemory,
    OutOfSpace,
    TooManyAbandoned,
    XlaserveError,
)
from xlaserve.errors.code import ModelFailed
from xlaserve.errors.panics import ENDS
from xlaserve.residence.lifecycle import State
from xlaserve.serving.access.sight import seen_now, without_names

OF_THE_MODEL = (
    *(LoadFailed, InvalidModel, ModelFailed),
    *(OutOfMemory, OutOfSpace, OutOfFiles, TooManyAbandoned),
)
"""Errors that explain why a model does not answer. Others concern only the request that asked for
the load, such as a limit or a missing permission, and are not shown to other callers."""

MOST_MODELS = 1000
"""Maximum number of remembered failures, since clients choose the names; the oldest are dropped."""
NOT_LOADED = "not loaded"
"""Reason shown for a model that is not loaded."""
INTERNAL = "internal error"
"""Reason shown for an unexpected exception, whose traceback is in the log."""
SHOWN = 10
"""Maximum number of failures listed in a message about the whole server."""

_WISHED = frozenset({"", NOT_LOADED, "unloaded"})
"""Reasons that are not failures: the model was never loaded, or was unloaded on request."""
_LASTING = frozenset({State.UNAVAILABLE.public, State.READY.public})
"""States whose reason is the outcome of a load; in other states the reason shows progress."""


def is_failure(state: str, reason: str) -> bool:
    """Tell whether a state and reason, as shown in the index, describe a failure."""
    return state in _LASTING and reason not in _WISHED


def named_models(names: Sequence[str]) -> str:
    """Return the first names of a list, and the number of the others."""
    more = [f"and {len(names) - SHOWN} more"] if len(names) > SHOWN else []
    return ", ".join((*(f"'{name}'" for name in names[:SHOWN]), *more))


def of_reload(reason: str) -> str:
    """Return the reason of a version that still answers after a failed reload."""
    return f"serves the earlier version, its reload failed: {reason}"


class FailedLoads:
    """The last load failure of each model, unless one of its versions has recorded it.

    A reason is kept until a load of the model succeeds, or fails in a version that records it. Used
    from the event loop only.
    """

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self._on_change = on_change
        self.reasons: dict[str, str] = {}
        """Reason by model, unfiltered; `reason` hides names that the caller may not see."""

    def note(self, model: str, reason: str) -> None:
        """Record why a load failed."""
        self.reasons.pop(model, None)
        while len(self.reasons) >= MOST_MODELS:
            del self.reasons[next(iter(self.reasons))]
        self.reasons[model] = reason
        self._on_change()

    def forget(self, model: str) -> None:
        """Forget a model's failure: it was loaded or removed, or a version now has the reason."""
        if self.reasons.pop(model, None) is not None:
            self._on_change()

    def reason(self, model: str) -> str:
        """Return the reason without names hidden from the current caller; empty if none."""
        reason = self.reasons.get(model, "")
        return reason and without_names(reason, seen_now())

    async def noting(self, model: str, load: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Load a model, and remember a failure that no version records. Raises as `load` does."""
        try:
            await load()
        except XlaserveError as error:
            if error.is_noted or isinstance(error, ModelNotFound):
                self.forget(model)
            elif isinstance(error, OF_THE_MODEL):
                self.note(model, str(error))
            raise
        except ENDS:
            raise
        except BaseException:
            self.note(model, INTERNAL)
            raise
        self.forget(model)
