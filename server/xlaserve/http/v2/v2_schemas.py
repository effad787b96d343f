"""The JSON messages of the V2 protocol, for encoding and for the OpenAPI document."""

from typing import Annotated, Any

import msgspec


class Live(msgspec.Struct):
    """Whether the server is live."""

    live: bool


class Ready(msgspec.Struct, omit_defaults=True):
    """Whether the server is ready, and why not."""

    ready: bool
    reason: Annotated[
        str,
        msgspec.Meta(
            description="Why the server is not ready; names the models that failed, with reasons."
        ),
    ] = ""


class ModelReady(msgspec.Struct):
    """Whether a model is ready."""

    name: str
    ready: bool


class ServerMetadata(msgspec.Struct):
    """Name, version and extensions of the server."""

    name: str
    version: str
    extensions: list[str]


class ModelNames(msgspec.Struct):
    """The ready models."""

    models: list[str]


class TensorMetadata(msgspec.Struct, omit_defaults=True):
    """An input or output of a model; -1 is a variable dimension."""

    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, str] = {}
    """The configured `content_type`, `format` and `labels`."""


class ModelMetadata(msgspec.Struct, omit_defaults=True):
    """The metadata of a model, and its ready versions."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]
    parameters: dict[str, str] = {}
    """Parameters of the model configuration."""


class RequestInput(msgspec.Struct, omit_defaults=True):
    """One input tensor; its elements are in `data`, or binary after the JSON."""

    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Any] = {}
    data: list[Any] = []


class RequestOutput(msgspec.Struct, omit_defaults=True):
    """A requested output."""

    name: str
    parameters: dict[str, Any] = {}


class InferenceRequest(msgspec.Struct, omit_defaults=True):
    """An inference request."""

    inputs: list[RequestInput]
    id: str = ""
    parameters: dict[str, Any] = {}
    outputs: list[RequestOutput] = []


class ResponseOutput(msgspec.Struct, omit_defaults=True):
    """One output tensor; its elements are in `data`, or binary after the JSON."""

    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, Any] = {}
    data: list[Any] = []


class InferenceResponse(msgspec.Struct, omit_defaults=True):
    """The response to an inference request."""

    model_name: str
    model_version: str
    outputs: list[ResponseOutput]
    id: str = ""
