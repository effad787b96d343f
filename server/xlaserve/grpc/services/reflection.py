"""gRPC server reflection: describes services to clients that have no proto files."""

from collections.abc import AsyncIterator, Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import betterproto
from grpclib import GRPCError
from grpclib.const import Handler, Status

from xlaserve.grpc.protobuf.descriptors import DescriptorIndex
from xlaserve_proto.grpc.reflection import v1

Answer: TypeAlias = Callable[["Reflection", Any], v1.ServerReflectionResponse]
"""Answers one question; its argument is a string, or an ExtensionRequest for extensions."""


SERVICES = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
"""The names of the reflection services, which reflection also lists."""


def reflection_services(
    index: DescriptorIndex, *, services: Collection[str], max_requests: int
) -> "tuple[Reflection, ReflectionAlpha]":
    """Create both versions of the reflection service; `services` are the full names to list.

    `max_requests` is the maximum number of questions per stream.
    """
    reflection = Reflection(index, services=services, max_requests=max_requests)
    return reflection, ReflectionAlpha(reflection)


class Reflection(v1.ServerReflectionBase):
    """`grpc.reflection.v1.ServerReflection`."""

    def __init__(
        self, index: DescriptorIndex, *, services: Collection[str], max_requests: int
    ) -> None:
        self.index = index
        self.services = sorted(services)
        self._max_requests = max_requests

    async def server_reflection_info(
        self, server_reflection_request_iterator: AsyncIterator[v1.ServerReflectionRequest]
    ) -> AsyncIterator[v1.ServerReflectionResponse]:
        """Answer the questions of a stream, in order."""
        requests = 0
        async for request in server_reflection_request_iterator:
            requests += 1
            if requests > self._max_requests:
                text = f"more than {self._max_requests} requests (max_reflection_requests)"
                raise GRPCError(Status.RESOURCE_EXHAUSTED, text)
            yield self._respond(request)

    def _respond(self, request: v1.ServerReflectionRequest) -> v1.ServerReflectionResponse:
        kind, value = betterproto.which_one_of(request, "message_request")
        response = _ANSWERS[kind](self, value)
        response.valid_host = request.host
        response.original_request = request
        return response


class ReflectionAlpha:
    """`grpc.reflection.v1alpha.ServerReflection`, whose encoded messages are identical to v1's."""

    def __init__(self, current: Reflection) -> None:
        self._current = current

    def __mapping__(self) -> dict[str, Handler]:
        """Return v1's handlers under the method names of v1alpha."""
        handlers = self._current.__mapping__()
        return {path.replace(".v1.", ".v1alpha."): handler for path, handler in handlers.items()}


# --- responses ---------------------------------------------------------------------------------


def _list_services(reflection: Reflection, _: str) -> v1.ServerReflectionResponse:
    services = [v1.ServiceResponse(name=name) for name in reflection.services]
    return v1.ServerReflectionResponse(
        list_services_response=v1.ListServiceResponse(service=services)
    )


def _file_by_filename(reflection: Reflection, name: str) -> v1.ServerReflectionResponse:
    return _files(reflection.index.file_named(name), "File not found.")


def _file_containing_symbol(reflection: Reflection, symbol: str) -> v1.ServerReflectionResponse:
    return _files(reflection.index.file_of(symbol), "Symbol not found.")


def _files(files: list[bytes], missing: str) -> v1.ServerReflectionResponse:
    if not files:
        return _error(Status.NOT_FOUND, missing)
    return v1.ServerReflectionResponse(
        file_descriptor_response=v1.FileDescriptorResponse(file_descriptor_proto=files)
    )


def _file_containing_extension(
    reflection: Reflection, _: v1.ExtensionRequest
) -> v1.ServerReflectionResponse:
    # Messages defined in proto3 have no extensions.
    return _error(Status.NOT_FOUND, "Extension not found.")


def _extension_numbers(reflection: Reflection, name: str) -> v1.ServerReflectionResponse:
    if not reflection.index.is_message(name):
        return _error(Status.NOT_FOUND, "Type not found.")
    return v1.ServerReflectionResponse(
        all_extension_numbers_response=v1.ExtensionNumberResponse(base_type_name=name)
    )


def _nothing_asked(reflection: Reflection, _: None) -> v1.ServerReflectionResponse:
    return _error(Status.INVALID_ARGUMENT, "Empty request.")


def _error(status: Status, message: str) -> v1.ServerReflectionResponse:
    return v1.ServerReflectionResponse(
        error_response=v1.ErrorResponse(error_code=status.value, error_message=message)
    )


_ANSWERS: Mapping[str, Answer] = MappingProxyType(
    {
        "list_services": _list_services,
        "file_by_filename": _file_by_filename,
        "file_containing_symbol": _file_containing_symbol,
        "file_containing_extension": _file_containing_extension,
        "all_extension_numbers_of_type": _extension_numbers,
        "": _nothing_asked,
    }
)
"""Name of the oneof member set in the request -> function that answers it."""
