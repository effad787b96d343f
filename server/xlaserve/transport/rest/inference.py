"""The V2 protocol over HTTP: health, metadata, and inference."""

from collections.abc import Mapping
from functools import partial
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

import msgspec

from xlaserve.core.residence.control import ModelControl
from xlaserve.core.server import ServerDescription
from xlaserve.core.serving.call import Operation
from xlaserve.core.serving.engine import Engine
from xlaserve.core.serving.gates import Gates
from xlaserve.tensors import TensorSpec
from xlaserve.transport.rest.infer_lane import Asked, InferLane
from xlaserve.transport.rest.infer_request import read_header_length, read_infer_request
from xlaserve.transport.rest.infer_response import (
    HEADER_LENGTH,
    output_bytes,
    write_infer_answer,
)
from xlaserve.transport.rest.messages import (
    Begin,
    HttpRequest,
    HttpResponse,
    json_response,
)
from xlaserve.transport.rest.parsing import parsed_bytes
from xlaserve.transport.rest.routing import BINARY_OR_JSON, Body, Header, Route
from xlaserve.transport.rest.statistics import Statistics, config_json, statistics_json
from xlaserve.transport.rest.threads import OffLoop

_LENGTH = Header(HEADER_LENGTH, int, "Bytes of JSON in front of binary tensors, where some follow.")
_EXAMPLE = {
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 16], "data": list(range(16))}]
}
"""For the model `identity` of the examples."""

_TAG = "inference"
_BODY_ERRORS = (400, 408, 413, 501)


class Live(msgspec.Struct):
    """Whether the server is live."""

    live: bool


class Ready(msgspec.Struct):
    """Whether the server is ready."""

    ready: bool


class ModelReady(msgspec.Struct):
    """Whether a model answers."""

    name: str
    ready: bool


class ServerMetadata(msgspec.Struct):
    """Name, version and extensions of the server."""

    name: str
    version: str
    extensions: list[str]


class ModelNames(msgspec.Struct):
    """The models that answer."""

    models: list[str]


