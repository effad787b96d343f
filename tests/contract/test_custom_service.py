"""Arbitrary gRPC services (ModelMesh, Implementing a Custom Serving Runtime): the user's own."""

import sys
from collections.abc import AsyncIterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from support.process import run, served
from support.server import RunningServer, Serve

from xlaserve.app.server import Application
from xlaserve.errors import InvalidReference
from xlaserve.settings import Settings

FOLDER = Path(__file__).resolve().parent.parent.parent / "examples" / "custom_service"
FACTORY = f"{FOLDER / 'digits_service.py'}:create"
SEVEN = FOLDER.parent / "data" / "seven.png"
METHOD = "/example.digits.Digits/Read"


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The classes that the client of the example uses."""
    monkeypatch.syspath_prepend(FOLDER)
    return import_module("digits_proto.example.digits")


@pytest.fixture
async def mesh(serve: Serve, example_models: Path) -> AsyncIterator[RunningServer]:
    """A server behind a mesh that has loaded `digits` under an id of its own."""
    async with serve(
        example_models, service=(FACTORY,), modelmesh=True, model_control_mode="none"
    ) as server:
        yield server


async def read(url: str, messages: ModuleType, model: str, picture: bytes, **headers: str) -> Any:
    metadata = [(name.replace("_", "-"), value) for name, value in headers.items()]
    request = messages.ReadRequest(
        picture=messages.Picture(data=picture), model=messages.Model(id=model)
    )
    async with grpc.aio.insecure_channel(url) as channel:
        call = channel.unary_unary(
            METHOD, request_serializer=bytes, response_deserializer=messages.ReadResponse().parse
        )
        return await call(request, metadata=metadata)


async def mesh_load(url: str, model: str, path: Path) -> None:
    """Call loadModel with messages written by hand: fields 1 and 3 are strings."""
    fields = ((0x0A, model.encode()), (0x1A, str(path).encode()))
    message = b"".join(bytes((tag, len(text))) + text for tag, text in fields)
    async with grpc.aio.insecure_channel(url) as channel:
        await channel.unary_unary("/mmesh.ModelRuntime/loadModel")(message)


async def test_the_service_answers_by_the_name_in_its_message(
    serve: Serve, example_models: Path, messages: ModuleType
) -> None:
    settings = {"service": (FACTORY,), "load_model": ("digits",)}
    async with serve(example_models, **settings) as server:
        answer = await read(server.url, messages, "digits", SEVEN.read_bytes())

    assert (7, "digits") == (answer.digit, answer.model_id)


@pytest.mark.parametrize("named", ["", "whatever the client wrote"])
async def test_the_id_of_the_mesh_reaches_a_service_that_knows_nothing_of_it(
    mesh: RunningServer, example_models: Path, messages: ModuleType, named: str
) -> None:
    """The header is spliced into a nested field of the request, at the advertised path."""
    await mesh_load(mesh.url, "digits-isvc-1", example_models / "digits")
    answer = await read(mesh.url, messages, named, SEVEN.read_bytes(), mm_model_id="digits-isvc-1")

    assert (7, "digits-isvc-1") == (answer.digit, answer.model_id)


async def test_its_methods_are_advertised_with_their_paths(mesh: RunningServer) -> None:
    async with grpc.aio.insecure_channel(mesh.url) as channel:
        answer = await channel.unary_unary("/mmesh.ModelRuntime/runtimeStatus")(b"")

    # A map entry: the key, and a MethodInfo with the packed numbers 2 and 1.
    assert (
        b"\x0a\x1bexample.digits.Digits/Read\x12\x04\x0a\x02\x02\x01".replace(
            b"\x1b", bytes([len(METHOD) - 1])
        )
        in answer
    )


async def test_it_is_listed_and_described(mesh: RunningServer) -> None:
    async with grpc.aio.insecure_channel(mesh.url) as channel:
        make_stub: Any = reflection_pb2_grpc.ServerReflectionStub
        stub = make_stub(channel)
        requests = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="example.digits.Digits"),
        ]
        listed, described = [answer async for answer in stub.ServerReflectionInfo(iter(requests))]
    file = descriptor_pb2.FileDescriptorProto.FromString(
        described.file_descriptor_response.file_descriptor_proto[0]
    )

    assert "example.digits.Digits" in [s.name for s in listed.list_services_response.service]
    assert "digits.proto" == file.name


async def test_its_errors_have_the_statuses_of_the_server(
    mesh: RunningServer, messages: ModuleType
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as unknown:
        await read(mesh.url, messages, "nope", SEVEN.read_bytes())
    with pytest.raises(grpc.aio.AioRpcError) as invalid:
        await read(mesh.url, messages, "nope", b"not a picture")

    assert ["NOT_FOUND", "INVALID_ARGUMENT"] == [
        error.value.code().name for error in (unknown, invalid)
    ]


async def test_the_client_of_the_example(example_models: Path, programs: str) -> None:
    flags = ("--service", FACTORY, "--model-control-mode", "explicit", "--load-model", "digits")
    async with served(example_models, *flags, programs=programs) as server:
        status, out, err = await run(
            sys.executable, str(FOLDER / "client.py"), str(SEVEN), server.url
        )

    assert (0, "") == (status, err)
    assert out.startswith("7 (")


NO_SERVICES = {
    "nowhere.py:create": "no such file: nowhere.py",
    "no_such_module:create": "no such module: 'no_such_module'",
    "json:nothing": "json has no 'nothing'",
    "json.decoder:NaN": "is a float, expected a function",
    "builtins:repr": "returned a str, expected an xlaserve.Service",
    "nonsense": "expected FILE.py:NAME or MODULE:NAME",
}


@pytest.mark.parametrize("reference", NO_SERVICES)
async def test_what_is_no_service_is_refused_at_start(tmp_path: Path, reference: str) -> None:
    settings = Settings(
        repository=tmp_path, grpc_endpoint="port:0", http_endpoint="none", service=(reference,)
    )
    with pytest.raises(InvalidReference, match=NO_SERVICES[reference]):
        async with Application(settings).running():
            pass
