"""The JSON of the V2 protocol as types, for encoding and for the OpenAPI document."""

from typing import Annotated, Any

import msgspec


class Live(msgspec.Struct):
    """Whether the server is live."""

    live: bool


class Ready(msgspec.Struct, omit_defaults=True):
    """Whether the server is ready, and else why not."""

    ready: bool
    reason: Annotated[
        str, msgspec.Meta(description="Why not, with the models that failed and their reasons.")
    ] = ""


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


class TensorMetadata(msgspec.Struct, omit_defaults=True):
    """One input or output of a model; -1 where any size is accepted."""

    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, str] = {}
    """Its `content_type`, `format` and `labels`, if configured."""


class ModelMetadata(msgspec.Struct, omit_defaults=True):
    """The metadata of a model, and the versions that answer."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]
    parameters: dict[str, str] = {}
    """Parameters of the configuration."""


class RequestInput(msgspec.Struct, omit_defaults=True):
    """One input tensor; its elements are in `data`, or follow the JSON."""

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
    """An inference."""

    inputs: list[RequestInput]
    id: str = ""
    parameters: dict[str, Any] = {}
    outputs: list[RequestOutput] = []


class ResponseOutput(msgspec.Struct, omit_defaults=True):
    """One output tensor; its elements are in `data`, or follow the JSON."""

    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, Any] = {}
    data: list[Any] = []


class InferenceResponse(msgspec.Struct, omit_defaults=True):
    """The answer to an inference."""

    model_name: str
    model_version: str
    outputs: list[ResponseOutput]
    id: str = ""
