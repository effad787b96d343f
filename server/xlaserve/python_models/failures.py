"""Converts exceptions of model code into errors for clients."""

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


def failure_of_code(model: str, code: str, text: str) -> ModelFailed:
    """Return the error for an error code and a text that a model has given."""
    return _OF_CODES[code](model, text)


def failure(model: str, error: BaseException, doing: str = "infer") -> XlaserveError:
    """Return the client's error for an exception that the model's code raised.

    The traceback is logged, except for an error that the code raised for the client.
    """
    if isinstance(error, InferenceError):
        return failure_of_code(model, error.code, str(error))
    if isinstance(error, ModelNotFound):
        # A called model is missing: ModelMesh must not conclude that this one is.
        return code_errors.NotFoundByModel(model, str(error))
    if isinstance(error, XlaserveError):
        return error
    # Limit the frames: infinite recursion has a thousand of them.
    lines = "".join(traceback.format_exception(error, limit=-_SHOWN_FRAMES))
    _log.error("exception in model code", model=model, doing=doing, traceback=lines)
    return ModelFailed(model, described(error))


def described(error: BaseException) -> str:
    """Return an exception's type and text on one line."""
    try:
        text = str(error)
    except BaseException:  # the exception class is the model's: its `__str__` may raise
        text = "(its text cannot be shown)"
    name = type(error).__name__
    return f"{name}: {text}" if text else name


_SHOWN_FRAMES = 20
_log = structlog.get_logger("python")
