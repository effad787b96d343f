"""Custom gRPC services beside the server's: found, checked, decoded."""

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
    """The result of a factory named by `--service`: a service, and its description.

    `handler` is an object of a generated service class, `descriptor_set` what protoc writes of it,
    for reflection, and `id_paths` says of each method which fields lead to the model's id.
    """

    handler: IServable
    """The service: an object of a class that betterproto's or grpclib's plugin generated a base
    for."""
    descriptor_set: bytes = b""
    """`protoc --include_imports --descriptor_set_out`, for reflection; empty to leave it out."""
    id_paths: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Method (`package.Service/Method`) -> numbers of the fields that lead to the model's id. A
    mesh lets only these methods through, and its id replaces the one in the message."""


Factory: TypeAlias = Callable[[Models], Service]
"""Makes a service over the models of the server; called once, before the server listens."""


def load_services(references: Iterable[str], models: Models) -> list[Service]:
    """Call the factories that `--service` names; raises InvalidReference for what is no service."""
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
    """Return the paths of all services by full method name, `/package.Service/Method`."""
    return {
        f"/{method}": InjectionPath(tuple(numbers))
        for service in services
        for method, numbers in service.id_paths.items()
    }


class ServicesCodec(CodecBase):
    """The wire codec, and protobuf's own classes for custom services."""

    def __init__(self, wire: CodecBase) -> None:
        self._wire = wire

    @property
    def __content_subtype__(self) -> str:
        """Return the content subtype, after `application/grpc+`."""
        return "proto"

    def encode(self, message: Any, message_type: Any) -> bytes:
        """Return the bytes of a message."""
        if issubclass(message_type, betterproto.Message):
            return self._wire.encode(message, message_type)
        return bytes(message.SerializeToString())

    def decode(self, data: bytes, message_type: Any) -> Any:
        """Return the message; raises GRPCError without any of its contents."""
        if issubclass(message_type, betterproto.Message):
            return self._wire.decode(data, message_type)
        try:
            return message_type.FromString(bytes(data))
        except Exception:
            # google.protobuf may not be installed, so its DecodeError has no name here.
            text = f"the request is not a valid {message_type.__name__} message"
            raise GRPCError(Status.INTERNAL, text) from None
