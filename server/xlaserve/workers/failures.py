"""Errors on their way between processes of the server."""

from xlaserve.python_models.process.errors import named, raised
from xlaserve.workers.messages import Failure

_MOST = 2**63 - 1
"""The largest number that a record can have; infinity is none, nor is what is not a number."""
_OURS = "Exception", "BaseException"
"""Names of errors that are no fact of the server's: a fault of it."""


def failure_of(error: BaseException) -> Failure:
    """Return an error as a message has it."""
    kind, text = named(error)
    if kind in _OURS:
        text = f"{type(error).__name__}: {text}"
    return Failure(kind, sayable(text), _facts(error))


def _facts(error: BaseException) -> dict[str, str | int | float]:
    found: dict[str, str | int | float] = {}
    for name, value in vars(error).items():
        if isinstance(value, str):
            found[name] = sayable(value)
        elif isinstance(value, bool):
            continue  # What this process has done about it, as `is_noted`, others have not done.
        elif isinstance(value, int | float) and abs(value) <= _MOST:
            found[name] = value
    return found


def sayable(text: str) -> str:
    """Return a text that has a form as bytes: code that fails may say half of a surrogate pair."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def error_of(failure: Failure) -> Exception:
    """Return the error again; one that is no fact of the server's is a RuntimeError."""
    if failure.error in _OURS:
        return RuntimeError(failure.text)
    error = raised((failure.error, failure.text))
    vars(error).update(failure.facts)
    return error
