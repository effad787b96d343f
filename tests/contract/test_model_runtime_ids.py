"""Which model a mesh's request addresses: acceptance cases 17 to 19."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from support import mesh
from support.engines import own_engine_only
from support.mesh import id_headers, message, splice
from support.runtime import Runtime, StartRuntime, endpoint_at
from support.shelf import Shelf, addition, sums
from support.wire import base64_unpadded, connect, request_headers

from xlaserve.settings.choices import Http2Engine

INFER = "/inference.GRPCInferenceService/ModelInfer"


@pytest.fixture(params=["unix", pytest.param("port", marks=pytest.mark.slow)])
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Both kinds of endpoint, even without large tests."""
    return endpoint_at(request.param, tmp_path)


@pytest.fixture
async def two(start: StartRuntime, models: Shelf) -> AsyncIterator[Runtime]:
    """A runtime with the models `one` and `two`, which add their number."""
    async with start() as runtime:
        await runtime.mesh.load("one", models.path("plus-1"))
        await runtime.mesh.load("two", models.path("plus-2"))
        yield runtime


async def ask(runtime: Runtime, request: Any, *headers: tuple[str, str | bytes]) -> Any:
    """Send a request with these headers only."""
    data = request if isinstance(request, bytes) else request.SerializeToString()
    return await runtime.mesh.raw("ModelInfer", data, headers=headers)


# --- 17: Ids -------------------------------------------------------------------------------------

IDS = {
    "plain": "simple__isvc-0123456789",
    "spaces": "a model of mine",
    "spaces around": "  a model ",
    "slashes": "a/b//c/",
    "dots": "../../etc/passwd",
    "dot": "..",
    "comma": "a,b, c",
    "percent": "100%25",
    "quotes": "'\"\\ {id}",
    "accents": "modèle",
    "others": "模型\U0001f600",
    "zero": "a\0b\n",
    "long": "x" * 1024,
    "long and wide": "é" * 512,
}


@pytest.mark.parametrize("name", IDS)
async def test_any_text_is_an_id(runtime: Runtime, models: Shelf, name: str) -> None:
    """Case 17: load, infer, size and unload with the id in base64 and ASCII."""
    model = IDS[name]
    await runtime.mesh.load(model, models.path("plus-1"))
    answer = await runtime.mesh.infer(model, addition(1, 2))
    described = await runtime.mesh.call("ModelMetadata", model, b"")
    ready = await runtime.mesh.call("ModelReady", model, b"")
    size = (await runtime.mesh.size(model)).sizeInBytes
    await runtime.mesh.unload(model)
    gone = await mesh.code(runtime.mesh.infer(model, addition()))

    assert ([2, 3], model) == (sums(answer), answer.model_name)
    assert model == described.name
    assert ready.ready
    assert size > 0
    assert "NOT_FOUND" == gone


@pytest.mark.parametrize("header", [("mm-model-id", "two"), ("mm-model-id-bin", b"two")])
async def test_either_header_is_enough(two: Runtime, header: tuple[str, str | bytes]) -> None:
    """Case 17: the message does not name the model."""
    assert [2, 2] == sums(await ask(two, addition(), header))


async def test_base64_comes_without_padding_or_with_it(two: Runtime) -> None:
    """Case 17: the mesh omits the padding, others may add it."""
    request = addition().SerializeToString()
    async with connect(two.url) as wire:
        for value in (base64_unpadded("two"), "dHdv", base64_unpadded("one"), "b25l"):
            stream = wire.send(request_headers(INFER, ("mm-model-id-bin", value)), request)

            assert "0" == (await wire.trailers(stream))["grpc-status"]


async def test_without_a_header_the_message_counts(two: Runtime) -> None:
    """Case 17: for clients that connect without a mesh."""
    answer = await ask(two, addition(name="two"))

    assert ([2, 2], "two") == (sums(answer), answer.model_name)


async def test_the_id_of_a_virtual_model_chooses_nothing(two: Runtime) -> None:
    """Case 17: it is only logged, so an invalid one is no error."""
    for value in ("one", "nonsense"):
        answer = await ask(two, addition(name="two"), ("mm-vmodel-id", value))

        assert [2, 2] == sums(answer)


# --- 18: Conflicting names -----------------------------------------------------------------------