class TensorMetadata(msgspec.Struct):
    """One input or output of a model; -1 where any size is accepted."""

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(msgspec.Struct):
    """What a model is, and the versions that answer."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class RequestInput(msgspec.Struct, omit_defaults=True):
    """One input tensor; its elements are in `data`, or behind the JSON."""

    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Any] = {}
    data: list[Any] = []


class RequestOutput(msgspec.Struct, omit_defaults=True):
    """One output that is asked for."""

    name: str
    parameters: dict[str, Any] = {}


class InferenceRequest(msgspec.Struct, omit_defaults=True):
    """An inference."""

    inputs: list[RequestInput]
    id: str = ""
    parameters: dict[str, Any] = {}
    outputs: list[RequestOutput] = []


class ResponseOutput(msgspec.Struct, omit_defaults=True):
    """One output tensor; its elements are in `data`, or behind the JSON."""

    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, Any] = {}
    data: list[Any] = []


class InferenceResponse(msgspec.Struct, omit_defaults=True):
    """What answers an inference."""

    model_name: str
    model_version: str
    outputs: list[ResponseOutput]
    id: str = ""


class InferenceRoutes:
    """The handlers of the V2 protocol; each decides nothing."""

    def __init__(
        self,
        description: ServerDescription,
        engine: Engine,
        gates: Gates,
        control: ModelControl,
        threads: OffLoop,
        *,
        max_json_depth: int,
        strict_json: bool,
    ) -> None:
        self._threads = threads
        self._description = description
        self._engine = engine
        self._gates = gates
        self._control = control
        self._max_json_depth = max_json_depth
        self._strict_json = strict_json

    def table(self) -> list[Route]:
        """Return the rows of these handlers."""
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
                "/v2/health/live",
                Operation.HEALTH,
                self.live,
                "Server live",
                "server",
                Body(Live),
            ),
            Route(
                "GET",
                "/v2/health/ready",
                Operation.HEALTH,
                self.ready,
                "Server ready",
                "server",
                Body(Ready),
                other={400: "Not ready."},
            ),
            Route(
                "GET",
                "/v2/models",
                Operation.METADATA,
                self.models,
                "Models that answer",
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
            ),
        ]
        for model in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            rows += self._model_rows(model)
        return rows

    def _model_rows(self, model: str) -> list[Route]:
        # A version that is no number.
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
                Operation.HEALTH,
                self.model_ready,
                "Model ready",
                _TAG,
                Body(ModelReady),
                errors=(404,),
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
            ),
            Route(
                "POST",
                f"{model}/infer",
                Operation.INFER,
                self.infer,
                "Inference",
                _TAG,
                Body(InferenceResponse, BINARY_OR_JSON, headers=(_LENGTH,)),
                takes=Body(InferenceRequest, BINARY_OR_JSON, headers=(_LENGTH,), example=_EXAMPLE),
                errors=(*_BODY_ERRORS, 404, 406, 503, 507),
                prepare=self.prepare,
            ),
        ]

    # --- health and metadata ---

    async def live(self, request: HttpRequest) -> HttpResponse:
        """Answer true: who answers is live."""
        return json_response(Live(live=True))

    async def ready(self, request: HttpRequest) -> HttpResponse:
        """Tell whether the start is over, as the readiness setting defines it."""
        ready = self._control.server_ready
        return json_response(Ready(ready), _STATUS_OF_READY[ready])

    async def metadata(self, request: HttpRequest) -> HttpResponse:
        """Return name, version and extensions."""
        description = self._description
        return json_response(
            ServerMetadata(description.name, description.version, list(description.extensions))
        )

    async def models(self, request: HttpRequest) -> HttpResponse:
        """List the models that answer."""
        rows = await self._control.index(ready=True)
        return json_response(ModelNames(sorted({row.name for row in rows})))

    async def model_ready(self, request: HttpRequest) -> HttpResponse:
        """Tell whether a model answers; an unknown one is 404."""
        name, version = _model(request)
        ready = await self._control.ready(name, version)
        return json_response(ModelReady(name, ready), _STATUS_OF_READY[ready])

    async def model_metadata(self, request: HttpRequest) -> HttpResponse:
        """Return the versions that answer, the platform, and the tensors with their shapes."""
        name, version = _model(request)
        info, versions = self._control.describe(name, version)
        return json_response(
            ModelMetadata(
                name,
                versions,
                info.platform,
                [_tensor_metadata(spec) for spec in info.inputs],
                [_tensor_metadata(spec) for spec in info.outputs],
            )
        )

    async def config(self, request: HttpRequest) -> HttpResponse:
        """Return the configuration (model configuration extension)."""
        return json_response(config_json(self._control.config(*_model(request))))

    async def statistics(self, request: HttpRequest) -> HttpResponse:
        """Return counts and durations of a model, or of all (statistics extension)."""
        name, version = request.names.get("model", ""), request.names.get("version", "")
        return json_response(statistics_json(self._control.statistics(name, version)))

    # --- inference ---

    async def infer(self, request: HttpRequest) -> HttpResponse:
        """Run one inference on JSON or binary tensors (binary tensor data extension)."""
        name, version = _model(request)
        with self._engine.require(name, version):
            info = self._engine.info(name, version)
            length = read_header_length(request.headers.get(HEADER_LENGTH))
            body = await request.read()
            depth = self._max_json_depth
            text = body if length is None else body[:length]
            request.grow(await parsed_bytes(self._threads, info, text), "the parsed body")
            read = partial(read_infer_request, info, name, version, body, length, max_depth=depth)
            inference = await self._threads.run(len(body) if length is None else length, read)
        response = await self._engine.infer(inference)
        write = partial(write_infer_answer, inference, response, strict=self._strict_json)
        return await self._threads.run(output_bytes(response), write)

    def prepare(self, request: HttpRequest) -> Begin:
        """Return the fast path of a model; raises InvalidBody for a length that is none."""
        length = read_header_length(request.headers.get(HEADER_LENGTH))
        lane = InferLane(
            self._engine,
            self._gates,
            self._threads,
            max_json_depth=self._max_json_depth,
            strict_json=self._strict_json,
        )
        return partial(lane.begin, Asked(*_model(request), length))


def _model(request: HttpRequest) -> tuple[str, str]:
    return request.names["model"], request.names.get("version", "")


_STATUS_OF_READY: Mapping[bool, HTTPStatus] = MappingProxyType(
    {True: HTTPStatus.OK, False: HTTPStatus.BAD_REQUEST}
)
"""Who is not ready answers 4xx (KServe compatible RESTful API, Server Ready and Model Ready)."""


def _tensor_metadata(spec: TensorSpec) -> TensorMetadata:
    return TensorMetadata(spec.name, spec.datatype.name, list(spec.shape))
