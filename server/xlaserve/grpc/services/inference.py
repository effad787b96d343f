"""The V2 inference service: health, metadata, inference, repository, shared memory."""

import asyncio
from collections.abc import Mapping

from grpclib.const import Handler

from xlaserve.errors import Unsupported
from xlaserve.grpc.infer.infer_stream import METHOD as STREAM_METHOD
from xlaserve.grpc.infer.infer_stream import InferStreams
from xlaserve.grpc.infer.parameters import read_parameters
from xlaserve.grpc.infer.tensors import read_request, write_outputs
from xlaserve.grpc.infer.typed_answers import TypedAnswers
from xlaserve.grpc.services.dialects import MetadataWithProperties
from xlaserve.grpc.services.runtime_settings import read_log, update_trace, write_log, write_trace
from xlaserve.grpc.services.statistics import write_statistics
from xlaserve.residence.control import ModelControl
from xlaserve.residence.log_settings import change_log_settings, log_settings
from xlaserve.residence.server import ServerDescription
from xlaserve.runtime.metadata_parameters import of_input, of_model, of_output
from xlaserve.serving.call import NOBODY, Peer, current_call
from xlaserve.serving.engine import Engine
from xlaserve.serving.inference import InferRequest
from xlaserve.serving.inputs.cuda_regions import CudaRegions
from xlaserve.serving.made_arrays import made_bytes, reserve_made
from xlaserve.serving.observability.tracing import Tracing
from xlaserve.tensors import TensorSpec
from xlaserve_proto import inference as pb


