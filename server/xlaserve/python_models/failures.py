"""Errors of the code of models, as the server tells its clients."""

import traceback
from collections.abc import Mapping
from types import MappingProxyType

import structlog

from xlaserve.errors import ModelNotFound, XlaserveError
from xlaserve.errors import code as code_errors
from xlaserve.errors.code import ModelFailed
from xlaserve.python_models.author import CODES, InferenceError

_OF_CODES: Mapping[str, type[ModelFailed]] = MappingProxyType(
    {
        "internal": code_errors.ModelFailed,
        "invalid_argument": code_errors.RefusedByModel,
        "not_found": code_errors.NotFoundByModel,
        "already_exists": code_errors.ExistsForModel,
        "unavailable": code_errors.UnavailableToModel,
        "unsupported": code_errors.UnsupportedByModel,
        "cancelled": code_errors.CancelledByModel,
        "unknown": code_errors.UnknownToModel,
    }
)
assert _OF_CODES.keys() == CODES


def told(model: str, code: str, text: str) -> ModelFailed:
    """Return the error for a code and a text of a model."""
    return _OF_CODES[code](model, text)


def failure(model: str, error: BaseException, doing: str = "infer") -> XlaserveError:
    """Return the error that clients are told for one that the code of a model raised.

    Its traceback is in the log, unless the code raised it for the client.
    """
    if isinstance(error, InferenceError):
        return told(model, error.code, str(error))
    if isinstance(error, ModelNotFound):
        # It is another model that is not there: a mesh must not believe that this one is gone.
        return code_errors.NotFoundByModel(model, str(error))
    if isinstance(error, XlaserveError):
        return error
    # The log takes a bounded piece: a recursion without end has a thousand lines.
    lines = "".join(traceback.format_exception(error, limit=-_SHOWN_FRAMES))
    _log.error("the code of a model raised", model=model, doing=doing, traceback=lines)
    return ModelFailed(model, described(error))


def described(error: BaseException) -> str:
    """Return the type and the text of an error in one line."""
    try:
        text = str(error)
    except BaseException:  # the code of the model has the last word on its own errors
        text = "(its text cannot be made)"
    name = type(error).__name__
    return f"{name}: {text}" if text else name


_SHOWN_FRAMES = 20
_log = structlog.get_logger("python")
