"""Errors of access control: authentication, permissions and quotas."""

import re

from xlaserve.errors import XlaserveError, repeatable

_HOST_NAME = re.compile(r"[0-9A-Za-z_.-]{1,80}")
HIDDEN = "(hidden from this caller)"
"""Replaces the name of a model or step that the caller may not see."""


class Unauthenticated(XlaserveError):
    """The caller is not authenticated. The text reveals nothing about the requested object."""

    def __init__(self) -> None:
        super().__init__("authentication required: send a known token (authorization: Bearer)")


class NotPermitted(XlaserveError):
    """The caller is authenticated but lacks the permission."""

    def __init__(self, principal: str, operation: str) -> None:
        super().__init__(
            f"caller '{repeatable(principal)}' may not {operation}: have the operator allow it "
            "(access_rules)"
        )


class Restricted(XlaserveError):
    """The request lacks a required secret header; the text is Triton's."""

    def __init__(self, what: str, header: str) -> None:
        super().__init__(f"This {what} is restricted, expecting header '{header}'")


class QuotaExceeded(XlaserveError):
    """The caller has exceeded its quota."""

    def __init__(self, principal: str, quota: str, retry_seconds: float) -> None:
        self.retry_seconds = retry_seconds
        """Time in seconds after which the caller may retry."""
        super().__init__(
            f"caller '{repeatable(principal)}' has {quota}, try again in {retry_seconds:.3g} s"
        )


class TooManyRequests(XlaserveError):
    """A queue is full, in protocols that distinguish this from an unavailable server."""

    retry_seconds = 1.0
    """Time in seconds after which to retry."""

    def __init__(self, error: XlaserveError) -> None:
        super().__init__(str(error))


class WrongHost(XlaserveError):
    """The Host header names another host, as in a DNS rebinding attack on a browser."""

    def __init__(self, got: str) -> None:
        name = got.partition(":")[0]
        setting = name if _HOST_NAME.fullmatch(name) else "NAME"
        super().__init__(
            f"unknown host '{repeatable(got[:80])}': start the server with --allowed-host"
            f" {setting}, or have its proxy send an allowed Host"
        )


class WrongOrigin(XlaserveError):
    """A cross-site request from the browser of an authorized user."""

    def __init__(self) -> None:
        super().__init__(
            "cross-origin requests are not allowed: start the server with --cors-origin"
        )
