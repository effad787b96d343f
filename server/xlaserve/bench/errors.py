"""Reasons why a benchmark cannot start or continue."""

from xlaserve.errors import XlaserveError


class BenchmarkRefused(XlaserveError):
    """The benchmark cannot be run; the message says why."""


class ServerUnreachable(XlaserveError):
    """The server cannot be reached, or is not a V2 server."""

    def __init__(self, url: str, problem: str) -> None:
        super().__init__(f"{url}: {problem}")
