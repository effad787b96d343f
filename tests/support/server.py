"""A whole server in the loop of a test."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from xlaserve.app import Application


@dataclass(frozen=True)
class RunningServer:
    """A server on a free loopback port."""

    application: Application
    url: str
    """Where gRPC is served."""
    http: str | None


Serve = Callable[..., AbstractAsyncContextManager[RunningServer]]
"""Runs a server on a repository for the length of a block; settings by keyword."""
