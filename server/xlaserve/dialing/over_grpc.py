"""V2 client over gRPC, for `xlaserve.client` and the command line."""

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Self

from betterproto import Casing, Message
from grpclib import GRPCError
from grpclib.exceptions import ProtocolError, StreamTerminatedError

from xlaserve.dialing.address import ServerAddress, parse_address
from xlaserve.dialing.channel import ClientChannel
from xlaserve.dialing.dialects import DialectCodec
from xlaserve.dialing.interface import (
    LABELS,
    CallFailed,
    IndexEntry,
    InferenceResult,
    Json,
    ModelTensors,
    NotReached,
    asked,
)
from xlaserve.grpc.infer.parameters import read_parameters, write_parameters
from xlaserve.serving.inference import InferInput, InferRequest, SharedInput
from xlaserve.tensors import (
    Shape,
    Tensor,
    TensorSpec,
    datatype_named,
    from_bytes,
    from_elements,
    to_bytes,
)
from xlaserve_proto import inference as pb

_MOST_FIELDS = 10_000_000
"""Maximum fields of a response: statistics have about a hundred for each of thousands of models."""
_EMPTY_FINAL = "triton_enable_empty_final_response"
_FINAL = "triton_final_response"
"""Boolean parameter of a streamed answer: whether it is the last one to its request."""


class Client:
    """Client of one server at `host:port` or `unix:path`; an asynchronous context manager."""

    def __init__(self, url: str | ServerAddress, *, timeout: float) -> None:
        address = parse_address(url) if isinstance(url, str) else url
        self._url = address.url
        self.codec = DialectCodec(max_fields=_MOST_FIELDS)
        """Codec of requests and answers."""
        self._channel = ClientChannel(address, self.codec)
        self._stub = pb.GrpcInferenceServiceStub(
            self._channel, timeout=timeout, metadata=dict(address.headers)
        )
        self.memory = GrpcMemory(self._stub)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        await self._channel.aclose()
        failure = self.failure(error)
        if failure is not None:
            raise failure from error

    def failure(self, error: BaseException | None) -> CallFailed | None:
        """Return the CallFailed for a connection or server error; None for other errors."""
        problem = _problem(error)
        if problem is None:
            return None
        refused = isinstance(error, GRPCError | TimeoutError)
        return (CallFailed if refused else NotReached)(self._url, problem, _status(error))

    async def live(self) -> bool:
        """Tell whether the server is live (V2 protocol, Health)."""
        return (await self._stub.server_live(pb.ServerLiveRequest())).live

    async def ready(self) -> bool:
        """Tell whether the server is ready (V2 protocol, Health)."""
        return (await self._stub.server_ready(pb.ServerReadyRequest())).ready

    async def inputs(self, model: str, version: str = "") -> list[TensorSpec]:
        """Return the inputs of a model (V2 protocol, Model Metadata)."""
        return [*(await self.tensors(model, version)).inputs]

    async def tensors(self, model: str, version: str = "") -> ModelTensors:
        """Return the inputs and outputs of a model (V2 protocol, Model Metadata)."""
        metadata = await self._stub.model_metadata(
            pb.ModelMetadataRequest(name=model, version=version)
        )
        return ModelTensors(
            _specs(metadata.inputs),
            _specs(metadata.outputs),
            frozenset(one.name for one in metadata.outputs if LABELS in one.parameters),
        )

    async def infer(
        self, model: str, version: str, inputs: Sequence[tuple[TensorSpec, Tensor]]
    ) -> InferenceResult:
        """Run one inference (V2 protocol, Inference)."""
        return await self.ask(asked(model, version, inputs))

    async def ask(self, request: InferRequest, timeout: float | None = None) -> InferenceResult:
        """Run one inference; all tensors are sent as raw contents."""
        message = write_request(request)
        started = time.perf_counter()
        response = await self._stub.model_infer(message, timeout=timeout)
        return _result(response, time.perf_counter() - started)

    async def stream(
        self, request: InferRequest, timeout: float
    ) -> AsyncGenerator[InferenceResult, None]:
        """Yield the responses to one request (V2 protocol, ModelStreamInfer) as they arrive."""
        message = write_request(request)
        # Request an empty final response, to know when the last response has arrived.
        message.parameters[_EMPTY_FINAL] = pb.InferParameter(bool_param=True)
        started = time.perf_counter()
        answers = self._stub.model_stream_infer([message], timeout=timeout)
        async for answer in answers:
            if answer.error_message:
                raise CallFailed(self._url, answer.error_message, "UNKNOWN")
            response = answer.infer_response
            final = response.parameters.pop(_FINAL, None)
            if response.outputs:
                yield _result(response, time.perf_counter() - started)
            if final is not None and final.bool_param:
                return

    async def describe(self, model: str, version: str = "") -> Json:
        """Return the metadata of a model (V2 protocol, Model Metadata)."""
        asking = pb.ModelMetadataRequest(name=model, version=version)
        return _json(await self._stub.model_metadata(asking))

    async def index(self) -> list[IndexEntry]:
        """Return the loaded and loadable models (model repository extension)."""
        answer = await self._stub.repository_index(pb.RepositoryIndexRequest())
        return [IndexEntry(one.name, one.version, one.state, one.reason) for one in answer.models]

    async def configuration(self, model: str, version: str = "") -> Json:
        """Return the configuration of a model (model configuration extension)."""
        asking = pb.ModelConfigRequest(name=model, version=version)
        return _json((await self._stub.model_config(asking)).config)

    async def statistics(self, model: str = "", version: str = "") -> list[Json]:
        """Return the statistics of one model or all models (statistics extension)."""
        asking = pb.ModelStatisticsRequest(name=model, version=version)
        return [_json(one) for one in (await self._stub.model_statistics(asking)).model_stats]

    async def load(self, model: str, config: str = "") -> None:
        """Load or reload a model; `config` is a JSON configuration to use instead of its own."""
        given = {"config": pb.ModelRepositoryParameter(string_param=config)} if config else {}
        await self._stub.repository_model_load(
            pb.RepositoryModelLoadRequest(model_name=model, parameters=given)
        )

    async def unload(self, model: str, *, dependents: bool = False) -> None:
        """Unload a model; with `dependents`, also the steps of an ensemble."""
        yes = pb.ModelRepositoryParameter(bool_param=True)
        given = {"unload_dependents": yes} if dependents else {}
        await self._stub.repository_model_unload(
            pb.RepositoryModelUnloadRequest(model_name=model, parameters=given)
        )


