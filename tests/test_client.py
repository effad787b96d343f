"""The Python client against a server, over gRPC and REST."""

import asyncio
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer
from support.python_models import write
from support.server import RunningServer, serving

from xlaserve.client import AsyncClient, CallFailed, Client, request
from xlaserve.dialing.interface import ModelTensors
from xlaserve.dialing.over_grpc import Client as GrpcClient
from xlaserve.dialing.over_grpc import write_request as to_grpc
from xlaserve.dialing.over_rest import write_request as to_rest
from xlaserve.dialing.rest_stream import read_event
from xlaserve.errors import InvalidRequest
from xlaserve.grpc.protobuf.codec import WireCodec
from xlaserve.tensors import BYTES, TensorSpec
from xlaserve_proto import inference as pb

KINDS = """
from xlaserve import Answer
import json

class Kinds(PythonModel):
    decoded = True
    inputs = {"x": ("BYTES", [-1, 1])}
    outputs = {"y": ("BYTES", [-1, 1]), "said": ("BYTES", [1])}

    def infer(self, inputs, request):
        said = {"of": {n: dict(p) for n, p in request.input_parameters.items()}, "id": request.id}
        outputs = {"y": inputs["x"], "said": {**said, "all": dict(request.parameters)}}
        return Answer(outputs, {"count": 3}, {"y": {"unit": "m"}})
"""
DOCUMENT = """
class Document(PythonModel):
    decoded = True
    inputs = outputs = {"x": ("BYTES", [1])}

    def infer(self, inputs):
        return inputs
"""
TABLE = """
class Table(PythonModel):
    decoded = True
    inputs = outputs = {"n": ("INT64", [1]), "s": ("BYTES", [1])}
    max_batch_size = 8

    def infer(self, frame):
        return frame.assign(n=frame["n"] * 2, s=frame["s"].str.upper())
"""

COUNTING = """
class Counting(PythonModel):
    decoupled = True
    inputs = outputs = {"n": ("INT64", [1])}

    async def infer(self, inputs):
        count = int(inputs["n"][0])
        if count < 0:
            raise InferenceError("counts up only")
        for each in range(count):
            if count == 99 and each == 2:
                raise InferenceError("tired of counting")
            yield {"n": np.array([each])}
"""
WORDS = """
class Words(PythonModel):
    decoupled = True
    inputs = {"t": ("BYTES", [-1, 1])}
    outputs = {"t": ("BYTES", [-1, 1]), "f": ("FP32", [-1, 2])}

    async def infer(self, inputs, request):
        for _ in range(int(request.parameters.get("times", 1))):
            yield {"t": inputs["t"], "f": np.array([[1.5, np.inf]], np.float32)}
"""

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningServer]:
    root: Path = tmp_path_factory.mktemp("models")
    write(root, "kinds", KINDS)
    write(root, "document", DOCUMENT)
    write(root, "table", TABLE)
    write(root, "counting", COUNTING)
    write(root, "words", WORDS)
    scratch = tmp_path_factory.mktemp("scratch")
    settings: dict[str, Any] = {"load_model": ("*",), "allow_python_models": True}
    async with serving(scratch, root, http_endpoint="port:0", **settings) as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module", params=["grpc", "http"])
async def client(
    server: RunningServer, request: pytest.FixtureRequest
) -> AsyncIterator[AsyncClient]:
    url = server.url if request.param == "grpc" else f"http://{server.http}"
    async with AsyncClient(url) as found:
        yield found


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (["cat", "naïve", ""], "str"),
        ([b"\xff\x00", b""], "base64"),
        ([datetime(2026, 1, 2, 3, 4), datetime(2026, 1, 2, tzinfo=UTC)], "datetime"),
        (np.array([[b"a"], [b"\xff"]], object), "np"),
    ],
)
async def test_values_come_back_by_their_content_type(
    client: AsyncClient, value: Any, kind: str
) -> None:
    answer = await client.infer("kinds", {"x": value}, id="i", parameters={"mine": 1})

    assert np.array_equal(value, answer["y"])
    assert type(value) is type(answer["y"])
    assert {"of": {"x": {"content_type": kind}}, "id": "i", "all": {"mine": 1}} == answer[
        "said"
    ] | {"all": {k: v for k, v in answer["said"]["all"].items() if k != "binary_data_output"}}
    assert ("kinds", "1", "i", {"count": 3}) == (
        *(answer.model, answer.version, answer.id),
        answer.parameters,
    )
    assert {"content_type": kind, "unit": "m"} == answer.output_parameters["y"]
    assert ["y", "said"] == list(answer)


