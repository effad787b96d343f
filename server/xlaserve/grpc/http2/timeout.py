"""Parser of the `grpc-timeout` header (gRPC over HTTP/2, Timeout)."""

from typing import Final

TIMEOUT: Final = "grpc-timeout"
_SECONDS: Final = {b"H": 3600, b"M": 60, b"S": 1, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_MAX_TIMEOUT_DIGITS = 8


def read_timeout(value: bytes) -> float | None:
    """Parse a `grpc-timeout` (up to eight digits and a unit) to seconds; None if it is invalid."""
    digits, unit = value[:-1], _SECONDS.get(value[-1:])
    if unit is None or len(digits) > _MAX_TIMEOUT_DIGITS or not digits.isdigit():
        return None
    return int(digits) * unit
