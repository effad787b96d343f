"""Reasons why a benchmark cannot start or continue."""

from xlaserve.errors import XlaserveError


class BenchmarkRefused(XlaserveError):
    """A benchmark that cannot be measured; the text says why."""


class ServerUnreachable(XlaserveError):
    """The server cannot be reached, or is no V2 server."""

    def __init__(self, url: str, problem: str) -> None:
        super().__init__(f"{url}: {problem}")
