"""`mmesh.ModelRuntime`: the service that ModelMesh's sidecar calls."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from xlaserve.errors import InvalidParameter, InvalidRequest
from xlaserve.grpc.protobuf.splice import InjectionPath
from xlaserve.residence.platforms.runtime import ModelRuntime, RuntimeLimits, RuntimeModel
from xlaserve.residence.repository.sources import Location
from xlaserve_proto import mmesh as pb
from xlaserve_proto.mmesh import RuntimeStatusResponseStatus as Status

_MAX_KEY_CHARACTERS = 64 << 10


class ModelRuntimeService(pb.ModelRuntimeBase):
    """Implements ModelMesh's SPI: status, load, unload and model sizes."""

    def __init__(
        self,
        runtime: ModelRuntime,
        *,
        version: str,
        paths: Mapping[str, InjectionPath],
        advertise_paths: bool,
    ) -> None:
        self._runtime = runtime
        self._version = version
        self._methods = {
            method.lstrip("/"): path.numbers if advertise_paths else ()
            for method, path in paths.items()
        }

    async def runtime_status(
        self, runtime_status_request: pb.RuntimeStatusRequest
    ) -> pb.RuntimeStatusResponse:
        """Return STARTING until the devices are ready, then READY with the runtime's limits.

        ModelMesh assumes that no model is loaded when it gets READY.
        """
        limits = await self._runtime.status()
        if limits is None:
            return pb.RuntimeStatusResponse(status=Status.STARTING)  # type: ignore[arg-type]
        return self._ready(limits)

    def _ready(self, limits: RuntimeLimits) -> pb.RuntimeStatusResponse:
        return pb.RuntimeStatusResponse(
            status=Status.READY,  # type: ignore[arg-type]
            capacity_in_bytes=limits.capacity_bytes,
            max_loading_concurrency=limits.loading_concurrency,
            model_loading_timeout_ms=limits.loading_timeout_ms,
            default_model_size_in_bytes=limits.default_size_bytes,
            runtime_version=self._version,
            method_infos={
                method: pb.RuntimeStatusResponseMethodInfo(id_injection_path=list(path))
                for method, path in self._methods.items()
            },
            limit_model_concurrency=limits.limit_concurrency,
            allow_any_method=False,
        )

    async def load_model(self, load_model_request: pb.LoadModelRequest) -> pb.LoadModelResponse:
        """Load a model, and return when its first request will not need compilation."""
        request = load_model_request
        _refuse_empty(request.model_id)
        loaded = await self._runtime.load(_model(request, read_model_key(request.model_key)))
        return pb.LoadModelResponse(
            size_in_bytes=loaded.size_bytes, max_concurrency=loaded.max_concurrency
        )

    async def unload_model(
        self, unload_model_request: pb.UnloadModelRequest
    ) -> pb.UnloadModelResponse:
        """Unload a model and free its memory."""
        await self._runtime.unload(unload_model_request.model_id)
        return pb.UnloadModelResponse()

    async def predict_model_size(
        self, predict_model_size_request: pb.PredictModelSizeRequest
    ) -> pb.PredictModelSizeResponse:
        """Predict a model's size within a fraction of a second; an invalid key is ignored."""
        request = predict_model_size_request
        try:
            key = read_model_key(request.model_key)
        except InvalidRequest:
            key = ModelKey()
        size = await self._runtime.predict_size_bytes(_model(request, key))
        return pb.PredictModelSizeResponse(size_in_bytes=size)

    async def model_size(self, model_size_request: pb.ModelSizeRequest) -> pb.ModelSizeResponse:
        """Return the size of a loaded model; raise NOT_FOUND if the id is unknown."""
        size = self._runtime.size_bytes(model_size_request.model_id)
        return pb.ModelSizeResponse(size_in_bytes=size)


@dataclass(frozen=True, slots=True)
class ModelKey:
    """The part of a model key that the server uses (ModelMesh SPI, loadModel)."""

    schema_path: str = ""
    disk_size_bytes: int = 0


def read_model_key(text: str) -> ModelKey:
    """Parse a model key, which is empty or a JSON object; unknown entries are ignored.

    `model_type` is ignored too: ModelMesh has used it to choose this runtime.
    Raises InvalidParameter if the key is too long or not a JSON object.
    """
    if not text.strip():
        return ModelKey()
    if len(text) > _MAX_KEY_CHARACTERS:
        raise InvalidParameter(
            "modelKey", f"at most {_MAX_KEY_CHARACTERS} characters", str(len(text))
        )
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidParameter("modelKey", "a JSON object", repr(text[:80])) from error
    if not isinstance(value, dict):
        raise InvalidParameter("modelKey", "a JSON object", repr(text[:80]))
    schema, size = value.get("schema_path"), value.get("disk_size_bytes")
    return ModelKey(
        schema_path=schema if isinstance(schema, str) else "",
        disk_size_bytes=size if type(size) is int and size > 0 else 0,
    )


def _model(
    request: "pb.LoadModelRequest | pb.PredictModelSizeRequest", key: ModelKey
) -> RuntimeModel:
    return RuntimeModel(
        id=request.model_id,
        location=Location(request.model_path, key.schema_path),
        key=request.model_key,
        disk_size_bytes=key.disk_size_bytes,
    )


def _refuse_empty(model_id: str) -> None:
    if not model_id:
        raise InvalidParameter("modelId", "the id of the model", "an empty string")
