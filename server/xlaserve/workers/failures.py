"""Errors on their way between processes of the server."""

from xlaserve.errors import OutOfMemory
from xlaserve.python_models.process.errors import named, raised
from xlaserve.workers.messages import Failure

_OURS = "Exception", "BaseException"
"""Names of errors that are no fact of the server's: a fault of it."""


def failure_of(error: BaseException) -> Failure:
    """Return an error as a message has it."""
    kind, text = named(error)
    if kind in _OURS:
        text = f"{type(error).__name__}: {text}"
    return Failure(kind, sayable(text), getattr(error, "needed_bytes", 0))


def sayable(text: str) -> str:
    """Return a text that has a form as bytes: code that fails may say half of a surrogate pair."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def error_of(failure: Failure) -> Exception:
    """Return the error again; one that is no fact of the server's is a RuntimeError."""
    if failure.error in _OURS:
        return RuntimeError(failure.text)
    error = raised((failure.error, failure.text))
    if isinstance(error, OutOfMemory):
        error.needed_bytes = failure.needed_bytes
    return error