async def test_outputs_are_wanted_by_name_and_content_type(client: AsyncClient) -> None:
    names = await client.infer("kinds", {"x": ["YQ=="]}, outputs=["y"])
    kinds = await client.infer("kinds", {"x": [b"a"]}, content_type="str", outputs={"y": "str"})
    own = await client.infer("kinds", {"x": [b"a"]}, content_types={"x": "base64"}, outputs=["y"])

    assert {"y": ["YQ=="]} == names.value
    assert {"y": ["a"]} == kinds.value
    assert {"y": [b"a"]} == own.value


async def test_a_document_comes_back(client: AsyncClient) -> None:
    answer = await client.infer("document", {"x": {"a": [1, None, "b"]}})

    assert {"a": [1, None, "b"]} == answer["x"]
    assert (1,) == answer.tensors["x"].shape


async def test_a_data_frame_comes_back(client: AsyncClient) -> None:
    pandas: Any = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"n": [1, 2], "s": ["cat", "dog"]})
    answer = await client.infer("table", frame)

    assert {"n": [2, 4], "s": ["CAT", "DOG"]} == answer.value.to_dict("list")


@pytest.mark.parametrize(
    ("inputs", "kind", "problem"),
    [
        ({"x": [1]}, "str", "model 'kinds', input 'x': expected texts, got int"),
        ({"x": "cat"}, "str", "model 'kinds', input 'x': expected a list of texts, got str"),
        ({"x": ["cat"]}, "xml", "model 'kinds', input 'x': expected a content_type of np, str"),
        ({"x": np.zeros(1, np.complex64)}, "", "a datatype of the protocol, got complex64"),
    ],
)
async def test_what_cannot_be_written_names_the_input(
    client: AsyncClient, inputs: Any, kind: str, problem: str
) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        await client.infer("kinds", inputs, content_type=kind)


async def test_what_the_server_refuses_is_raised_by_the_call(client: AsyncClient) -> None:
    with pytest.raises(CallFailed, match="'none'"):
        await client.infer("none", {"x": ["a"]})
    with pytest.raises(CallFailed, match="input 'x': expected base64"):
        await client.infer(
            "kinds", {"x": np.array([[b"!"]], object)}, content_types={"x": "base64"}
        )

    assert await client.live()
    assert await client.ready()


async def test_nobody_at_the_address_is_a_failed_call(unused_tcp_port: int) -> None:
    for url in (f"127.0.0.1:{unused_tcp_port}", f"http://127.0.0.1:{unused_tcp_port}"):
        async with AsyncClient(url) as client:
            with pytest.raises(CallFailed, match="cannot connect"):
                await client.live()


@pytest.mark.parametrize("over", ["grpc", "http"])
async def test_code_that_is_no_coroutine_asks_from_many_threads(
    server: RunningServer, over: str
) -> None:
    url = server.url if over == "grpc" else f"http://{server.http}"

    def ask() -> list[Any]:
        with Client(url) as client, ThreadPoolExecutor(4) as pool:
            assert client.live()
            assert client.ready()
            return list(pool.map(lambda n: client.infer("kinds", {"x": [str(n)]})["y"], range(16)))

    assert [[str(number)] for number in range(16)] == await asyncio.to_thread(ask)


