"""Errors of Python models: exceptions, wrong outputs, dead processes."""

from collections.abc import Iterable

from xlaserve.errors import XlaserveError, repeatable


class ModelFailed(XlaserveError):
    """A model's code raised an exception or did not answer."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"model '{model}': {repeatable(reason)}")


class WrongOutput(ModelFailed):
    """A model's code returned an output that does not match its declaration."""

    def __init__(self, model: str, tensor: str, expected: str, got: str) -> None:
        place = f"output '{tensor}' of its code: " if tensor else "its code: "
        super().__init__(model, f"{place}expected {expected}, got {got}")


class MissingOutputs(ModelFailed):
    """A model's code returned an answer without some of its outputs."""

    def __init__(self, model: str, missing: Iterable[str], got: Iterable[str]) -> None:
        names = ", ".join(f"'{name}'" for name in missing)
        found = ", ".join(f"'{name}'" for name in got) or "none"
        super().__init__(model, f"expected its code to return output {names}, got {found}")


class Deadlock(ModelFailed):
    """Models that call each other are deadlocked: each waits for a replica of another."""

    def __init__(self, model: str, chain: Iterable[str]) -> None:
        super().__init__(
            model,
            f"deadlock: all its instances wait for nested calls ({' -> '.join(chain)}): raise its"
            " instance count (instance_group)",
        )


class ChangesItself(ModelFailed):
    """A model's code requested a load or unload that would wait for this code to finish."""

    def __init__(self, model: str, changed: str, *, is_load: bool) -> None:
        what = "load" if is_load else "unload"
        super().__init__(
            model,
            f"deadlock: its code cannot {what} '{changed}', because it would wait for itself: have"
            f" a client {what} it",
        )


class ProcessLost(ModelFailed):
    """A Python model's process was lost while it executed the request.

    The request may be the cause, so sending it again could crash another process.
    """

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(
            model,
            f"its process was lost while it executed this request, {reason}; it is being"
            " restarted, and the request may be the cause: see the log before you send it again",
        )


class ProcessAbsent(ModelFailed):
    """A Python model's process was lost before it started to execute the request."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(
            model,
            f"its process was lost before it began this request, {reason}; it is being restarted,"
            " try again",
        )


class RefusedByModel(ModelFailed):
    """A model's code reports an invalid request."""


class NotFoundByModel(ModelFailed):
    """A model's code reports that an object is missing; never used for the model itself."""


class ExistsForModel(ModelFailed):
    """A model's code reports that an object already exists."""


class UnavailableToModel(ModelFailed):
    """A model's code reports that a resource is temporarily unavailable."""


class UnsupportedByModel(ModelFailed):
    """A model's code reports an unsupported operation."""


class CancelledByModel(ModelFailed):
    """A model's code stopped because the request was cancelled."""


class UnknownToModel(ModelFailed):
    """A model's code reports an error without details."""
