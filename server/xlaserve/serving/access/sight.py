"""Model visibility: the models that a call may see, and the error for others.

The permission gate gives a call its sight. Whatever looks up a model by a name that a client chose
asks here first, so that a model out of sight is answered as one that is not there: before anything
is looked up that would tell the two apart, in bytes or in time.
"""

import re
from collections.abc import Callable, Iterable
from typing import TypeAlias

from xlaserve.errors.access import HIDDEN
from xlaserve.serving.call import Call, current_call

Sees: TypeAlias = Callable[[str], bool]
"""Tells whether a model is visible."""

NOT_IN_REPOSITORY = "is not in the model repository, failed to load it"
"""Detail of ModelNotFound for a load."""


def everything(model: str) -> bool:
    """See every model."""
    return True


def nothing(model: str) -> bool:
    """See no model."""
    return False


def require_seen(
    call: Call | None, model: str, version: str = "", *, detail: str = "is not found"
) -> None:
    """Raise the error of a missing model, for one hidden from a call.

    A call of nobody sees all. While models may still come, that is StillStarting, else
    ModelNotFound.
    Raises NotPermitted where its caller sees the model, and may not do this with it.
    """
    if call is not None and call.sight is not None and not call.sight.permits(model):
        raise call.sight.absent(model, version, detail=detail)


def require_seen_now(model: str, version: str = "", *, detail: str = "is not found") -> None:
    """Like `require_seen`, for the current call."""
    require_seen(current_call.get(), model, version, detail=detail)


def require_all_seen() -> None:
    """Raise NotPermitted for a caller of some models that changes something of the whole server."""
    call = current_call.get()
    if call is not None and call.sight is not None:
        call.sight.refuse_server()


def step_now(model: str) -> str:
    """Return the name of a step for the current caller, without a hidden name."""
    return f"'{model}'" if seen_now()(model) else HIDDEN


_NAMED = re.compile(r"\b(?:models?:?|step|failed to load) '([^']*)'")
"""The places of texts that name a model."""
_FREE = re.compile(r" on [a-z]+:[0-9]+, where [0-9]+ of [0-9]+ are free")
"""What a text tells of a device, that is of all models together."""


def without_names(text: str, sees: Sees) -> str:
    """Return a text that was made for anybody, without names of models that may not be seen.

    Nor how much memory all models together leave.
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
    """Return an error of parts of a call, without names of models that its client may not see.

    It is of the same class, so that its status stays. `models` are parts of the call; others that
    the text names, such as parts of those, are known by their places in it. The model that the
    client asked for it has named itself.
    """
    root = call.root
    sight = root.sight
    if sight is None:
        return error
    shows, asked = sight.shows, (root.model, call.model)
    text = told = str(error)
    for model in models:
        if not shows(model):
            told = told.replace(f"'{model}'", HIDDEN)
    told = without_names(told, lambda name: name in asked or shows(name))
    if told == text:
        return error
    same = type(error).__new__(type(error))
    same.__dict__.update(error.__dict__)
    same.args = (told,)
    return same


def seen_now() -> Sees:
    """Return the model visibility of the current call."""
    call = current_call.get()
    return everything if call is None or call.sight is None else call.sight.shows
