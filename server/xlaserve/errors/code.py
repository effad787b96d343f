"""Errors of models that are code: exceptions, wrong outputs, dead processes."""

from collections.abc import Iterable

from xlaserve.errors import XlaserveError, repeatable


class ModelFailed(XlaserveError):
    """The code of a model raised an error, or ended otherwise than by an answer."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"model '{model}': {repeatable(reason)}")


class WrongOutput(ModelFailed):
    """The code of a model gave another output than its model promises."""

    def __init__(self, model: str, tensor: str, expected: str, got: str) -> None:
        place = f"output '{tensor}' of its code: " if tensor else "its code: "
        super().__init__(model, f"{place}expected {expected}, got {got}")


class MissingOutputs(ModelFailed):
    """The code of a model gave an answer without some of its outputs."""

    def __init__(self, model: str, missing: Iterable[str], got: Iterable[str]) -> None:
        names = ", ".join(f"'{name}'" for name in missing)
        found = ", ".join(f"'{name}'" for name in got) or "none"
        super().__init__(model, f"expected output {names} of its code, got {found}")


class Deadlock(ModelFailed):
    """Models that call each other are deadlocked: each waits for a replica of another."""

    def __init__(self, model: str, chain: Iterable[str]) -> None:
        super().__init__(
            model,
            f"deadlock: all its instances wait for nested calls ({' -> '.join(chain)}): raise its"
            " instance count (instance_group)",
        )


class ChangesItself(ModelFailed):
    """The code of a model asks for a load or unload that would wait for the code itself."""

    def __init__(self, model: str, changed: str, *, is_load: bool) -> None:
        what = "load" if is_load else "unload"
        super().__init__(
            model,
            f"deadlock: to {what} '{changed}' its code would wait for itself: have a client"
            f" {what} it",
        )


class ProcessLost(ModelFailed):
    """The process that the code of a model runs in was lost while it executed the request.

    The request may be why: to send it again could end another process.
    """

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(
            model,
            f"its process was lost while it executed this request, {reason}; it is being"
            " restarted, and the request may be the cause: see the log before you send it again",
        )


class ProcessAbsent(ModelFailed):
    """The process that the code of a model runs in was lost before it began with the request."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(
            model,
            f"its process was lost before it began this request, {reason}; it is being restarted,"
            " try again",
        )


class RefusedByModel(ModelFailed):
    """The code of a model says that the request is wrong."""


class NotFoundByModel(ModelFailed):
    """A model's code reports a missing object, never the model itself."""


class ExistsForModel(ModelFailed):
    """A model's code reports that an object already exists."""


class UnavailableToModel(ModelFailed):
    """The code of a model says that something cannot be had now; it may be later."""


class UnsupportedByModel(ModelFailed):
    """The code of a model says that it does not do that."""


class CancelledByModel(ModelFailed):
    """The code of a model stopped, since the request was cancelled."""


class UnknownToModel(ModelFailed):
    """A model's code reports an error without details."""