async def test_a_client_that_is_not_open_says_so(server: RunningServer) -> None:
    client = Client(server.url)
    with pytest.raises(RuntimeError, match="use it as a context manager"):
        client.live()
    with pytest.raises(InvalidRequest, match="expected one of grpc://"), Client("ftp://there"):
        pass


ROW = {"name": "y", "datatype": "BYTES", "shape": [1], "data": ["a"]}
STRANGE: list[Any] = [
    [{**ROW, "parameters": {"content_type": "base64"}}],
    [{**ROW, "parameters": [1]}],
    [ROW, {**ROW, "name": "z", "shape": [2], "data": ["a", "b"]}],
    [{**ROW, "parameters": {"binary_data_size": 99}}],
]


@pytest.mark.parametrize("outputs", STRANGE)
async def test_an_answer_that_is_not_what_it_says_is_a_failed_call(outputs: Any) -> None:
    async def answer(request: web.Request) -> web.Response:
        parameters = {"content_type": "pd"} if len(outputs) > 1 else None
        return web.json_response({"model_name": "m", "parameters": parameters, "outputs": outputs})

    application = web.Application()
    application.router.add_post("/v2/models/m/infer", answer)
    async with TestServer(application) as strange, AsyncClient(str(strange.make_url("/"))) as asked:
        with pytest.raises(CallFailed):
            await asked.infer("m", {"x": ["a"]})


async def test_content_types_of_others_are_not_decoded() -> None:
    async def answer(request: web.Request) -> web.Response:
        row = {**ROW, "parameters": {"content_type": ["x"]}}
        return web.json_response({"model_name": "m", "outputs": [row]})

    application = web.Application()
    application.router.add_post("/v2/models/m/infer", answer)
    async with TestServer(application) as strange, AsyncClient(str(strange.make_url("/"))) as asked:
        found = await asked.infer("m", {"x": ["a"]})

    assert [b"a"] == found["y"].tolist()


MLSERVER = {
    "str": (
        ["cat", "naïve", ""],
        [3, 1],
        "1503000000636174060000006e61c3af766500000000",
    ),
    "base64": ([b"\xff\x00", b""], [2, 1], "0c040000002f77413d00000000"),
    "datetime": (
        [datetime(2026, 1, 2, 3, 4), datetime(2026, 1, 2, tzinfo=UTC)],
        [2, 1],
        "3413000000323032362d30312d30325430333a30343a303019000000323032362d30312d30325430303a3030"
        "3a30302b30303a3030",
    ),
    "np": (np.array([[1.5, 2.5]], np.float32), [1, 2], "080000c03f00002040"),
}
"""The output of MLServer 1.7.1: shapes, and raw contents with their length in hex."""


@pytest.mark.parametrize("kind", MLSERVER)
async def test_tensors_have_the_bytes_of_mlservers_codecs(kind: str) -> None:
    """Made by MLServer 1.7.1's `ModelInferRequestConverter.from_types(..., use_raw=True)`."""
    value, shape, raw = MLSERVER[kind]
    made = request("m", {"x": value})
    message = to_grpc(made)
    headers, body = to_rest(made)
    head = json.loads(body[: int(headers["Inference-Header-Content-Length"])])
    row = head["inputs"][0]

    elements = bytes.fromhex(raw)
    assert elements == bytes([len(elements) - 1]) + message.raw_input_contents[0]
    assert shape == message.inputs[0].shape == row["shape"]
    assert kind == message.inputs[0].parameters["content_type"].string_param
    assert {"content_type": kind, "binary_data_size": len(elements) - 1} == row["parameters"]
    assert body.endswith(message.raw_input_contents[0])


