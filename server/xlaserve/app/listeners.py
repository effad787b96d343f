"""Binds the listening sockets of the endpoints in the settings."""

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Protocol

from xlaserve.process.endpoints import (
    Endpoint,
    Listener,
    adopt,
    check_backlog,
    check_grpc_endpoints,
    listen,
)
from xlaserve.process.open_files import raise_open_files
from xlaserve.process.predecessor import SharedSocket
from xlaserve.process.systemd import Systemd
from xlaserve.settings import Settings

METRICS_ON_HTTP = "http"
"""The value of `metrics_endpoint` that means the HTTP endpoint."""


class Bound(Protocol):
    """The listeners of a server."""

    @property
    def grpc(self) -> Sequence[Listener]:
        """The gRPC listeners: none, one, or one more for inference only."""
        ...

    @property
    def http(self) -> Listener | None:
        """The HTTP listener, or None."""
        ...

    @property
    def metrics(self) -> Listener | None:
        """The listener for metrics, or None if there is no separate one."""
        ...


class Listeners:
    """Binds the listeners from the settings; `stack` closes them.

    Raises InvalidSettings if the server cannot listen on an endpoint.
    """

    def __init__(self, settings: Settings, systemd: Systemd, stack: ExitStack) -> None:
        self._settings = settings
        self._systemd = systemd
        grpc = {"grpc_endpoint": settings.grpc_endpoint}
        if settings.grpc_data_endpoint not in ("", settings.grpc_endpoint):
            grpc["grpc_data_endpoint"] = settings.grpc_data_endpoint
        endpoints = {name: Endpoint.parse(name, text) for name, text in grpc.items()}
        check_grpc_endpoints(endpoints, required=not settings.sagemaker)
        check_backlog(settings.listen_backlog)
        raise_open_files(settings)
        bound = [self._bind(name, endpoint, stack) for name, endpoint in endpoints.items()]
        self.grpc = [listener for listener in bound if listener]
        self.http = self._parse("http_endpoint", settings.http_endpoint, stack)
        text = settings.metrics_endpoint
        self.metrics = (
            None if text == METRICS_ON_HTTP else self._parse("metrics_endpoint", text, stack)
        )

    @property
    def every(self) -> Sequence[Listener]:
        """Return all listeners."""
        return [*self.grpc, *(one for one in (self.http, self.metrics) if one)]

    def _parse(self, setting: str, text: str, stack: ExitStack) -> Listener | None:
        return self._bind(setting, Endpoint.parse(setting, text), stack)

    def _bind(self, setting: str, endpoint: Endpoint | None, stack: ExitStack) -> Listener | None:
        if endpoint is None:
            return None
        settings = self._settings
        if handed := self._handed(setting, endpoint):
            stack.callback(handed.close)
            return handed
        listener = (
            adopt(setting, self._systemd.take_socket(setting, endpoint.name))
            if endpoint.name
            else listen(
                setting,
                endpoint,
                host=settings.host,
                unix_socket_mode=settings.socket_mode,
                backlog=settings.listen_backlog,
            )
        )
        assert isinstance(listener.socket, socket.socket)
        listener = _shared(listener, SharedSocket(listener.socket))
        stack.callback(listener.close)
        return listener

    def _handed(self, setting: str, endpoint: Endpoint) -> Listener | None:
        """Return the listener handed over by the process that this one replaces, or None."""
        predecessor = self._systemd.predecessor
        shared = None if predecessor is None else predecessor.socket_of(setting)
        if shared is None:
            return None
        listener = adopt(setting, shared.listening)
        file = endpoint.path.lstat() if endpoint.path and endpoint.path.exists() else None
        return _shared(replace(listener, file=file), shared)


def _shared(listener: Listener, shared: SharedSocket) -> Listener:
    return replace(listener, socket=shared, owns_file=lambda: shared.may_accept)
