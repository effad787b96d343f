"""The table of gRPC methods, with the operation (permission) of each."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from grpclib._typing import IServable
from grpclib.const import Handler

from xlaserve.grpc.protobuf.splice import InjectionPath
from xlaserve.serving.call import Api, Operation


class Row(NamedTuple):
    """Facts about a method; `model` and `version` are request fields that name a model."""

    operation: Operation
    model: str = ""
    version: str = ""
    raw: bool = False
    """Whether the method reads and writes serialized messages."""
    infers: bool = False
    """Whether each request is one inference; the engine then answers the request's own call."""
    api: Api | None = None
    """Triton's API group for access rules, if the operation does not imply it."""
    carries_calls: bool = False
    """Whether the request is a stream in which each message is a call."""
    id_path: tuple[int, ...] = ()
    """Path of field numbers to the model name, which a mesh's id replaces. Empty for methods that
    ModelMesh does not forward, such as those that manage models."""


@dataclass(frozen=True, slots=True)
class Method:
    """One method of a gRPC service."""

    path: str
    """The full name, `/package.Service/Method`."""
    row: Row
    handler: Handler
    """The handler that grpclib calls."""


_INFERENCE = "/inference.GRPCInferenceService/"
_MLSERVER = "/inference.model_repository.ModelRepositoryService/"
_RUNTIME = "/mmesh.ModelRuntime/"
_HEALTH = "/grpc.health.v1.Health/"
_LIVE = Row(Operation.HEALTH)
_OF_MODEL = Row(Operation.METADATA, "name", "version")
_NAME = (1,)
"""The id path of requests whose field 1 is the model name."""
_READY = Row(Operation.READINESS, "name", "version", id_path=_NAME)
_INFER = Row(Operation.INFER, "model_name", "model_version", infers=True, id_path=_NAME)
_LOAD = Row(Operation.MANAGE, "model_name")
_READ_SHARED = Row(Operation.METADATA, api=Api.SHARED_MEMORY)
_SHARE = Row(Operation.MANAGE, api=Api.SHARED_MEMORY)
_METADATA = Row(Operation.METADATA)

ROWS: Mapping[str, Row] = MappingProxyType(
    {
        _INFERENCE + "ServerLive": _LIVE,
        _INFERENCE + "ServerReady": _LIVE,
        _INFERENCE + "ModelReady": _READY,
        _INFERENCE + "ServerMetadata": _METADATA,
        _INFERENCE + "ModelMetadata": _OF_MODEL._replace(id_path=_NAME),
        _INFERENCE + "ModelInfer": _INFER,
        _INFERENCE + "ModelStreamInfer": Row(Operation.INFER, raw=True, carries_calls=True),
        _INFERENCE + "ModelConfig": _OF_MODEL._replace(api=Api.MODEL_CONFIG),
        _INFERENCE + "ModelStatistics": _OF_MODEL._replace(api=Api.STATISTICS),
        _INFERENCE + "RepositoryIndex": Row(Operation.METADATA, api=Api.MODEL_REPOSITORY),
        _INFERENCE + "RepositoryModelLoad": _LOAD,
        _INFERENCE + "RepositoryModelUnload": _LOAD,
        _INFERENCE + "SystemSharedMemoryStatus": _READ_SHARED,
        _INFERENCE + "SystemSharedMemoryRegister": _SHARE,
        _INFERENCE + "SystemSharedMemoryUnregister": _SHARE,
        _INFERENCE + "CudaSharedMemoryStatus": _READ_SHARED,
        _INFERENCE + "CudaSharedMemoryRegister": _SHARE,
        _INFERENCE + "CudaSharedMemoryUnregister": _SHARE,
        _INFERENCE + "TraceSetting": Row(Operation.MANAGE, api=Api.TRACE),
        _INFERENCE + "LogSettings": Row(Operation.MANAGE, api=Api.LOGGING),
        _RUNTIME + "loadModel": Row(Operation.RUNTIME, "model_id"),
        _RUNTIME + "unloadModel": Row(Operation.RUNTIME, "model_id"),
        _RUNTIME + "predictModelSize": Row(Operation.RUNTIME, "model_id"),
        _RUNTIME + "modelSize": Row(Operation.RUNTIME, "model_id"),
        _RUNTIME + "runtimeStatus": Row(Operation.RUNTIME),
        _HEALTH + "Check": _LIVE,
        _HEALTH + "List": _LIVE,
        _HEALTH + "Watch": _LIVE,
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": _METADATA,
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _METADATA,
    }
)
"""Full name -> row, for the server's own methods; other methods belong to custom services."""

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        f"{_MLSERVER}{method}": f"{_INFERENCE}{method}"
        for method in ("RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload")
    }
)
"""Method of MLServer's service -> V2 method with the same messages and permissions."""

INFERENCE_PATHS: Mapping[str, InjectionPath] = MappingProxyType(
    {path: InjectionPath(row.id_path) for path, row in ROWS.items() if row.id_path}
)
"""Full name -> path of the model id, for the server's own methods that ModelMesh forwards."""

_OF_ONES_OWN = Row(Operation.SERVICE)


def methods_of(services: Iterable[IServable]) -> dict[str, Method]:
    """Return a map from full method names to the methods of services."""
    return {
        path: Method(path, ROWS.get(ALIASES.get(path, path), _OF_ONES_OWN), handler)
        for service in services
        for path, handler in service.__mapping__().items()
    }