async def test_a_frame_has_the_bytes_of_mlservers_codec() -> None:
    """As above, without the empty `contents` (2a 00) that MLServer adds to each input."""
    pandas: Any = pytest.importorskip("pandas")
    mlservers = (
        "0a016d22140a0c636f6e74656e745f7479706512041a0270642a100a016e1205494e5436341a0202012a00"
        "2a270a0173120542595445531a02020122150a0c636f6e74656e745f7479706512051a037374722a003a10"
        "010000000000000002000000000000003a0e0300000063617403000000646f67"
    )
    without = mlservers.replace(
        "2a100a016e1205494e5436341a0202012a00", "2a0e0a016e1205494e5436341a020201"
    )
    without = without.replace("2a270a0173", "2a250a0173").replace("7374722a003a", "7374723a")
    frame = pandas.DataFrame({"n": [1, 2], "s": ["cat", "dog"]})

    assert without == WireCodec().encode_message(to_grpc(request("m", frame))).hex()


async def test_a_stream_yields_each_answer(client: AsyncClient) -> None:
    """Including empty streams, and model errors before and after the first answer."""
    found = [one async for one in client.stream("counting", {"n": np.array([3])}, id="i")]
    none = [one async for one in client.stream("counting", {"n": np.array([0])})]
    with pytest.raises(CallFailed, match="counts up only"):
        await anext(client.stream("counting", {"n": np.array([-1])}))
    with pytest.raises(CallFailed, match="unknown model: 'nobody'"):
        await anext(client.stream("nobody", {"n": np.array([1])}))
    broken = client.stream("counting", {"n": np.array([99])})
    before = [int((await anext(broken))["n"][0]) for _ in range(2)]
    with pytest.raises(CallFailed, match="tired of counting"):
        await anext(broken)

    assert ([0, 1, 2], ["i"] * 3) == ([int(one["n"][0]) for one in found], [o.id for o in found])
    assert ("counting", "1", np.dtype("<i8"), (1,)) == (
        *(found[0].model, found[0].version),
        *(found[0]["n"].dtype, found[0]["n"].shape),
    )
    assert ([], [0, 1]) == (none, before)


async def test_a_stream_of_texts_and_parameters(client: AsyncClient) -> None:
    """Texts become bytes, and shapes follow from the metadata."""
    asked = {"t": ["naïve", "x"]}
    found = [one async for one in client.stream("words", asked, parameters={"times": 2})]

    assert 2 == len(found)
    assert [["na\xefve".encode()], [b"x"]] == found[0].tensors["t"].tolist()
    assert [[[1.5, np.inf]], np.float32] == [
        found[1].tensors["f"].tolist(),
        found[1].tensors["f"].dtype,
    ]


async def test_the_text_of_a_language_model_has_the_name_of_its_output() -> None:
    """`generate_stream` names it `text_output`, unless the model has an output of that name."""
    text, own = (TensorSpec(name, BYTES, (1,)) for name in ("text", "text_output"))
    said = {"model_name": "m", "text_output": "hello", "finish_reason": "stop"}
    found = read_event(said, ModelTensors([], [text]), 0.0)
    other = read_event(said, ModelTensors([], [text, own]), 0.0)

    assert ({"text": [b"hello"]}, {"finish_reason": "stop"}) == (
        {name: value.tolist() for name, value in found.outputs.items()},
        found.parameters,
    )
    assert ["text_output"] == list(other.outputs)


@pytest.mark.parametrize("over", ["grpc", "http"])
async def test_a_stream_for_code_that_is_no_coroutine(server: RunningServer, over: str) -> None:
    """The client stays usable after a loop over a stream is left early."""
    url = server.url if over == "grpc" else f"http://{server.http}"

    def _ask() -> tuple[list[int], int]:
        with Client(url) as client:
            answers = client.stream("counting", {"n": np.array([1000])})
            first = int(next(answers)["n"][0])
            answers.close()
            rest = client.stream("counting", {"n": np.array([2])})
            return [int(one["n"][0]) for one in rest], first

    assert ([0, 1], 0) == await asyncio.to_thread(_ask)


async def test_a_stream_over_rest_takes_texts_alone(server: RunningServer) -> None:
    async with AsyncClient(f"http://{server.http}") as client:
        with pytest.raises(InvalidRequest, match="input 't': expected texts in UTF-8"):
            await anext(client.stream("words", {"t": np.array([[b"\xff"]], object)}))


