"""Why models failed to load before a version was known, until a load succeeds."""

from collections.abc import Callable, Coroutine
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
"""Failures that say why a model does not answer. Any other is of the request that asked for the
load, such as a limit or a permission of its caller, and no reason for others to read."""

MOST_MODELS = 1000
"""Models whose failures are kept: clients choose names. The oldest go first."""
NOT_LOADED = "not loaded"
"""The reason of an unloaded model."""
INTERNAL = "internal error"
"""The reason of an internal failure, whose traceback is in the log."""
SHOWN = 10
"""Failures that a text about the whole server names."""

_WISHED = frozenset({"", NOT_LOADED, "unloaded"})
"""Reasons of models that are unloaded on request."""
_LASTING = frozenset({State.UNAVAILABLE.public, State.READY.public})
"""States whose reason is a load's outcome; in others it is the progress."""


def is_failure(state: str, reason: str) -> bool:
    """Tell whether a state and its reason, as the index shows them, are those of a failure."""
    return state in _LASTING and reason not in _WISHED


def of_reload(reason: str) -> str:
    """Return the reason of a version that answers although a later load failed."""
    return f"serves the earlier version, its reload failed: {reason}"


class FailedLoads:
    """The last failure of each model that no version has: of its configuration, or of a step.

    A reason stays until a load of the model succeeds, or fails in a version, which then has it.
    Of the event loop.
    """

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self._on_change = on_change
        self.reasons: dict[str, str] = {}
        """Reason by model; visibility is checked by `reason`."""

    def note(self, model: str, reason: str) -> None:
        """Keep the reason of a failure."""
        self.reasons.pop(model, None)
        while len(self.reasons) >= MOST_MODELS:
            del self.reasons[next(iter(self.reasons))]
        self.reasons[model] = reason
        self._on_change()

    def forget(self, model: str) -> None:
        """Forget a model: it was loaded, is gone, or a version has its own reason."""
        if self.reasons.pop(model, None) is not None:
            self._on_change()

    def reason(self, model: str) -> str:
        """Return the reason as the current caller may see it; empty for none."""
        reason = self.reasons.get(model, "")
        return reason and without_names(reason, seen_now())

    async def noting(self, model: str, load: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Load a model, and keep the reason of a failure without a version; raises like `load`."""
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