class InferenceService(pb.GrpcInferenceServiceBase):
    """`inference.GRPCInferenceService`; missing methods return UNIMPLEMENTED."""

    def __init__(
        self,
        description: ServerDescription,
        engine: Engine,
        control: ModelControl,
        typed: TypedAnswers,
        streams: InferStreams,
        *,
        tracing: Tracing,
        has_properties: bool = False,
    ) -> None:
        """With `has_properties`, model metadata has the Open Inference Protocol's `properties`."""
        self._description = description
        self._engine = engine
        self._cuda = CudaRegions(engine.regions)
        self._control = control
        self._typed = typed
        self._streams = streams
        self._tracing = tracing
        self._has_properties = has_properties

    def __mapping__(self) -> dict[str, Handler]:
        """Return a map from methods to handlers; `InferStreams` handles ModelStreamInfer."""
        mapping: dict[str, Handler] = super().__mapping__()
        mapping[STREAM_METHOD] = mapping[STREAM_METHOD]._replace(func=self._streams.run)
        return mapping

    async def server_live(self, server_live_request: pb.ServerLiveRequest) -> pb.ServerLiveResponse:
        """Return true: a server that answers is live."""
        return pb.ServerLiveResponse(live=True)

    async def server_ready(
        self, server_ready_request: pb.ServerReadyRequest
    ) -> pb.ServerReadyResponse:
        """Tell whether startup is complete, as defined by the readiness setting."""
        return pb.ServerReadyResponse(ready=self._control.follower.server_ready)

    async def server_metadata(
        self, server_metadata_request: pb.ServerMetadataRequest
    ) -> pb.ServerMetadataResponse:
        """Return the server's name, version and extensions."""
        return pb.ServerMetadataResponse(
            name=self._description.name,
            version=self._description.version,
            extensions=[*self._description.extensions, *self._engine.regions.extensions],
        )

    async def model_ready(self, model_ready_request: pb.ModelReadyRequest) -> pb.ModelReadyResponse:
        """Tell whether a model is ready; raise NOT_FOUND if it is unknown."""
        request = model_ready_request
        return pb.ModelReadyResponse(
            ready=await self._control.catalog.ready(request.name, request.version)
        )

    async def model_metadata(
        self, model_metadata_request: pb.ModelMetadataRequest
    ) -> pb.ModelMetadataResponse:
        """Return a model's ready versions, platform, tensors and parameters."""
        request = model_metadata_request
        info, versions = self._control.catalog.describe(request.name, request.version)
        config = self._control.catalog.config(request.name, request.version).config
        answer = pb.ModelMetadataResponse(
            name=request.name,
            versions=versions,
            platform=info.platform,
            inputs=[
                _tensor_metadata(spec, of_input(config, info, spec.name)) for spec in info.inputs
            ],
            outputs=[_tensor_metadata(spec, of_output(config, spec.name)) for spec in info.outputs],
        )
        found = of_model(config, info)
        if self._has_properties:
            return MetadataWithProperties.of(answer, found)
        answer.parameters = _texts(found)
        return answer

    async def model_infer(self, model_infer_request: pb.ModelInferRequest) -> pb.ModelInferResponse:
        """Run one inference; the response has the request's id and the version that executed it."""
        message = model_infer_request
        with self._engine.require(message.model_name, message.model_version):
            request = read_request(message)
        _reserve(request)
        response = await self._engine.infer(request)
        form = self._typed.write(response.outputs) if request.typed else None
        outputs, raw = write_outputs(response.outputs, form)
        return pb.ModelInferResponse(
            model_name=response.model_name,
            model_version=response.model_version,
            id=response.id,
            outputs=outputs,
            raw_output_contents=raw,
        )

    async def model_config(
        self, model_config_request: pb.ModelConfigRequest
    ) -> pb.ModelConfigResponse:
        """Return the configuration of a loaded model, including defaults."""
        request = model_config_request
        config = self._control.catalog.config(request.name, request.version)
        return pb.ModelConfigResponse(config=config.message())

    async def model_statistics(
        self, model_statistics_request: pb.ModelStatisticsRequest
    ) -> pb.ModelStatisticsResponse:
        """Return the statistics of all models, of one model, or of one version."""
        request = model_statistics_request
        reports = await self._control.of_all.statistics(request.name, request.version)
        messages = []
        for report in reports:
            messages.append(write_statistics(report))
            await asyncio.sleep(0)  # encoding takes long: let other requests run
        return pb.ModelStatisticsResponse(model_stats=messages)

    async def repository_index(
        self, repository_index_request: pb.RepositoryIndexRequest
    ) -> pb.RepositoryIndexResponse:
        """List loaded and loadable models."""
        _refuse_repository_name(repository_index_request.repository_name)
        entries = await self._control.of_all.index(ready=repository_index_request.ready)
        return pb.RepositoryIndexResponse(
            models=[
                pb.RepositoryIndexResponseModelIndex(
                    name=entry.name, version=entry.version, state=entry.state, reason=entry.reason
                )
                for entry in entries
            ]
        )

    async def repository_model_load(
        self, repository_model_load_request: pb.RepositoryModelLoadRequest
    ) -> pb.RepositoryModelLoadResponse:
        """Load or reload a model, and return when it is ready."""
        request = repository_model_load_request
        _refuse_repository_name(request.repository_name)
        await self._control.load(request.model_name, read_parameters(request.parameters))
        return pb.RepositoryModelLoadResponse()

    async def repository_model_unload(
        self, repository_model_unload_request: pb.RepositoryModelUnloadRequest
    ) -> pb.RepositoryModelUnloadResponse:
        """Unload a model, and return when its memory is free."""
        request = repository_model_unload_request
        _refuse_repository_name(request.repository_name)
        await self._control.unload(request.model_name, read_parameters(request.parameters))
        return pb.RepositoryModelUnloadResponse()

    # --- runtime settings ---

    async def trace_setting(
        self, trace_setting_request: pb.TraceSettingRequest
    ) -> pb.TraceSettingResponse:
        """Change the trace settings of one model or of all models, and return them."""
        request = trace_setting_request
        if request.model_name:
            self._engine.info(request.model_name)
        await update_trace(self._tracing, request)
        return write_trace(self._tracing, request.model_name)

    async def log_settings(
        self, log_settings_request: pb.LogSettingsRequest
    ) -> pb.LogSettingsResponse:
        """Change the log settings, and return them."""
        change = read_log(log_settings_request)
        if change:
            await change_log_settings(self._control.plane, change)
        return write_log(log_settings())

    # --- shared memory ---

    async def system_shared_memory_status(
        self, system_shared_memory_status_request: pb.SystemSharedMemoryStatusRequest
    ) -> pb.SystemSharedMemoryStatusResponse:
        """Return all registered regions, or the one with a given name."""
        return pb.SystemSharedMemoryStatusResponse(
            regions={
                region.name: pb.SystemSharedMemoryStatusResponseRegionStatus(
                    name=region.name,
                    key=region.key,
                    offset=region.offset,
                    byte_size=region.byte_size,
                )
                for region in self._engine.regions.status(system_shared_memory_status_request.name)
            }
        )

    async def system_shared_memory_register(
        self, system_shared_memory_register_request: pb.SystemSharedMemoryRegisterRequest
    ) -> pb.SystemSharedMemoryRegisterResponse:
        """Register part of a shared memory file under a name."""
        request = system_shared_memory_register_request
        await self._engine.regions.register_everywhere(
            _peer(), request.name, request.key, request.offset, request.byte_size
        )
        return pb.SystemSharedMemoryRegisterResponse()

    async def system_shared_memory_unregister(
        self, system_shared_memory_unregister_request: pb.SystemSharedMemoryUnregisterRequest
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        """Unregister one region or all; an unknown name is not an error."""
        name = system_shared_memory_unregister_request.name
        await self._engine.regions.unregister_everywhere(_peer(), name)
        return pb.SystemSharedMemoryUnregisterResponse()

    async def cuda_shared_memory_status(
        self, cuda_shared_memory_status_request: pb.CudaSharedMemoryStatusRequest
    ) -> pb.CudaSharedMemoryStatusResponse:
        """Return all registered CUDA memory regions, or the one with a given name."""
        return pb.CudaSharedMemoryStatusResponse(
            regions={
                region.name: pb.CudaSharedMemoryStatusResponseRegionStatus(
                    name=region.name, device_id=region.device, byte_size=region.byte_size
                )
                for region in self._cuda.status(cuda_shared_memory_status_request.name)
            }
        )

    async def cuda_shared_memory_register(
        self, cuda_shared_memory_register_request: pb.CudaSharedMemoryRegisterRequest
    ) -> pb.CudaSharedMemoryRegisterResponse:
        """Open a CUDA memory handle, and register the region under a name."""
        request = cuda_shared_memory_register_request
        self._cuda.register(
            _peer(), request.name, request.raw_handle, request.device_id, request.byte_size
        )
        return pb.CudaSharedMemoryRegisterResponse()

    async def cuda_shared_memory_unregister(
        self, cuda_shared_memory_unregister_request: pb.CudaSharedMemoryUnregisterRequest
    ) -> pb.CudaSharedMemoryUnregisterResponse:
        """Unregister one region or all; an unknown name is not an error."""
        self._cuda.unregister(_peer(), cuda_shared_memory_unregister_request.name)
        return pb.CudaSharedMemoryUnregisterResponse()


_LISTED_BYTES = 40
"""Bytes of a number in a Python list, including the reference."""


def _reserve(request: InferRequest) -> None:
    """Reserve memory for a request's arrays until its call ends; may raise BudgetExhausted."""
    call = current_call.get()
    if call is not None:
        size = made_bytes(request.inputs)
        if request.typed:
            size += _LISTED_BYTES * sum(given.data.size for given in request.inputs)
        reserve_made(call, size)


def _peer() -> Peer:
    """Return the client of the current call."""
    call = current_call.get()
    return NOBODY if call is None else call.peer


def _tensor_metadata(
    spec: TensorSpec, parameters: Mapping[str, str]
) -> pb.ModelMetadataResponseTensorMetadata:
    return pb.ModelMetadataResponseTensorMetadata(
        name=spec.name,
        datatype=spec.datatype.name,
        shape=list(spec.shape),
        parameters=_texts(parameters),
    )


def _texts(parameters: Mapping[str, str]) -> dict[str, pb.InferParameter]:
    return {name: pb.InferParameter(string_param=text) for name, text in parameters.items()}


def _refuse_repository_name(name: str) -> None:
    if name:
        raise Unsupported("choosing a repository by name (repository_name)")
