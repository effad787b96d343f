"""Server reflection lists every service, in both versions of the protocol."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeAlias

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from support.protobuf import Google, descriptor_set

from xlaserve.grpc.protobuf.descriptors import DescriptorIndex
from xlaserve.grpc.services.reflection import reflection_services

SERVICES = ("inference.GRPCInferenceService", "grpc.health.v1.Health")
VERSIONS = ("v1", "v1alpha")
MAX_REQUESTS = 20

ServeHandlers: TypeAlias = Callable[[Any], AbstractAsyncContextManager[str]]
Ask: TypeAlias = Callable[..., Any]


@pytest.fixture
def handlers() -> Sequence[Any]:
    return reflection_services(
        DescriptorIndex.of_contracts(), services=SERVICES, max_requests=MAX_REQUESTS
    )


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def ask(
    handlers: Sequence[Any], serve_handlers: ServeHandlers, google: Google, version: str
) -> Ask:
    """Send requests, given by their fields, on one stream with grpcio."""
    request_type = google.named(f"grpc.reflection.{version}.ServerReflectionRequest")
    response_type = google.named(f"grpc.reflection.{version}.ServerReflectionResponse")
    path = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"

    def call(url: str, requests: Sequence[dict[str, Any]]) -> list[Any]:
        with grpc.insecure_channel(url) as channel:
            stream = channel.stream_stream(
                path,
                request_serializer=request_type.SerializeToString,
                response_deserializer=response_type.FromString,
            )
            return list(stream((request_type(**fields) for fields in requests), timeout=10))

    async def run(*requests: dict[str, Any]) -> list[Any]:
        async with serve_handlers(handlers) as url:
            return await asyncio.to_thread(call, url, requests)

    return run


async def test_grpcio_reflection_client_reads_every_file(
    handlers: Sequence[Any], serve_handlers: ServeHandlers
) -> None:
    """Its database feeds a descriptor pool, as in grpcurl."""

    def read(url: str) -> tuple[list[str], dict[str, str]]:
        with grpc.insecure_channel(url) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            pool = DescriptorPool(database)
            methods = {
                method.full_name: method.input_type.full_name
                for name in database.get_services()
                for method in pool.FindServiceByName(name).methods
            }
            return list(database.get_services()), methods

    async with serve_handlers(handlers) as url:
        services, methods = await asyncio.to_thread(read, url)

    assert sorted(SERVICES) == services
    assert "inference.ModelInferRequest" == methods["inference.GRPCInferenceService.ModelInfer"]
    assert "grpc.health.v1.HealthCheckRequest" == methods["grpc.health.v1.Health.Watch"]


async def test_exactly_the_services_of_the_server_are_listed(ask: Ask) -> None:
    (response,) = await ask({"list_services": ""})

    assert sorted(SERVICES) == [row.name for row in response.list_services_response.service]


async def test_request_and_host_come_back(ask: Ask) -> None:
    (response,) = await ask({"host": "h", "list_services": "*"})

    assert ("h", "*") == (response.valid_host, response.original_request.list_services)


async def test_file_comes_with_its_imports(ask: Ask) -> None:
    by_name, by_symbol = await ask(
        {"file_by_filename": "inference.proto"},
        {"file_containing_symbol": "inference.ModelInferRequest"},
    )

    files = [bytes(file) for file in by_name.file_descriptor_response.file_descriptor_proto]
    found = [FileDescriptorProto.FromString(file).name for file in files]
    assert ["inference.proto", "model_config.proto"] == found
    assert files == list(by_symbol.file_descriptor_response.file_descriptor_proto)


@pytest.mark.parametrize(
    ("request_fields", "code", "message"),
    [
        ({"file_by_filename": "nothing.proto"}, 5, "File not found."),
        ({"file_containing_symbol": "no.Thing"}, 5, "Symbol not found."),
        ({"all_extension_numbers_of_type": "no.Thing"}, 5, "Type not found."),
        (
            {"file_containing_extension": {"containing_type": "inference.ModelInferRequest"}},
            5,
            "Extension not found.",
        ),
        ({"host": "h"}, 3, "Empty request."),
    ],
    ids=str,
)
async def test_what_is_not_there_is_an_answer_not_an_end(
    ask: Ask, request_fields: dict[str, Any], code: int, message: str
) -> None:
    """The stream continues after NOT_FOUND."""
    response, following = await ask(request_fields, {"list_services": ""})

    error = response.error_response
    assert (code, message) == (error.error_code, error.error_message)
    assert following.HasField("list_services_response")


async def test_messages_have_no_extensions(ask: Ask) -> None:
    (response,) = await ask({"all_extension_numbers_of_type": "inference.ModelInferRequest"})

    answer = response.all_extension_numbers_response
    assert ("inference.ModelInferRequest", []) == (
        answer.base_type_name,
        list(answer.extension_number),
    )


async def test_a_stream_may_ask_so_much_and_no_more(ask: Ask) -> None:
    assert MAX_REQUESTS == len(await ask(*[{"list_services": ""}] * MAX_REQUESTS))

    with pytest.raises(grpc.RpcError) as caught:
        await ask(*[{"list_services": ""}] * (MAX_REQUESTS + 1))

    error: Any = caught.value
    assert grpc.StatusCode.RESOURCE_EXHAUSTED is error.code()
    assert "more than 20 requests (max_reflection_requests)" == error.details()


def test_messages_of_both_versions_are_the_same() -> None:
    """One implementation serves both versions, so their bytes must mean the same."""
    files = {file.package: file for file in descriptor_set().file}
    current, before = (files[f"grpc.reflection.{name}"] for name in VERSIONS)

    assert str(list(current.message_type)) == str(list(before.message_type)).replace(
        "v1alpha", "v1"
    )
