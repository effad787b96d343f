"""A V2 gRPC client of our own, for the command line."""

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from grpclib import GRPCError
from grpclib.exceptions import ProtocolError, StreamTerminatedError

from xlaserve.core.serving.inference import InferRequest
from xlaserve.tensors import (
    Tensor,
    TensorSpec,
    datatype_named,
    from_bytes,
    from_elements,
    to_bytes,
)
from xlaserve.transport.address import ServerAddress, parse_address
from xlaserve.transport.client import LABELS, CallFailed, InferenceResult, ModelTensors, asked
from xlaserve.transport.grpc.channel import ClientChannel
from xlaserve.transport.grpc.codec import WireCodec
from xlaserve.transport.grpc.parameters import read_parameters, write_parameters
from xlaserve_proto import inference as pb


class Client:
    """Speaks to one server, at `host:port` or `unix:path`; an asynchronous context manager."""

    def __init__(self, url: str | ServerAddress, *, timeout: float) -> None:
        address = parse_address(url) if isinstance(url, str) else url
        self._url = address.url
        self._channel = ClientChannel(address, WireCodec())
        self._stub = pb.GrpcInferenceServiceStub(
            self._channel, timeout=timeout, metadata=dict(address.headers)
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._channel.aclose()
        failure = self.failure(error)
        if failure is not None:
            raise failure from error

    def failure(self, error: BaseException | None) -> CallFailed | None:
        """Return the error to raise for one of the connection or of the server; None for others."""
        problem = _problem(error)
        return None if problem is None else CallFailed(self._url, problem)

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

    async def ask(self, request: InferRequest) -> InferenceResult:
        """Run one inference, with all that its request says; all tensors travel raw."""
        message = write_request(request)
        started = time.perf_counter()
        response = await self._stub.model_infer(message)
        return _result(response, time.perf_counter() - started)


def infer_request(
    model: str, version: str, inputs: Sequence[tuple[TensorSpec, Tensor]]
) -> pb.ModelInferRequest:
    """Return the message that asks for an inference; all tensors travel raw."""
    return write_request(asked(model, version, inputs))


def write_request(request: InferRequest) -> pb.ModelInferRequest:
    """Return the message for a request; all tensors travel raw."""
    return pb.ModelInferRequest(
        model_name=request.model_name,
        model_version=request.model_version,
        id=request.id,
        parameters=write_parameters(request.parameters),
        inputs=[
            pb.ModelInferRequestInferInputTensor(
                name=tensor.name,
                datatype=tensor.datatype.name,
                shape=list(tensor.data.shape),
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
            bytes(to_bytes(tensor.datatype, tensor.data)) for tensor in request.inputs
        ],
    )


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


def _problem(error: BaseException | None) -> str | None:
    if isinstance(error, GRPCError):
        return f"{error.status.name}: {error.message or 'no message'}"
    if isinstance(error, TimeoutError):  # an OSError too
        return "no answer in time"
    if isinstance(error, OSError):
        return f"cannot connect: {error.strerror or error}"
    if isinstance(error, StreamTerminatedError | ProtocolError):
        return f"the connection broke: {error}"
    return None
