"""`serve`: a server with a client, within a block.

The server runs in a child process like `xlaserve serve`, not in a thread. It has its own JAX
configuration, log, signals and GIL, and a crash of one process does not affect the other. This also
works below a running event loop (a notebook, an asynchronous test). The cost is another start of
Python and JAX, about two seconds, and separate GPU memory: JAX in the calling process takes 75 % of
it unless XLA_PYTHON_CLIENT_PREALLOCATE=false is set before.
"""

import asyncio
import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xlaserve.client import AsyncClient, Client
from xlaserve.errors import InvalidRequest
from xlaserve.local.exported import ExportedFunction, exportable, name_of
from xlaserve.local.process import NotServing, ServerProcess, Started
from xlaserve.residence.failed_loads import is_failure
from xlaserve.settings import Settings

if TYPE_CHECKING:
    from xlaserve.authoring.declared import Inputs
    from xlaserve.authoring.export import Exportable

START_SECONDS = 300.0
_CLIENT_SECONDS = 120.0
"""Client timeout in seconds; the first call with a shape may compile."""


def serve(
    source: "Path | str | Callable[..., object] | Exportable",
    *,
    params: object = None,
    inputs: "Inputs | None" = None,
    outputs: Sequence[str] | None = None,
    max_batch_size: int | None = None,
    name: str = "",
    port: int = 0,
    http_port: int = 0,
    start_seconds: float = START_SECONDS,
    **settings: Any,
) -> "Serving":
    """Serve a model repository or a function on this machine, within a block.

        with xlaserve.serve("models") as server:
            server.client.infer("digits", {"image": image})

    `async with` returns a server with an asynchronous client. A notebook that uses a server in
    several cells calls `server = xlaserve.serve("models").start()`, and finally `server.stop()`;
    otherwise the server stops when Python exits.

    `source` is a model repository (a directory), or a function as for `export_model`: `params` is
    its first argument, `inputs` describes the others by name with datatype and shape, `outputs`
    names its results unless it returns a dict, and `max_batch_size` limits the rows of a request.
    An Exportable contains all of these, and more. The function is exported to a temporary
    repository, under the model name `name` or its own name; `server.update(params=...)` replaces
    its parameters.

    `port` is the gRPC port, `http_port` that of REST and the web page; 0 selects a free port.
    `settings` are described in docs/settings.md: `device="cpu"`, `model_control_mode="poll"`. By
    default every model is loaded, and clients may load and unload models.

    Entering the block raises NotServing, with the reason, if the server does not start within
    `start_seconds` or a model fails to load (unless `exit_on_error=False`); InvalidModel for a
    function that cannot be exported; and InvalidRequest for an unknown setting. The server runs in
    a child process (see xlaserve.local.servers), which has ended when the block exits.
    """
    if isinstance(source, Path | str):
        given = {"params": params, "inputs": inputs, "outputs": outputs, "name": name or None}
        given["max_batch_size"] = max_batch_size
        if unused := [key for key, value in given.items() if value is not None]:
            raise InvalidRequest(
                f"serve: {', '.join(unused)}: only for functions, got the directory '{source}',"
                " whose models have their own"
            )
        function = None
    else:
        model = exportable(source, params, inputs, outputs, max_batch_size)
        function = lambda: ExportedFunction(model, name or name_of(source))  # noqa: E731
    may_fail = str(settings.pop("exit_on_error", True)).lower() == "false"
    values = _values(settings, port, http_port)
    directory = None if function is not None else str(source)
    return Serving(directory, function, values, start_seconds, may_fail=may_fail)


def _values(settings: Mapping[str, Any], port: int, http_port: int) -> dict[str, Any]:
    """Return the server's settings as strings; raises InvalidRequest for an invalid value."""
    known = {field.name for field in fields(Settings)} - {"repository"}
    for setting in settings:
        if setting not in known:
            near = difflib.get_close_matches(setting, known, n=1, cutoff=0.7)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise InvalidRequest(f"serve: '{setting}' is not a setting{hint} (docs/settings.md)")
    if settings.get("processes", 1) not in (1, "1"):
        raise InvalidRequest("serve: processes: expected 1; start `xlaserve serve` for more")
    endpoints = {"grpc_endpoint": f"port:{port}", "http_endpoint": f"port:{http_port}"}
    control = {"model_control_mode": "explicit", "load_model": ["*"]}
    if "model_control_mode" in settings or "modelmesh" in settings:
        control = {}
    return {name: _text(value) for name, value in {**endpoints, **control, **settings}.items()}


def _text(value: object) -> str | list[str]:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return [str(one) for one in value]
    return str(value)


