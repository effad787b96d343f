"""The trace and logging extensions over HTTP, for settings that can change at run time."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

from xlaserve.concurrency.control_plane import ControlPlane
from xlaserve.http.messages import HttpRequest, HttpResponse, json_response
from xlaserve.http.parsing import read_whole
from xlaserve.http.routing import Body, Route
from xlaserve.http.threads import OffLoop
from xlaserve.residence.log_settings import change_log_settings, log_settings
from xlaserve.serving.call import Api, Operation
from xlaserve.serving.engine import Engine
from xlaserve.serving.observability.tracing import Tracing

_TAG = "settings"
_TRACES = ("/v2/trace/setting", "/v2/models/{model}/trace/setting")

_TraceValue: TypeAlias = str | int | list[str] | None
_LogValue: TypeAlias = bool | int | str | None


class TraceSettings(msgspec.Struct):
    """The trace settings; every value is a string, and the level a list of strings."""

    trace_level: list[str] = []
    trace_rate: str = ""
    trace_count: str = ""
    log_frequency: str = ""
    trace_file: str = ""
    trace_mode: str = ""


class LogSettings(msgspec.Struct):
    """Log levels and format."""

    log_file: str = ""
    log_info: bool = True
    log_warning: bool = True
    log_error: bool = True
    log_verbose_level: int = 0
    log_format: str = ""


class RuntimeSettingsRoutes:
    """The handlers of the trace and logging extensions."""

    def __init__(
        self,
        plane: ControlPlane,
        tracing: Tracing,
        engine: Engine,
        threads: OffLoop,
        *,
        max_json_depth: int,
    ) -> None:
        self._plane = plane
        self._tracing = tracing
        self._engine = engine
        self._threads = threads
        self._max_json_depth = max_json_depth

    def table(self) -> list[Route]:
        """Return the routes of these handlers."""
        rows = [
            Route(
                "GET",
                "/v2/logging",
                Operation.METADATA,
                self.log,
                "Log settings",
                _TAG,
                Body(LogSettings),
                api=Api.LOGGING,
            ),
            Route(
                "POST",
                "/v2/logging",
                Operation.MANAGE,
                self.change_log,
                "Change log settings",
                _TAG,
                Body(LogSettings),
                takes=Body(dict[str, Any], required=False, example={"log_verbose_level": 1}),
                errors=(400, 403, 408, 413, 501, 503),
                api=Api.LOGGING,
            ),
        ]
        for path in _TRACES:
            of_model: Sequence[int] = (404, 503) if "{model}" in path else ()
            rows += [
                Route(
                    "GET",
                    path,
                    Operation.METADATA,
                    self.trace,
                    "Trace settings",
                    _TAG,
                    Body(TraceSettings),
                    errors=tuple(of_model),
                    api=Api.TRACE,
                ),
                Route(
                    "POST",
                    path,
                    Operation.MANAGE,
                    self.change_trace,
                    "Change trace settings",
                    _TAG,
                    Body(TraceSettings),
                    takes=Body(dict[str, Any], required=False, example={"trace_rate": "100"}),
                    errors=tuple(dict.fromkeys((400, 403, 408, 413, 501, 503, *of_model))),
                    api=Api.TRACE,
                ),
            ]
        return rows

    async def log(self, request: HttpRequest) -> HttpResponse:
        """Return the log settings."""
        return json_response(log_settings())

    async def change_log(self, request: HttpRequest) -> HttpResponse:
        """Change log settings and return all of them; null leaves a setting unchanged."""
        body: dict[str, _LogValue] = await self._read(request, dict[str, _LogValue])
        change = {name: value for name, value in body.items() if value is not None}
        if change:
            await change_log_settings(self._plane, change)
        return json_response(log_settings())

    async def trace(self, request: HttpRequest) -> HttpResponse:
        """Return the trace settings of one model or of all."""
        return json_response(self._tracing.texts(self._model(request)))

    async def change_trace(self, request: HttpRequest) -> HttpResponse:
        """Change trace settings and return all of them; null resets a setting."""
        model = self._model(request)
        body: dict[str, _TraceValue] = await self._read(request, dict[str, _TraceValue])
        if body:
            listed = {
                name: [str(value)] if isinstance(value, str | int) else value
                for name, value in body.items()
            }
            await self._tracing.change(model, listed)
        return json_response(self._tracing.texts(model))

    def _model(self, request: HttpRequest) -> str:
        """Return the model named in the path, if any; raises ModelNotFound or ModelNotReady."""
        name = request.names.get("model", "")
        if name:
            self._engine.info(name)
        return name

    async def _read(self, request: HttpRequest, kind: Any) -> Any:
        return await read_whole(self._threads, request, kind, max_depth=self._max_json_depth)
