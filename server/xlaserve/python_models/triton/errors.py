"""`pb_utils.TritonError` and `pb_utils.TritonModelException`."""

from collections.abc import Mapping
from types import MappingProxyType

_NAMES = (
    *("unknown", "internal", "not_found", "invalid_argument"),
    *("unavailable", "unsupported", "already_exists", "cancelled"),
)
CODES: Mapping[int, str] = MappingProxyType(dict(enumerate(_NAMES)))
"""Our error codes by Triton's numbers."""


class TritonError:
    """The error of a response."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        if code not in CODES:
            raise ValueError(f"code: expected one of TritonError, got {code!r}")
        self._message = str(message)
        self._code = code

    def message(self) -> str:
        """Return the text."""
        return self._message

    def code(self) -> int:
        """Return Triton's number for the error code."""
        return self._code


class TritonModelException(Exception):
    """An exception for model code to raise; its text is sent to the client."""
