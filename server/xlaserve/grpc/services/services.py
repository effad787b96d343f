"""Custom gRPC services, loaded from the factories that `--service` names."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import betterproto
from grpclib import GRPCError
from grpclib._typing import IServable
from grpclib.const import Status
from grpclib.encoding.base import CodecBase

from xlaserve.errors import InvalidReference
from xlaserve.files.references import load_reference
from xlaserve.grpc.protobuf.splice import InjectionPath
from xlaserve.serving.models_api import Models


@dataclass(frozen=True, slots=True)
class Service:
    """The result of a factory named by `--service`: a service and its description.

    `handler` implements the service, `descriptor_set` describes it for reflection, and `id_paths`
    locates the model id in requests.
    """

    handler: IServable
    """The service: an instance of a subclass of the base class that betterproto's or grpclib's
    protoc plugin generated."""
    descriptor_set: bytes = b""
    """Output of `protoc --include_imports --descriptor_set_out`; empty for no reflection."""
    id_paths: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Method (`package.Service/Method`) -> field numbers that lead to the model id. ModelMesh
    forwards only these methods, and its id replaces the one in the message."""


Factory: TypeAlias = Callable[[Models], Service]
"""Creates a service, given the server's models; called once, before the server listens."""


def load_services(references: Iterable[str], models: Models) -> list[Service]:
    """Call the factories that `--service` names; raise InvalidReference if one is invalid."""
    return [_load(reference, models) for reference in references]


def _load(reference: str, models: Models) -> Service:
    factory = load_reference(reference)
    if not callable(factory):
        raise InvalidReference(f"{reference} is a {type(factory).__name__}, expected a function")
    service = factory(models)
    if not isinstance(service, Service):
        made = type(service).__name__
        raise InvalidReference(f"{reference} returned a {made}, expected an xlaserve.Service")
    methods = {path.lstrip("/") for path in service.handler.__mapping__()}
    for method in service.id_paths:
        if method not in methods:
            known = ", ".join(sorted(methods))
            raise InvalidReference(f"{reference}: no method '{method}', the service has {known}")
    return service


def injection_paths(services: Iterable[Service]) -> dict[str, InjectionPath]:
    """Return a map from full method names (`/package.Service/Method`) to id paths."""
    return {
        f"/{method}": InjectionPath(tuple(numbers))
        for service in services
        for method, numbers in service.id_paths.items()
    }


class ServicesCodec(CodecBase):
    """The server's codec, which also supports protobuf's own classes for custom services."""

    def __init__(self, wire: CodecBase) -> None:
        self._wire = wire

    @property
    def __content_subtype__(self) -> str:
        """Return the content subtype, after `application/grpc+`."""
        return "proto"

    def encode(self, message: Any, message_type: Any) -> bytes:
        """Encode a message."""
        if issubclass(message_type, betterproto.Message):
            return self._wire.encode(message, message_type)
        return bytes(message.SerializeToString())

    def decode(self, data: bytes, message_type: Any) -> Any:
        """Decode a message. Raises GRPCError whose text does not quote the message."""
        if issubclass(message_type, betterproto.Message):
            return self._wire.decode(data, message_type)
        try:
            return message_type.FromString(bytes(data))
        except Exception:
            # Catch everything: google.protobuf, and thus its DecodeError, may not be installed.
            text = f"the request is not a valid {message_type.__name__} message"
            raise GRPCError(Status.INTERNAL, text) from None