class Serving:
    """The result of `serve`: a context manager, also an asynchronous one, for a server."""

    def __init__(
        self,
        directory: str | None,
        function: Callable[[], ExportedFunction] | None,
        settings: Mapping[str, Any],
        start_seconds: float,
        *,
        may_fail: bool,
    ) -> None:
        """`may_fail` permits models that fail to load."""
        self._may_fail = may_fail
        self._directory = directory
        self._function = function
        self._settings = dict(settings)
        self._start_seconds = start_seconds
        self._server: Server | AsyncServer | None = None

    def start(self) -> "Server":
        """Start the server and return it; `stop` ends it. Raises like entering the block."""
        running = self._started()
        try:
            self._server = Server(running)
        except BaseException:
            running.close()
            raise
        return self._server

    def __enter__(self) -> "Server":
        return self.start()

    def __exit__(self, *raised: object) -> None:
        assert isinstance(self._server, Server)
        self._server.stop()

    async def __aenter__(self) -> "AsyncServer":
        running = await asyncio.to_thread(self._started)
        try:
            self._server = server = AsyncServer(running)
            await server.client.__aenter__()
        except BaseException:
            await asyncio.to_thread(running.close)
            raise
        return server

    async def __aexit__(self, *raised: object) -> None:
        assert isinstance(self._server, AsyncServer)
        await self._server.stop()

    def _started(self) -> "Running":
        function = None if self._function is None else self._function()
        try:
            directory = self._directory if function is None else str(function.repository)
            process = ServerProcess(self._settings | {"repository": directory})
            try:
                started = process.started(self._start_seconds)
                if not self._may_fail:
                    _check(started)
            except BaseException:
                process.close()
                raise
        except BaseException:
            if function is not None:
                function.remove()
            raise
        return Running(process, started, function)


def _check(started: Started) -> None:
    """Raise NotServing with the reasons if any model failed to load."""
    failed = [row for row in started.models if is_failure(row.state, row.reason)]
    if failed:
        reasons = "; ".join(row.reason for row in failed)
        raise NotServing(f"{reasons} (serve the others with exit_on_error=False)")


class Running:
    """A server process, and the exported function that it serves, if any."""

    def __init__(
        self, process: ServerProcess, started: Started, function: ExportedFunction | None
    ) -> None:
        self.process = process
        self.started = started
        self.function = function

    def written(self, params: object) -> tuple[ExportedFunction, Path]:
        """Write another version; raises InvalidRequest if the server serves a directory."""
        if self.function is None:
            raise InvalidRequest(
                "update: this server serves a directory, not a function: export to the directory,"
                " then call client.load(NAME)"
            )
        return self.function, self.function.write(params)

    def close(self) -> None:
        """Stop the process, and remove temporary files."""
        self.process.close()
        if self.function is not None:
            self.function.remove()


class _Addresses:
    """The addresses and log of a server."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self.url = running.started.grpc
        """gRPC address as `host:port`."""
        self.http = f"http://{running.started.http}" if running.started.http else ""
        """URL of REST and the web page; empty if HTTP is off."""

    @property
    def log(self) -> str:
        """Return the server's log so far: lines of JSON."""
        return self._running.process.log

    def __repr__(self) -> str:
        models = sorted({row.name for row in self._running.started.models})
        return f"<xlaserve server at {self.url}, {self.http}: {', '.join(models)}>"


class Server(_Addresses):
    """A running server with a blocking client, as returned by `xlaserve.serve`."""

    def __init__(self, running: Running) -> None:
        super().__init__(running)
        self.client = Client(self.url, timeout=_CLIENT_SECONDS).__enter__()
        """A gRPC client. Thread-safe."""
        self._is_stopped = False

    def update(self, params: object) -> None:
        """Replace the parameters of the function that is being served.

        Returns once the new parameters answer requests. The old ones answer until then, and remain
        if this fails. Raises InvalidModel if the parameters do not fit the function, and CallFailed
        if the server fails to load them.
        """
        function, version = self._running.written(params)
        try:
            self.client.load(function.name)
        except BaseException:
            function.drop(version)
            raise
        function.keep(version)

    def stop(self) -> None:
        """Drain and stop the server. Idempotent."""
        if self._is_stopped:
            return
        self._is_stopped = True
        try:
            self.client.__exit__(None, None, None)
        finally:
            self._running.close()


class AsyncServer(_Addresses):
    """A running server with an asynchronous client, for `async with xlaserve.serve`."""

    def __init__(self, running: Running) -> None:
        super().__init__(running)
        self.client = AsyncClient(self.url, timeout=_CLIENT_SECONDS)
        """A gRPC client on the event loop of the block."""
        self._is_stopped = False

    async def update(self, params: object) -> None:
        """Like `Server.update`."""
        function, version = await asyncio.to_thread(self._running.written, params)
        try:
            await self.client.load(function.name)
        except BaseException:
            function.drop(version)
            raise
        await asyncio.to_thread(function.keep, version)

    async def stop(self) -> None:
        """Drain and stop the server. Idempotent."""
        if self._is_stopped:
            return
        self._is_stopped = True
        try:
            await self.client.__aexit__(None, None, None)
        finally:
            await asyncio.to_thread(self._running.close)