@pytest.mark.parametrize(
    "sent",
    [b"data: [1]\n\n", b"data: {\n\n", b'data: {"n": "a"}\n\n', b'data: {"n": 1}', b"data: 1\n\n"],
)
async def test_a_stream_that_is_none_is_a_failed_call(sent: bytes) -> None:
    async def describe(_: web.Request) -> web.Response:
        tensor = {"name": "n", "datatype": "INT64", "shape": [1]}
        return web.json_response({"name": "m", "inputs": [tensor], "outputs": [tensor]})

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=sent, content_type="text/event-stream")

    application = web.Application()
    application.router.add_get("/v2/models/m", describe)
    application.router.add_post("/v2/models/m/generate_stream", answer)
    async with TestServer(application) as strange, AsyncClient(str(strange.make_url("/"))) as asked:
        with pytest.raises(CallFailed, match="expected a stream of events"):
            await anext(asked.stream("m", {"n": np.array([1])}))


async def test_models_are_described_loaded_and_unloaded(client: AsyncClient) -> None:
    metadata = await client.metadata("kinds")
    states = {entry.name: entry.state for entry in await client.index()}
    await client.unload("document")
    unloaded = {entry.name: entry.state for entry in await client.index()}
    await client.load("document")
    configuration = await client.configuration("document")
    (statistics,) = await client.statistics("document")

    assert ["x"] == [one["name"] for one in metadata["inputs"]]
    assert ("READY", "UNAVAILABLE") == (states["document"], unloaded["document"])
    assert ("document", "document") == (configuration["name"], statistics["name"])


@pytest.mark.parametrize(
    ("failures", "status", "retries", "sequence", "calls"),
    [
        (2, 503, 3, False, 3),
        (2, 429, 2, False, 3),
        (2, 503, 1, False, 2),
        (1, 503, 0, False, 1),
        (1, 400, 3, False, 1),
        (1, 503, 3, True, 1),
    ],
)
async def test_what_another_try_may_answer_is_sent_again(
    failures: int, status: int, retries: int, sequence: bool, calls: int
) -> None:
    seen = 0

    async def _infer(_: web.Request) -> web.Response:
        nonlocal seen
        seen += 1
        if seen <= failures:
            return web.json_response({"error": "not now"}, status=status)
        return web.json_response({"model_name": "m", "outputs": []})

    made = web.Application()
    made.router.add_post("/v2/models/m/infer", _infer)
    parameters = {"sequence_id": 7} if sequence else {}
    async with TestServer(made) as server:
        url = f"http://127.0.0.1:{server.port}"
        async with AsyncClient(url, retries=retries) as client:
            if calls > failures:
                assert "m" == (await client.infer("m", {}, parameters=parameters)).model
            else:
                with pytest.raises(CallFailed, match=f"HTTP {status}"):
                    await client.infer("m", {}, parameters=parameters)

    assert calls == seen


@pytest.mark.parametrize("scheme", ["", "http://"])
async def test_a_call_has_a_timeout_of_its_own(scheme: str) -> None:
    """The timeout also ends retries: this server never answers."""
    ended = asyncio.Event()

    async def _silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ended.wait()
        writer.close()

    listening = await asyncio.start_server(_silent, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    try:
        async with AsyncClient(f"{scheme}127.0.0.1:{port}", timeout=600, retries=9) as client:
            with pytest.raises(CallFailed, match="no answer in time"):
                await client.infer("m", {}, timeout=0.2)
    finally:
        ended.set()
        listening.close()


@pytest.mark.slow
async def test_the_statistics_of_thousands_of_models_are_read() -> None:
    """A server limits the fields of a request to far fewer than its own answers may have."""
    one = pb.ModelStatistics(name="m", version="1", inference_count=1, execution_count=1)
    sent = bytes(pb.ModelStatisticsResponse(model_stats=[one] * 30_000))
    codec = GrpcClient("127.0.0.1:1", timeout=1).codec

    assert 30_000 == len(codec.decode(sent, pb.ModelStatisticsResponse).model_stats)