class GrpcMemory:
    """Registers shared memory of this machine with a server (system shared memory extension)."""

    def __init__(self, stub: pb.GrpcInferenceServiceStub) -> None:
        self._stub = stub

    async def register(self, name: str, key: str, size: int) -> None:
        """Register the shared memory object `key` under a name."""
        await self._stub.system_shared_memory_register(
            pb.SystemSharedMemoryRegisterRequest(name=name, key=key, byte_size=size)
        )

    async def unregister(self, name: str) -> None:
        """Unregister a region; an unknown name is not an error."""
        await self._stub.system_shared_memory_unregister(
            pb.SystemSharedMemoryUnregisterRequest(name=name)
        )

    async def knows(self, name: str) -> bool:
        """Tell whether the server has a region registered under a name."""
        found = await self._stub.system_shared_memory_status(pb.SystemSharedMemoryStatusRequest())
        return name in found.regions


def infer_request(
    model: str, version: str, inputs: Sequence[tuple[TensorSpec, Tensor]]
) -> pb.ModelInferRequest:
    """Build the message of an inference request from arrays; all tensors are raw contents."""
    return write_request(asked(model, version, inputs))


def write_request(request: InferRequest) -> pb.ModelInferRequest:
    """Convert a request to a message; all tensors are raw contents."""
    return pb.ModelInferRequest(
        model_name=request.model_name,
        model_version=request.model_version,
        id=request.id,
        parameters=write_parameters(request.parameters),
        inputs=[
            pb.ModelInferRequestInferInputTensor(
                name=tensor.name,
                datatype=tensor.datatype.name,
                shape=list(_shape(tensor)),
                parameters=write_parameters(tensor.parameters),
            )
            for tensor in request.inputs
        ],
        outputs=[
            pb.ModelInferRequestInferRequestedOutputTensor(
                name=output.name, parameters=write_parameters(output.parameters)
            )
            for output in request.outputs
        ],
        raw_input_contents=[
            bytes(to_bytes(tensor.datatype, tensor.data))
            for tensor in request.inputs
            if not isinstance(tensor, SharedInput)
        ],
    )


def _shape(tensor: InferInput) -> Shape:
    return tensor.shape if isinstance(tensor, SharedInput) else tensor.data.shape


def _specs(tensors: Sequence[pb.ModelMetadataResponseTensorMetadata]) -> list[TensorSpec]:
    return [
        TensorSpec(tensor.name, datatype_named(tensor.datatype), tuple(tensor.shape))
        for tensor in tensors
    ]


def _result(response: pb.ModelInferResponse, seconds: float) -> InferenceResult:
    datatypes = {tensor.name: datatype_named(tensor.datatype) for tensor in response.outputs}
    raw = list(response.raw_output_contents)
    outputs: dict[str, Tensor] = {}
    for index, tensor in enumerate(response.outputs):
        datatype = datatypes[tensor.name]
        if raw:
            outputs[tensor.name] = from_bytes(datatype, tensor.shape, raw[index])
        else:
            elements = getattr(tensor.contents, datatype.contents or "bytes_contents")
            outputs[tensor.name] = from_elements(datatype, tensor.shape, elements)
    return InferenceResult(
        response.model_name,
        response.model_version,
        outputs,
        datatypes,
        seconds,
        response.id,
        read_parameters(response.parameters),
        {one.name: read_parameters(one.parameters) for one in response.outputs if one.parameters},
    )


def _json(message: Message) -> Json:
    made: Json = message.to_dict(casing=Casing.SNAKE)  # type: ignore[arg-type]  # a function
    return made


def _status(error: BaseException | None) -> str:
    if isinstance(error, GRPCError):
        return error.status.name
    return "DEADLINE_EXCEEDED" if isinstance(error, TimeoutError) else "UNAVAILABLE"


def _problem(error: BaseException | None) -> str | None:
    if isinstance(error, GRPCError):
        return f"{error.status.name}: {error.message or 'no message'}"
    if isinstance(error, TimeoutError):  # must precede the check for its base class OSError
        return "no answer in time"
    if isinstance(error, OSError):
        return f"cannot connect: {error.strerror or error}"
    if isinstance(error, StreamTerminatedError | ProtocolError):
        return f"the connection broke: {error}"
    return None
