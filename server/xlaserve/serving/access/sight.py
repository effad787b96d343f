"""Model visibility: which models a call may see, and the errors for hidden ones.

The permission gate sets `Call.sight`. Every lookup of a client-supplied model name checks it first,
so that hidden and missing models cannot be told apart, neither by the answer nor by its timing.
"""

import re
from collections.abc import Callable, Iterable
from typing import TypeAlias

from xlaserve.errors.access import HIDDEN
from xlaserve.serving.call import Call, current_call

Sees: TypeAlias = Callable[[str], bool]
"""Tells whether a model is visible."""

NOT_IN_REPOSITORY = "is not in the model repository, failed to load it"
"""Detail of ModelNotFound for load requests."""


def everything(model: str) -> bool:
    """Return True for every model."""
    return True


def nothing(model: str) -> bool:
    """Return False for every model."""
    return False


def require_seen(
    call: Call | None, model: str, version: str = "", *, detail: str = "is not found"
) -> None:
    """Raise the error for a missing model if the model is hidden from the call.

    The error is StillStarting while models may still appear, else ModelNotFound. Raises
    NotPermitted if the caller may see the model but not perform this operation. Calls without a
    sight see all models.
    """
    if call is not None and call.sight is not None and not call.sight.permits(model):
        raise call.sight.absent(model, version, detail=detail)


def require_seen_now(model: str, version: str = "", *, detail: str = "is not found") -> None:
    """Like `require_seen`, for the current call."""
    require_seen(current_call.get(), model, version, detail=detail)


def require_all_seen() -> None:
    """Raise NotPermitted for a server-wide change by a caller limited to some models."""
    call = current_call.get()
    if call is not None and call.sight is not None:
        call.sight.refuse_server()


def step_now(model: str) -> str:
    """Return a step's quoted name, or a placeholder if it is hidden from the current caller."""
    return f"'{model}'" if seen_now()(model) else HIDDEN


_NAMED = re.compile(r"\b(?:models?:?|step|failed to load) '([^']*)'")
"""Matches model names in error texts."""
_FREE = re.compile(r" on [a-z]+:[0-9]+, where [0-9]+ of [0-9]+ are free")
"""Matches the free device memory in error texts, which depends on all models."""


def without_names(text: str, sees: Sees) -> str:
    """Return a text without the names of hidden models.

    The free device memory is removed too, because it depends on all models.
    """
    if sees is everything:
        return text
    text = _FREE.sub(", more than is free", text)
    if "'" not in text:
        return text
    for name in set(_NAMED.findall(text)):
        if not sees(name):
            text = text.replace(f"'{name}'", HIDDEN)
    return text


def without_hidden(call: Call, error: BaseException, models: Iterable[str]) -> BaseException:
    """Return an error of nested calls without the names of models hidden from the client.

    The class stays the same, and with it the status. `models` are the models of nested calls;
    further names are found by the text around them. Names that the client itself sent are kept.
    """
    root = call.root
    sight = root.sight
    if sight is None:
        return error
    shows, requested = sight.shows, (root.model, call.model)
    text = redacted = str(error)
    for model in models:
        if not shows(model):
            redacted = redacted.replace(f"'{model}'", HIDDEN)
    redacted = without_names(redacted, lambda name: name in requested or shows(name))
    if redacted == text:
        return error
    same = type(error).__new__(type(error))
    same.__dict__.update(error.__dict__)
    same.args = (redacted,)
    return same


def seen_now() -> Sees:
    """Return the model visibility of the current call."""
    call = current_call.get()
    return everything if call is None or call.sight is None else call.sight.shows
