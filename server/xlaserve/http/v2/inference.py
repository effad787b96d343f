"""The V2 protocol over HTTP: metadata and inference."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from xlaserve.http.calls import call_of
from xlaserve.http.events import EVENT_STREAM_TYPE, EventCall, events, refuse_binary, wants_events
from xlaserve.http.json.json_tensors import JsonRules
from xlaserve.http.messages import Begin, HttpRequest, HttpResponse, HttpStream, json_response
from xlaserve.http.parsing import parsed_bytes
from xlaserve.http.routing import BINARY_OR_JSON, Body, Header, Route
from xlaserve.http.threads import OffLoop
from xlaserve.http.v2.fast_infer import FastInfer, Target
from xlaserve.http.v2.health import STATUS_OF_READY, health_response
from xlaserve.http.v2.infer_request import read_header_length, read_infer_request
from xlaserve.http.v2.infer_response import (
    HEADER_LENGTH,
    most_json_bytes,
    output_bytes,
    write_infer_answer,
)
from xlaserve.http.v2.statistics import Statistics, config_json, statistics_json
from xlaserve.http.v2.v2_schemas import (
    InferenceRequest,
    InferenceResponse,
    ModelMetadata,
    ModelNames,
    ModelReady,
    ServerMetadata,
    TensorMetadata,
)
from xlaserve.net.ledger import Account
from xlaserve.residence.control import ModelControl
from xlaserve.residence.server import ServerDescription
from xlaserve.runtime.loaded import ModelInfo
from xlaserve.runtime.metadata_parameters import of_input, of_model, of_output
from xlaserve.serving.call import Api, Call, Headers, Operation, Peer
from xlaserve.serving.engine import Engine
from xlaserve.serving.gates import Gates
from xlaserve.serving.inference import InferRequest, InferResponse
from xlaserve.serving.made_arrays import made_bytes
from xlaserve.tensors import Kind, TensorSpec

_LENGTH = Header(HEADER_LENGTH, int, "Bytes of JSON before the binary tensors, if any.")
_EXAMPLE = {
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 16], "data": list(range(16))}]
}
"""Matches the example model `identity`."""

_READ_SLOWLY = frozenset({Kind.TEXT, Kind.BOOLEAN})
"""Datatype kinds whose binary tensors are decoded element by element."""

_TAG = "inference"
_BODY_ERRORS = (400, 408, 413, 501)


class InferenceRoutes:
    """The handlers of metadata and inference, without any decisions of their own."""

    def __init__(
        self,
        description: ServerDescription,
        engine: Engine,
        gates: Gates,
        control: ModelControl,
        threads: OffLoop,
        *,
        max_json_depth: int,
        json_rules: JsonRules,
        max_stream_bytes: int,
        health_bodies: bool = True,
    ) -> None:
        """Up to `max_stream_bytes` of unsent events are queued."""
        self._health_bodies = health_bodies
        self._max_stream_bytes = max_stream_bytes
        self._threads = threads
        self._description = description
        self._engine = engine
        self._gates = gates
        self._control = control
        self._max_json_depth = max_json_depth
        self._json_rules = json_rules

    def table(self) -> list[Route]:
        """Return the routes of these handlers."""
        rows = [
            Route(
                "GET",
                "/v2",
                Operation.METADATA,
                self.metadata,
                "Server metadata",
                "server",
                Body(ServerMetadata),
            ),
            Route(
                "GET",
                "/v2/models",
                Operation.METADATA,
                self.models,
                "Ready models",
                _TAG,
                Body(ModelNames),
            ),
            Route(
                "GET",
                "/v2/models/stats",
                Operation.METADATA,
                self.statistics,
                "Statistics of all models",
                _TAG,
                Body(Statistics),
                api=Api.STATISTICS,
            ),
        ]
        for model in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            rows += self._model_rows(model)
        return rows

    def _model_rows(self, model: str) -> list[Route]:
        # For a version that is not a number.
        bad_version = (400,) if "{version}" in model else ()
        return [
            Route(
                "GET",
                model,
                Operation.METADATA,
                self.model_metadata,
                "Model metadata",
                _TAG,
                Body(ModelMetadata),
                errors=(*bad_version, 404, 503),
            ),
            Route(
                "GET",
                f"{model}/ready",
                Operation.READINESS,
                self.model_ready,
                "Model ready",
                _TAG,
                Body(ModelReady),
                errors=(*bad_version, 404),
                other={400: "Not ready."},
            ),
            Route(
                "GET",
                f"{model}/config",
                Operation.METADATA,
                self.config,
                "Model configuration",
                _TAG,
                Body(dict[str, Any]),
                errors=(*bad_version, 404, 503),
                api=Api.MODEL_CONFIG,
            ),
            Route(
                "GET",
                f"{model}/stats",
                Operation.METADATA,
                self.statistics,
                "Statistics of a model",
                _TAG,
                Body(Statistics),
                errors=(*bad_version, 404, 503),
                api=Api.STATISTICS,
            ),
            Route(
                "POST",
                f"{model}/infer",
                Operation.INFER,
                self.infer,
                "Inference",
                _TAG,
                Body(InferenceResponse, (*BINARY_OR_JSON, EVENT_STREAM_TYPE), headers=(_LENGTH,)),
                takes=Body(InferenceRequest, BINARY_OR_JSON, headers=(_LENGTH,), example=_EXAMPLE),
                errors=(*_BODY_ERRORS, 404, 406, 503, 507),
                prepare=self.prepare,
                make_call=self.make_call,
            ),
        ]

    # --- Metadata ---

    async def metadata(self, request: HttpRequest) -> HttpResponse:
        """Return the server's name, version and extensions."""
        description = self._description
        extensions = [*description.extensions, *self._engine.regions.extensions]
        return json_response(ServerMetadata(description.name, description.version, extensions))

    async def models(self, request: HttpRequest) -> HttpResponse:
        """List the ready models."""
        rows = await self._control.of_all.index(ready=True)
        return json_response(ModelNames(sorted({row.name for row in rows})))

    async def model_ready(self, request: HttpRequest) -> HttpResponse:
        """Tell whether a model is ready; an unknown model is answered with 404."""
        name, version = _model(request)
        ready = await self._control.catalog.ready(name, version)
        content = ModelReady(name, ready)
        return health_response(content, STATUS_OF_READY[ready], bodies=self._health_bodies)

    async def model_metadata(self, request: HttpRequest) -> HttpResponse:
        """Return the ready versions, platform, tensors and parameters of a model."""
        name, version = _model(request)
        info, versions = self._control.catalog.describe(name, version)
        config = self._control.catalog.config(name, version).config
        return json_response(
            ModelMetadata(
                name,
                versions,
                info.platform,
                [_tensor_metadata(spec, of_input(config, info, spec.name)) for spec in info.inputs],
                [_tensor_metadata(spec, of_output(config, spec.name)) for spec in info.outputs],
                of_model(config, info),
            )
        )

    async def config(self, request: HttpRequest) -> HttpResponse:
        """Return the model configuration (model configuration extension)."""
        return json_response(config_json(self._control.catalog.config(*_model(request))))

    async def statistics(self, request: HttpRequest) -> HttpResponse:
        """Return counts and durations of one model or of all (statistics extension)."""
        name, version = request.names.get("model", ""), request.names.get("version", "")
        return json_response(statistics_json(await self._control.of_all.statistics(name, version)))

    # --- Inference ---

    async def infer(self, request: HttpRequest) -> HttpResponse | HttpStream:
        """Run one inference on JSON or binary tensors (binary tensor data extension)."""
        name, version = _model(request)
        with self._engine.require(name, version) as info:
            length = read_header_length(request.headers.get(HEADER_LENGTH))
            body = await request.read()
            depth = self._max_json_depth
            text = body if length is None else body[:length]
            request.grow(await parsed_bytes(self._threads, info, text), "the parsed body")
            read = partial(read_infer_request, info, name, version, body, length, max_depth=depth)
            size = _bytes_to_read(info, len(body), length)
            inference = await self._threads.run(size, read)
            if length is not None:
                request.grow(made_bytes(inference.inputs), "the tensors")
        if isinstance(request.call, EventCall):
            return self._infer_events(request.call, request, inference)
        response = await self._engine.infer(inference)
        return await self._write(inference, request.call.peer.account, response)

    async def _write(
        self,
        request: InferRequest,
        account: Account | None,
        response: InferResponse,
        *,
        is_counted: bool = False,
    ) -> HttpResponse:
        write = partial(write_infer_answer, request, response, self._json_rules)
        size, made = output_bytes(response), most_json_bytes(response, request, self._json_rules)
        return await self._threads.write(size, write, account, made, is_counted=is_counted)

    def _infer_events(
        self, call: EventCall, request: HttpRequest, inference: InferRequest
    ) -> HttpStream:
        """Send each response as an event; raises InvalidParameter for binary outputs."""
        refuse_binary(inference)
        call.grow = request.grow
        self._engine.begin(call, inference)
        path = f"/v2/models/{inference.model_name}/infer"
        # The call charges the tensors of queued responses.
        write = partial(self._write, inference, call.peer.account, is_counted=True)
        return HttpStream(EVENT_STREAM_TYPE, events(call, write, "POST", path))

    def make_call(self, names: Mapping[str, str], headers: Headers, peer: Peer) -> Call:
        """Create an inference call, answered by an event stream if the client accepts one."""
        if wants_events(headers):
            return EventCall(names, headers, peer, self._max_stream_bytes)
        return call_of(Operation.INFER, names, headers, peer)

    def prepare(self, request: HttpRequest) -> Begin | None:
        """Return the fast path for an inference with one response, or None for events.

        Raises InvalidBody for an invalid header length.
        """
        if isinstance(request.call, EventCall):
            return None
        length = read_header_length(request.headers.get(HEADER_LENGTH))
        fast = FastInfer(
            self._engine,
            self._gates,
            self._threads,
            max_json_depth=self._max_json_depth,
            json_rules=self._json_rules,
        )
        return partial(fast.begin, Target(*_model(request), length))


def _bytes_to_read(info: ModelInfo, size: int, json_size: int | None) -> int:
    """Return how many bytes of a body must be parsed: most binary tensors are views."""
    if json_size is None or any(spec.datatype.kind in _READ_SLOWLY for spec in info.inputs):
        return size
    return json_size


def _model(request: HttpRequest) -> tuple[str, str]:
    return request.names["model"], request.names.get("version", "")


def _tensor_metadata(spec: TensorSpec, parameters: dict[str, str]) -> TensorMetadata:
    return TensorMetadata(spec.name, spec.datatype.name, list(spec.shape), parameters)