@pytest.mark.parametrize("named", ["one", "unknown", "", "two"])
async def test_the_header_beats_the_message(two: Runtime, named: str) -> None:
    """Case 18: the name in the client's message is ignored."""
    answer = await ask(two, addition(name=named), *id_headers("two"))

    assert ([2, 2], "two") == (sums(answer), answer.model_name)


@pytest.mark.parametrize("injection", ["path", "header"])
@pytest.mark.parametrize("place", ["before", "after", "twice after"])
async def test_a_second_name_does_not_get_past_the_mesh(
    start: StartRuntime, models: Shelf, injection: str, place: str
) -> None:
    """Case 18: the mesh rewrites the first name, parsers use the last one, the header wins."""
    async with start(id_injection=injection) as runtime:
        await runtime.mesh.load("one", models.path("plus-1"))
        await runtime.mesh.load("two", models.path("plus-2"))
        first, second = (addition(name="two").SerializeToString(), splice(b"", [1], b"one"))
        smuggled = {
            "before": second + first,
            "after": first + second,
            "twice after": first + second + second,
        }[place]
        answer = await runtime.mesh.infer("two", smuggled)
        described = await runtime.mesh.call("ModelMetadata", "two", second + second)

    assert ([2, 2], "two") == (sums(answer), answer.model_name)
    assert "two" == described.name


