"""Converts exceptions to messages between the server's processes, and back."""

from xlaserve.python_models.process.errors import named, raised
from xlaserve.workers.messages import Failure

_MOST = 2**63 - 1
"""The largest integer that a record can hold. Infinity and NaN are excluded too."""
_OURS = "Exception", "BaseException"
"""Names used for unexpected exceptions, which are faults of the server."""


def failure_of(error: BaseException) -> Failure:
    """Convert an exception to a message."""
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
            continue  # flags such as `is_noted` apply to this process only
        elif isinstance(value, int | float) and abs(value) <= _MOST:
            found[name] = value
    return found


def sayable(text: str) -> str:
    """Escape characters that cannot be encoded, such as half of a surrogate pair."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def error_of(failure: Failure) -> Exception:
    """Convert a message back to an exception; unexpected ones become RuntimeError."""
    if failure.error in _OURS:
        return RuntimeError(failure.text)
    error = raised((failure.error, failure.text))
    vars(error).update(failure.facts)
    return error