CONTRADICTIONS: Mapping[str, Sequence[tuple[str, str | bytes]]] = {
    "they differ": [("mm-model-id", "one"), ("mm-model-id-bin", b"two")],
    "ASCII twice": [("mm-model-id", "two"), ("mm-model-id", "two")],
    "ASCII twice, different": [("mm-model-id", "one"), ("mm-model-id", "two")],
    "base64 twice": [("mm-model-id-bin", b"two"), ("mm-model-id-bin", b"two")],
    "base64 twice, different": [("mm-model-id-bin", b"one"), ("mm-model-id-bin", b"two")],
    "empty": [("mm-model-id", "")],
    "empty in base64": [("mm-model-id-bin", b"")],
    "one is empty": [("mm-model-id", ""), ("mm-model-id-bin", b"two")],
    "not UTF-8": [("mm-model-id-bin", b"\xff\xfe")],
    "too long": [("mm-model-id-bin", b"x" * 5000)],
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
async def test_headers_that_contradict_themselves_are_refused(two: Runtime, name: str) -> None:
    """Case 18: INVALID_ARGUMENT that names the header."""
    for method in ("ModelInfer", "ModelMetadata", "ModelReady"):
        request = message(f"inference.{method}Request").SerializeToString()
        call = two.mesh.raw(method, request, headers=CONTRADICTIONS[name])
        status, text = await mesh.outcome(call)

        assert "INVALID_ARGUMENT" == status
        assert "mm-model-id" in text
        assert not mesh.lost((status, text))


# --- 19: The message -----------------------------------------------------------------------------

UNKNOWN_FIELDS = (
    splice(b"", [777], b"something") + splice(b"", [19, 1, 1], b"deep") + b"\xf8\x01\x05"
)


def without_name(request: Any) -> bytes:
    """Serialize a request to which the mesh will append the name."""
    data: bytes = request.SerializeToString()

    assert not request.model_name

    return data


SHAPES: Mapping[str, Callable[[], bytes]] = {
    "first": lambda: addition(5, 6, name="client's").SerializeToString(),
    "last": lambda: without_name(addition(5, 6)),
    "empty": lambda: splice(without_name(addition(5, 6)), [1], b""),
    "unknown fields before": lambda: UNKNOWN_FIELDS + addition(5, 6, name="x").SerializeToString(),
    "unknown fields after": lambda: addition(5, 6, name="x").SerializeToString() + UNKNOWN_FIELDS,
    "unknown fields, appended": lambda: UNKNOWN_FIELDS + without_name(addition(5, 6)),
    "longer": lambda: addition(5, 6, name="y" * 200).SerializeToString(),
    "with an id": lambda: addition(5, 6, name="x", id="42").SerializeToString(),
}
"""Forms of a client's request before the mesh writes the id."""


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("injection", ["path", "header"])
async def test_wherever_the_name_stands_the_answer_is_the_same(
    start: StartRuntime, models: Shelf, injection: str, shape: str
) -> None:
    """Case 19: in both modes the answer names the id that the mesh asked for."""
    async with start(id_injection=injection) as runtime:
        await runtime.mesh.load("two", models.path("plus-2"))
        answer = await runtime.mesh.infer("two", SHAPES[shape]())

    assert ([7, 8], "two") == (sums(answer), answer.model_name)
    assert ("42" if shape == "with an id" else "") == answer.id


async def test_an_injected_request_compiles_nothing(two: Runtime, compilations: list[str]) -> None:
    """Case 19: programs warmed under the client's name serve the id as well."""
    for shape in SHAPES.values():
        await two.mesh.infer("one", shape())

    assert [] == compilations


VECTORS = {
    "0a02766d1201311a01373a020102": "0a196d792d6d6f64656c5f5f697376632d30313233343536373839"
    "1201311a01373a020102",
    "1a01373a020102": "1a01373a0201020a196d792d6d6f64656c5f5f697376632d30313233343536373839",
}
"""Requests before and after the mesh's id injection, in hexadecimal."""


@pytest.mark.parametrize("before", VECTORS)
def test_the_client_splices_as_the_mesh_does(before: str) -> None:
    """Case 19: our test client reproduces the mesh's known results."""
    spliced = splice(bytes.fromhex(before), [1], b"my-model__isvc-0123456789")

    assert bytes.fromhex(VECTORS[before]) == spliced


# --- Fast path and general path ------------------------------------------------------------------

HEADERS: Mapping[str, Sequence[tuple[str, str | bytes]]] = {
    **CONTRADICTIONS,
    "both": id_headers("two"),
    "ASCII": [("mm-model-id", "two")],
    "base64": [("mm-model-id-bin", b"two")],
    "wide": [("mm-model-id-bin", "modèle".encode())],
    "unknown": id_headers("unknown"),
    "a virtual model": [("mm-vmodel-id", "two")],
    "a model and a virtual one": [*id_headers("two"), ("mm-vmodel-id-bin", b"\xff")],
    "something else": [("mm-balanced", "true")],
    "with a deadline": [*id_headers("two"), ("grpc-timeout", "20S")],
}

REQUESTS: Mapping[str, Callable[[], bytes]] = {
    **SHAPES,
    "the same name": lambda: addition(5, 6, name="two").SerializeToString(),
    "the name twice": lambda: addition(1, 2, name="two").SerializeToString() + b"\x0a\x03one",
    "a name that is no text": lambda: b"\x0a\x02\xff\xfe" + addition(1, 2).SerializeToString(),
    "a name that is a number": lambda: b"\x08\x01" + addition(1, 2).SerializeToString(),
    "a name of a million bytes": lambda: addition(1, 2, name="y" * 10**6).SerializeToString(),
    "ten thousand names": lambda: b"\x0a\x01x" * 10_000 + addition(1, 2).SerializeToString(),
    "cut off": lambda: addition(1, 2, name="two").SerializeToString()[:-1],
    "a name that is cut off": lambda: b"\x0a\x05tw",
    "nothing": lambda: b"",
    "another version": lambda: addition(1, name="two", model_version="7").SerializeToString(),
    "no number": lambda: addition(1, name="two", model_version="x").SerializeToString(),
    "a wrong tensor": lambda: addition(1, 2, name="two").SerializeToString() + b"\x3a\x01x",
    "no tensor": lambda: message("inference.ModelInferRequest", id="7").SerializeToString(),
}


async def answer_to(runtime: Runtime, request: bytes, headers: Any) -> tuple[str, object]:
    try:
        return "OK", await ask(runtime, request, *headers)
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details()


@own_engine_only
async def test_the_fast_path_answers_as_the_way_through_grpclib(
    start: StartRuntime, models: Shelf
) -> None:
    """Cases 17 to 19: headers mean the same on both paths."""
    different, statuses = [], set()
    port = {"grpc_endpoint": "port:0"}
    async with start(**port) as short, start(**port, http2_engine=Http2Engine.H2) as long:
        for runtime in (short, long):
            for name in ("one", "two", "modèle"):
                await runtime.mesh.load(name, models.path("plus-2"))
        for head, headers in HEADERS.items():
            for name, make in REQUESTS.items():
                request = make()
                answers = [await answer_to(runtime, request, headers) for runtime in (short, long)]
                statuses.add(answers[0][0])
                if answers[0] != answers[1]:
                    different.append((head, name, answers))

    assert [] == different
    assert statuses == {"OK", "NOT_FOUND", "INVALID_ARGUMENT", "INTERNAL", "RESOURCE_EXHAUSTED"}
