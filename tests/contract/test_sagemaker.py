"""SageMaker's container contract for multi-model endpoints, in the order of its document.

Then /ping, /invocations and both modes, which the document takes for granted.
"""

import asyncio
import errno
import io
import json
import os
import re
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jax.errors
import numpy as np
import pytest
from PIL import Image
from structlog.testing import capture_logs
from support.curl import curl
from support.http import Answer, ask
from support.process import START_SECONDS, ServerProcess, command
from support.server import RunningServer, Serve

import xlaserve
from xlaserve.files.roots import Roots
from xlaserve.runtime import loaders
from xlaserve.runtime.exported import jax_export
from xlaserve.runtime.programs import programs
from xlaserve.serving.engine import Engine
from xlaserve.serving.inference import InferRequest, InferResponse

JSON, CSV, NPY = "application/json", "text/csv", "application/x-npy"
LINES = "application/jsonlines"
BINARY = "application/vnd.sagemaker-triton.binary+json"
LENGTH = "Inference-Header-Content-Length"
TARGET_MODEL = "X-Amzn-SageMaker-Target-Model"
ATTRIBUTES = "X-Amzn-SageMaker-Custom-Attributes"


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory, example_models: Path) -> Path:
    """Archives as the platform unpacks them: <name>/model is a model or a version of one."""
    root = tmp_path_factory.mktemp("opt") / "ml/models"
    xlaserve.export_model(
        lambda p, x: {"y": x + p["v"]},
        {"v": np.full((1, 2), 1, np.float32)},
        {"x": ("FP32", [-1, 2])},
        root / "plus/model/1",
        max_batch_size=4,
    )
    for name in ("digits", "simple"):
        (root / name).mkdir()
        (root / name / "model").symlink_to(example_models / name)
    for name, datatype, dims in (("texts", "STRING", [1]), ("deep", "FP32", [2, 2])):
        tensor = {"data_type": f"TYPE_{datatype}", "dims": dims}
        config = {
            "backend": "identity",
            "max_batch_size": 4,
            "input": [{"name": "x", **tensor}],
            "output": [{"name": "y", **tensor}],
        }
        (root / name / "model/1").mkdir(parents=True)
        (root / name / "model/config.json").write_text(json.dumps(config))
    (root / "broken/model").mkdir(parents=True)
    return root


@pytest.fixture
async def server(
    serve: Serve, archives: Path, example_models: Path, tmp_path: Path
) -> AsyncIterator[RunningServer]:
    """A multi-model container whose model directory does not exist yet."""
    async with serve(
        tmp_path / "later",
        sagemaker=True,
        sagemaker_multi_model=True,
        http_endpoint="port:0",
        model_root=(archives, example_models),
    ) as running:
        yield running


class Client:
    """The platform and the invoking clients."""

    def __init__(self, address: str | None, archives: Path) -> None:
        assert address is not None
        self.address = address
        self._archives = archives

    def url(self, archive: str) -> str:
        return str(self._archives / archive / "model")

    async def load(self, name: str, archive: str = "plus") -> Answer:
        return await self.post("/models", {"model_name": name, "url": self.url(archive)})

    async def loaded(self, *names: str) -> None:
        for name in names:
            answer = await self.load(name, name if (self._archives / name).exists() else "plus")
            assert 200 == answer.status, answer.body

    async def post(self, path: str, body: Any, *headers: tuple[str, str]) -> Answer:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await ask(self.address, "POST", path, *headers, body=data)

    async def get(self, path: str) -> Answer:
        return await ask(self.address, "GET", path)

    async def delete(self, name: str) -> Answer:
        return await ask(self.address, "DELETE", f"/models/{quote(name, safe='')}")

    async def invoke(
        self,
        name: str,
        body: Any,
        content_type: str = "",
        accept: str = "",
        *headers: tuple[str, str],
    ) -> Answer:
        given = (("Content-Type", content_type), ("Accept", accept))
        more = [(header, value) for header, value in given if value]
        return await self.post(f"/models/{quote(name, safe='')}/invoke", body, *more, *headers)

    async def names(self) -> list[str]:
        return [model["modelName"] for model in (await self.get("/models")).json["models"]]


@pytest.fixture
def client(server: RunningServer, archives: Path) -> Client:
    return Client(server.http, archives)


# --- Load Model API ----------------------------------------------------------------------------


async def test_load_model(client: Client) -> None:
    """A loaded model is served under the name in the request."""
    body = json.dumps({"model_name": "{model_name}", "url": client.url("plus")})
    types = ("-H", f"Content-Type: {JSON}", "-H", f"Accept: {JSON}")
    answer = await curl("-X", "POST", *types, "-d", body, f"http://{client.address}/models")

    assert (200, JSON, {}) == (answer.status, answer.headers["content-type"], answer.json)
    assert [[2, 3]] == (await client.invoke("{model_name}", [[1, 2]])).json["predictions"]


async def test_loading_a_loaded_model_is_a_conflict(client: Client) -> None:
    await client.loaded("m")
    answer = await client.load("m", "digits")

    assert (409, "model 'm' is loaded already, unload it first") == (answer.status, answer.error)


async def test_of_two_loads_at_once_one_is_a_conflict(client: Client) -> None:
    answers = await asyncio.gather(client.load("m"), client.load("m"))

    assert [200, 409] == sorted(answer.status for answer in answers)


async def test_a_load_without_memory_is_507_before_the_device_is_asked(
    client: Client, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The platform then unloads another model, and retries."""
    await client.loaded("m")
    capacity = server.application.capacity
    size = capacity.used_bytes
    # A second model with the same computation only adds its parameters.
    capacity.limit({"cpu:0": size})
    compiled: list[object] = []
    compile_buckets = programs.Compiler.compile

    def spy(*arguments: Any) -> None:
        compiled.append(arguments)
        compile_buckets(*arguments)

    monkeypatch.setattr(programs.Compiler, "compile", spy)
    refused = await client.load("n")

    assert (507, []) == (refused.status, compiled)
    assert f"bytes on cpu:0, where 0 of {size} are free" in refused.error
    capacity.limit({"cpu:0": size + size // 2})
    assert [200, 200] == [(await client.delete("m")).status, (await client.load("n")).status]
    assert (["n"], 1, size) == (await client.names(), len(compiled), capacity.used_bytes)


async def test_a_load_right_behind_another_needs_no_more_than_is_held(
    serve: Serve, archives: Path, example_models: Path, tmp_path: Path
) -> None:
    """Memory for background compilation is reserved bucket by bucket, not all at once."""
    predicted = loaders.predict_size(example_models / "digits/1")["cpu:0"]
    capacity_bytes = predicted * 3 // 2
    async with serve(
        tmp_path / "later",
        sagemaker=True,
        sagemaker_multi_model=True,
        http_endpoint="port:0",
        model_root=(archives, example_models),
        background_compile=True,
        capacity_bytes=capacity_bytes,
    ) as running:
        client = Client(running.http, archives)
        answers = [await client.load(name, "digits") for name in ("a", "b")]
        used = running.application.capacity.used_bytes
        names = await client.names()

    assert [200, 200] == [answer.status for answer in answers], answers[1].body
    assert used < capacity_bytes < 2 * predicted
    assert ["a", "b"] == names


async def test_a_load_that_exhausts_the_device_is_507(
    client: Client, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*arguments: object) -> object:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes.")

    with monkeypatch.context() as patch:
        patch.setattr(programs, "warmed", exhausted)
        answer = await client.load("m")

    assert (507, 0) == (answer.status, server.application.capacity.used_bytes)
    assert "RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes." in answer.error
    assert 200 == (await client.load("m")).status


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.EMFILE, 503),
        (errno.ENFILE, 503),
        (errno.EDQUOT, 507),
        (errno.EIO, 400),
        (errno.EACCES, 400),
    ],
    ids=errno.errorcode.get,
)
async def test_a_load_that_lacks_files_or_space_is_no_fault_of_the_model(
    client: Client, monkeypatch: pytest.MonkeyPatch, number: int, expected: int
) -> None:
    """Load Model API, "memory or other resources": another model has to be unloaded.

    A file that cannot be read is the model's fault.
    """

    def refuse(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(Roots, "open", refuse)
        answer = await client.load("m")

    assert expected == answer.status, answer.body
    assert os.strerror(number) in answer.error
    assert "'m'" in answer.error
    assert [] == await client.names()
    assert 200 == (await client.load("m")).status


async def test_a_model_called_room_is_not_out_of_memory(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*arguments: object) -> object:
        raise jax.errors.JaxRuntimeError("INTERNAL: OOM, no RESOURCE_EXHAUSTED here")

    monkeypatch.setattr(programs, "warmed", failing)

    assert 400 == (await client.load("ROOM")).status


LOAD_FAULTS: Sequence[tuple[bytes, str]] = (
    (b"", "missing required field `model_name`"),
    (b"{", "the body is not the expected JSON:"),
    (b"[]", "Expected `object`, got `array`"),
    (b'{"model_name": "m"}', "missing required field `url`"),
    (b'{"url": "/opt"}', "missing required field `model_name`"),
    (b'{"model_name": 7, "url": "/opt"}', "Expected `str`, got `int`"),
    (b'{"model_name": "", "url": "/opt"}', "model name '' is not allowed"),
    (
        b'{"model_name": "m", "url": "/etc"}',
        "is outside the model repository and every model_root (--model-root), or a link that"
        " leads outside",
    ),
    (
        b'{"model_name": "m", "url": "ARCHIVES/../../../etc"}',
        "is outside the model repository and every model_root (--model-root), or a link that"
        " leads outside",
    ),
    (b'{"model_name": "m", "url": "/dev/mem"}', "a kernel file system: '/dev/mem'"),
    (b'{"model_name": "m", "url": "/proc/1"}', "a kernel file system: '/proc/1'"),
    (b'{"model_name": "m", "url": "/sys/x"}', "a kernel file system: '/sys/x'"),
    (b'{"model_name": "m", "url": "s3://b/m.tar.gz"}', "is not an absolute path"),
    (b'{"model_name": "m", "url": "ARCHIVES/none"}', "nothing found at"),
    (b'{"model_name": "m", "url": "ARCHIVES/broken/model"}', "model.json is missing"),
)


@pytest.mark.parametrize(("body", "text"), LOAD_FAULTS)
async def test_a_load_that_names_no_model_is_400(
    client: Client, archives: Path, body: bytes, text: str
) -> None:
    answer = await client.post("/models", body.replace(b"ARCHIVES", str(archives).encode()))

    assert (400, []) == (answer.status, await client.names())
    assert text in answer.error


async def test_nothing_is_loaded_unless_clients_may(serve: Serve, archives: Path) -> None:
    settings = {"http_endpoint": "port:0", "model_control_mode": "none"}
    async with serve(archives / "simple", **settings) as server:
        client = Client(server.http, archives)
        answers = [await client.load("m"), await client.delete("m")]

    assert [503, 503] == [answer.status for answer in answers]
    assert all("--model-control-mode explicit" in answer.error for answer in answers)


# --- List Model API ----------------------------------------------------------------------------


async def test_list_models(client: Client) -> None:
    empty = await curl("-H", f"Accept: {JSON}", f"http://{client.address}/models")
    await client.loaded("b", "a")
    both = await client.get("/models/")

    assert (200, {"models": []}) == (empty.status, empty.json)
    assert {
        "models": [
            {"modelName": "a", "modelUrl": client.url("plus")},
            {"modelName": "b", "modelUrl": client.url("plus")},
        ]
    } == both.json


async def pages(client: Client, limit: str) -> list[list[str]]:
    """Follow the page tokens to the last page."""
    found, token = [], ""
    while True:
        query = f"?limit={limit}" + (f"&next_page_token={token}" if token else "")
        page = (await client.get(f"/models{query}")).json
        found.append([model["modelName"] for model in page["models"]])
        token = quote(page.get("nextPageToken", ""))
        if not token:
            return found


async def test_a_list_comes_in_pages(client: Client) -> None:
    """Without nextPageToken there are no more models, so a full last page has none."""
    names = ["a/b", "c", "d e", "ключ"]
    for name in names:
        assert 200 == (await client.load(name, "texts")).status

    assert [names[:2], names[2:]] == await pages(client, "2")
    assert [names[:3], names[3:]] == await pages(client, "3")
    assert [[names], [names], [names], [names]] == [
        await pages(client, limit) for limit in ("4", "0", "-1", "101")
    ]


async def test_a_page_has_a_hundred_models_at_most(client: Client) -> None:
    names = [f"{index:03}" for index in range(101)]
    for name in names[:100]:
        await client.load(name, "texts")

    assert [names[:100]] == await pages(client, "")

    await client.load(names[100], "texts")

    assert [names[:100], names[100:]] == await pages(client, "1000")


@pytest.mark.parametrize(
    ("query", "parameter"),
    [
        ("limit=ten", "limit"),
        ("limit=1.5", "limit"),
        (f"limit={'9' * 5000}", "limit"),
        ("next_page_token=7", "next_page_token"),
        ("next_page_token=%ff", "next_page_token"),
        ("next_page_token=_w==", "next_page_token"),
    ],
)
async def test_a_page_that_cannot_be_is_400(client: Client, query: str, parameter: str) -> None:
    answer = await client.get(f"/models?{query}")

    assert 400 == answer.status
    assert f"parameter '{parameter}'" in answer.error


# --- Get Model API -----------------------------------------------------------------------------


async def test_get_model(client: Client) -> None:
    await client.loaded("m")
    answer = await curl("-H", f"Accept: {JSON}", f"http://{client.address}/models/m")

    assert (200, {"modelName": "m", "modelUrl": client.url("plus")}) == (
        answer.status,
        answer.json,
    )


NAMES = ["a/b", "a b", "ключ", "..", "%2F", "a?b#c", '"', "0" * 1024]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
async def test_names_are_opaque(client: Client, name: str) -> None:
    """A name only matches as a whole, whatever it looks like."""
    path = f"/models/{quote(name, safe='')}"
    answers = [
        await client.load(name),
        await client.get(path),
        await client.invoke(name, [[1, 2]]),
        await client.delete(name),
        await client.get(path),
    ]

    assert [200, 200, 200, 200, 404] == [answer.status for answer in answers]
    assert name == answers[1].json["modelName"]


@pytest.mark.parametrize("path", ["/models/m", "/models/%ff", "/models/..", "/models/a%2Fb"])
async def test_what_is_not_loaded_is_404(client: Client, path: str) -> None:
    answers = [
        await client.get(path),
        await ask(client.address, "DELETE", path),
        await client.post(f"{path}/invoke", [[1, 2]]),
    ]

    assert [404, 404, 404] == [answer.status for answer in answers]
    assert all(answer.error.startswith("Request for unknown model: ") for answer in answers)


# --- Unload Model API --------------------------------------------------------------------------


async def test_unload_model(client: Client, server: RunningServer) -> None:
    """The model's resources are freed when the answer arrives."""
    await client.loaded("m")
    used = server.application.capacity.used_bytes
    answer = await curl("-X", "DELETE", f"http://{client.address}/models/m")
    left = server.application.capacity.used_bytes

    assert (200, {}, 0) == (answer.status, answer.json, left)
    assert used > 0
    assert [] == await client.names()
    assert 404 == (await client.delete("m")).status


# --- Invoke Model API --------------------------------------------------------------------------


async def test_invoke_model(client: Client) -> None:
    await client.loaded("m")
    headers = (
        f"Content-Type: {JSON}",
        f"Accept: {JSON}",
        f"{ATTRIBUTES}: trace=7",
        f"{TARGET_MODEL}: models/plus.tar.gz",
    )
    options = [option for header in headers for option in ("-H", header)]
    url = f"http://{client.address}/models/m/invoke"
    answer = await curl("-X", "POST", *options, "-d", "[[1, 2], [3, 4]]", url)

    assert (200, JSON) == (answer.status, answer.headers["content-type"])
    assert {"predictions": [[2, 3], [4, 5]]} == answer.json


@pytest.fixture
def inferred(monkeypatch: pytest.MonkeyPatch) -> list[InferRequest]:
    """Collect the engine's inference requests."""
    requests: list[InferRequest] = []
    infer = Engine.infer

    async def spy(engine: Engine, request: InferRequest) -> InferResponse:
        requests.append(request)
        return await infer(engine, request)

    monkeypatch.setattr(Engine, "infer", spy)
    return requests


async def test_what_the_platform_says_is_logged_and_handed_on(
    client: Client, inferred: list[InferRequest]
) -> None:
    """Truncated to a limit; the path still decides which model is used."""
    await client.loaded("m")
    said = ((TARGET_MODEL, "b/n.tar.gz"), (ATTRIBUTES, "é" * 5000))
    with capture_logs() as log:
        answer = await client.invoke("m", [[1, 2]], JSON, "", *said)
    expected = {
        "sagemaker_target_model": "b/n.tar.gz",
        "sagemaker_custom_attributes": "é" * 1024,
    }

    assert 200 == answer.status
    assert [expected] == [request.parameters for request in inferred]
    assert [expected | {"model": "m"}] == [
        {name: value for name, value in record.items() if name not in ("event", "log_level")}
        for record in log
        if record["event"] == "invoked"
    ]


def v2(*rows: Sequence[float], **more: Any) -> dict[str, Any]:
    tensor = {"name": "x", "datatype": "FP32", "shape": [len(rows), 2], "data": rows}
    return {"inputs": [tensor], **more}


def v2_binary(*rows: Sequence[float], **more: Any) -> tuple[int, bytes]:
    """Return the length of the JSON, and the body."""
    data = np.array(rows, np.float32).tobytes()
    request = v2(*rows, **more)
    (tensor,) = request["inputs"]
    del tensor["data"]
    tensor["parameters"] = {"binary_data_size": len(data)}
    head = json.dumps(request).encode()
    return len(head), head + data


async def test_a_v2_request_is_answered_in_v2(client: Client) -> None:
    await client.loaded("m")
    answers = [
        await client.invoke("m", v2([1, 2], id="7"), content_type, accept)
        for content_type in ("", JSON, f"{JSON}; charset=utf-8")
        for accept in ("", "*/*", JSON)
    ]
    tensor = {"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [2.0, 3.0]}
    expected = {"model_name": "m", "model_version": "1", "id": "7", "outputs": [tensor]}

    assert [(200, JSON, expected)] * 9 == [
        (answer.status, answer.headers["content-type"], answer.json) for answer in answers
    ]


async def test_binary_tensors_with_their_length_in_the_media_type(client: Client) -> None:
    """The platform drops custom headers, and nothing is compressed."""
    await client.loaded("m")
    length, body = v2_binary([1, 2], parameters={"binary_data_output": True})
    content_type = f"{BINARY};json-header-size={length}"
    encoding = ("Accept-Encoding", "gzip")
    answer = await client.invoke("m", body, content_type, "", encoding)
    media_type, _, size = answer.headers["content-type"].partition(";json-header-size=")
    head = json.loads(answer.body[: int(size)])

    assert (200, BINARY) == (answer.status, media_type)
    assert "content-encoding" not in answer.headers
    assert {"binary_data_size": 8} == head["outputs"][0]["parameters"]
    assert [2, 3] == np.frombuffer(answer.body[int(size) :], np.float32).tolist()


@pytest.mark.parametrize(
    ("content_type", "headers"),
    [
        ("application/octet-stream", True),
        (JSON, True),
        ("", True),
        (f'{BINARY}; JSON-Header-Size="LENGTH"', False),
    ],
)
async def test_binary_tensors_of_other_senders(
    client: Client, content_type: str, headers: bool
) -> None:
    """The answer has the length in both headers."""
    await client.loaded("m")
    length, body = v2_binary([1, 2], outputs=[{"name": "y", "parameters": {"binary_data": True}}])
    more = [(LENGTH, str(length))] if headers else []
    answer = await client.invoke("m", body, content_type.replace("LENGTH", str(length)), "", *more)
    size = answer.headers[LENGTH.lower()]

    assert (200, f"{BINARY};json-header-size={size}") == (
        answer.status,
        answer.headers["content-type"],
    )


async def test_a_tensor_alone_is_answered_by_tensors(client: Client) -> None:
    """Binary data without a JSON size has no JSON, as with json-header-size=0."""
    await client.loaded("m")
    data = np.array([[1, 2], [3, 4]], np.float32).tobytes()
    for content_type in ("application/octet-stream", f"{BINARY};json-header-size=0"):
        answer = await client.invoke("m", data, content_type)
        size = int(answer.headers[LENGTH.lower()])

        assert [2, 3, 4, 5] == np.frombuffer(answer.body[size:], np.float32).tolist()


@pytest.mark.parametrize(
    "parameter",
    ["", ";json-header-size", ";json-header-size=", ";json-header-size=-1", ";json-header-size=x",
     ";json-header-size=1.0", ";json-header-size=1000", f";json-header-size={'9' * 30}",
     ";json-header-size=3", ";header-size=3", ";json-header-size=٣"],
)  # fmt: skip
async def test_a_length_that_is_not_that_of_the_json_is_400(client: Client, parameter: str) -> None:
    await client.loaded("m")
    _, body = v2_binary([1, 2])
    answer = await client.invoke("m", body, BINARY + parameter)

    assert 400 == answer.status
    assert answer.error


def npy(*rows: Sequence[float]) -> bytes:
    file = io.BytesIO()
    np.save(file, np.array(rows, np.float32))
    return file.getvalue()


RAW: Sequence[tuple[str, bytes]] = (
    ("", b"[[1, 2]]"),
    (JSON, b"[[1, 2]]"),
    (JSON, b"[1, 2]"),
    (JSON, b'{"instances": [[1, 2]]}'),
    (CSV, b"1,2\n"),
    ("Text/CSV; charset=utf-8", b"1,2\n"),
    (NPY, npy([1, 2])),
)


@pytest.mark.parametrize(("content_type", "body"), RAW)
async def test_bare_tensors_for_models_with_one_input(
    client: Client, content_type: str, body: bytes
) -> None:
    """In the format that the Accept header asks for."""
    await client.loaded("m")
    answers = [
        await client.invoke("m", body, content_type, accept)
        for accept in ("", "*/*", JSON, CSV, NPY, f"{CSV};q=0.5, {NPY}")
    ]
    array = npy([2, 3])

    assert [(200, JSON)] * 3 + [(200, CSV), (200, NPY), (200, NPY)] == [
        (answer.status, answer.headers["content-type"]) for answer in answers
    ]
    assert [b'{"predictions":[[2.0,3.0]]}'] * 3 + [b"2.0,3.0\n"] == [a.body for a in answers[:4]]
    assert [[[2, 3]]] * 2 == [np.load(io.BytesIO(a.body)).tolist() for a in answers[4:]]
    assert len(array) == len(answers[4].body)


async def test_a_bare_tensor_may_be_answered_in_v2(client: Client) -> None:
    await client.loaded("m")
    answer = await client.invoke("m", b"1,2", CSV, BINARY)
    size = int(answer.headers["content-type"].partition("=")[2])

    assert [2, 3] == np.frombuffer(answer.body[size:], np.float32).tolist()


async def test_texts_are_elements_of_bytes(client: Client) -> None:
    await client.loaded("texts")
    answers = [
        await client.invoke("texts", '[["é"], ["b, c"]]'.encode(), JSON),
        await client.invoke("texts", 'é\n"b, c"'.encode(), CSV, CSV),
    ]

    assert {"predictions": [["é"], ["b, c"]]} == answers[0].json
    assert 'é\n"b, c"\n' == answers[1].body.decode()


async def test_lines_of_json_are_rows(client: Client) -> None:
    """For batch transforms; the answer consists of lines if the client accepts them."""
    await client.loaded("plus", "texts")
    lines = await client.invoke("plus", b"[1, 2]\n\n[3, 4]\r\n", LINES, LINES)
    row = await client.invoke("plus", b"[1, 2]", LINES)
    texts = await client.invoke("texts", b'["a"]\n["b"]', LINES, LINES)

    assert (200, LINES, b"[2.0,3.0]\n[4.0,5.0]\n") == (
        lines.status,
        lines.headers["content-type"],
        lines.body,
    )
    assert {"predictions": [[2.0, 3.0]]} == row.json
    assert b'["a"]\n["b"]\n' == texts.body


@pytest.mark.parametrize("kind", ["png", "jpeg"])
async def test_an_image_is_decoded_for_the_model(
    client: Client, example_models: Path, kind: str
) -> None:
    """A real handwritten seven."""
    await client.loaded("digits")
    picture = Image.open(example_models.parent / "data/seven.png")
    file = io.BytesIO()
    picture.save(file, kind)
    for media_type in (f"image/{kind}", "application/x-image"):
        answer = await client.invoke("digits", file.getvalue(), media_type, CSV)

        assert 200 == answer.status, answer.body
        assert 7 == np.argmax([float(cell) for cell in answer.body.decode().split(",")])


INVOKE_FAULTS: Sequence[tuple[str, str, str, bytes, int, str]] = (
    # model, Content-Type, Accept, body, status, text
    ("plus", "text/html", "", b"x", 415, "expected a Content-Type of application/json, text/csv"),
    ("plus", "multipart/form-data", "", b"x", 415, "expected a Content-Type"),
    ("plus", JSON, "text/html", b"[[1, 2]]", 406, "expected an Accept of application/json"),
    ("deep", JSON, CSV, b"[[[1, 2], [3, 4]]]", 406, "expected an Accept of application/json"),
    ("texts", JSON, NPY, b'[["a"]]', 406, "expected an Accept of application/json"),
    ("simple", JSON, CSV, json.dumps({"inputs": [
        {"name": f"INPUT{i}", "datatype": "INT32", "shape": [1, 16], "data": [0] * 16}
        for i in range(2)]}).encode(), 406, "expected an Accept of application/json"),
    ("simple", JSON, "", b"[[1, 2]]", 400, "is for models with one input, it has 2"),
    ("simple", "image/png", "", b"x", 400, "is for models with one input, it has 2"),
    ("plus", JSON, "", b"", 400, "got an empty"),
    ("plus", JSON, "", b"[[1, 2]", 400, "JSON is malformed|truncated"),
    ("plus", JSON, "", b"{}", 400, "missing required field `inputs`"),
    ("plus", JSON, "", b'{"inputs": []}', 400, "expected 1 inputs but got 0"),
    ("plus", JSON, "", b"[" * 10_000, 400, "nested more than 100 levels deep"),
    ("plus", JSON, "", b"[[1, 2, 3]]", 400, r"expected FP32\[-1,2\], got FP32\[1,3\]"),
    ("plus", JSON, "", b'[["1", "2"]]', 400, "expected elements of FP32, got str"),
    ("plus", CSV, "", b"a,b", 400, "could not convert string 'a'"),
    ("plus", CSV, "", b"1,2\n" * 5, 400, "expected a batch of 1 to 4 rows"),
    ("plus", NPY, "", b"x", 400, "the body is not a .npy file of version 1, 2 or 3"),
    ("plus", NPY, "", npy([1, 2, 3]), 400, r"expected FP32\[-1,2\], got FP32\[1,3\]"),
    ("plus", "image/png", "", b"x", 400, r"input 'x'"),
    ("digits", "image/png", "", b"x", 400, "input 'image'"),
    ("plus", LINES, "", b"[1, 2]\n[1", 400, "line 2: expected a list in JSON"),
    ("plus", LINES, "", b"\n", 400, "blank lines"),
    ("plus", LINES, "", b"[1, 2]\n[1]", 400, "expected lists of equal length on each level,"
        " got lists of different lengths"),
    ("plus", LINES, "", b"[" * 10_000, 400, "nested more than 100 levels deep"),
    ("simple", "application/x-image", "", b"x", 400, "is for models with one input, it has 2"),
    ("digits", "application/x-image", "", b"x", 400, "input 'image'"),
)  # fmt: skip


@pytest.mark.parametrize("model", sorted({fault[0] for fault in INVOKE_FAULTS}))
async def test_what_a_model_cannot_be_asked(
    client: Client, model: str, subtests: pytest.Subtests
) -> None:
    await client.loaded(model)
    for of, content_type, accept, body, status, text in INVOKE_FAULTS:
        if of != model:
            continue
        with subtests.test(content_type=content_type, accept=accept, body=body[:40]):
            answer = await client.invoke(model, body, content_type, accept)

            assert status == answer.status, answer.body
            assert re.search(text, answer.error), answer.error


async def test_an_invocation_that_exhausts_the_device_is_507(
    client: Client, server: RunningServer
) -> None:
    """The platform unloads another model and retries; this model stays loaded."""
    await client.loaded("m")
    _, instance = server.application.registry.resolve("m")
    runner = instance.runner
    assert isinstance(runner, jax_export.JaxExportModel)
    (copy,) = runner._copies
    working = copy.table

    def exhausted(*arguments: object) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying")

    copy.table = replace(
        working, programs=tuple(replace(p, call=exhausted) for p in working.programs)
    )
    refused = await client.invoke("m", [[1, 2]])
    copy.table = working
    answered = await client.invoke("m", [[1, 2]])

    assert [507, 200] == [refused.status, answered.status]
    assert "model 'm': out of memory, RESOURCE_EXHAUSTED" in refused.error


# --- /ping and /invocations ----------------------------------------------------------------------


async def test_a_container_without_models_is_healthy(client: Client, server: RunningServer) -> None:
    answer = await curl(f"http://{client.address}/ping")

    assert (200, {"status": "Healthy"}) == (answer.status, answer.json)

    server.application.control.begin_shutdown()

    assert 503 == (await client.get("/ping")).status


async def test_invocations_go_to_the_only_model(client: Client) -> None:
    none = await client.post("/invocations", [[1, 2]])
    await client.loaded("m")
    one = await client.post("/invocations", [[1, 2]])
    await client.loaded("n")
    two = await client.post("/invocations", [[1, 2]])

    assert [400, 200, 400] == [answer.status for answer in (none, one, two)]
    assert {"predictions": [[2, 3]]} == one.json
    assert "2 models are loaded and default_model is not set" in two.error


async def test_a_wrong_method_is_405(client: Client) -> None:
    answers = [
        await ask(client.address, method, path)
        for method, path in (
            ("PUT", "/models"),
            ("POST", "/models/m"),
            ("GET", "/models/m/invoke"),
            ("GET", "/invocations"),
            ("POST", "/ping"),
        )
    ]

    assert [405] * 5 == [answer.status for answer in answers]


# --- A single model ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout",
    ["repository", *(pytest.param(name, marks=pytest.mark.slow) for name in ("model", "version"))],
)
async def test_the_only_model_is_there_from_the_start(
    serve: Serve, archives: Path, example_models: Path, tmp_path: Path, layout: str
) -> None:
    """From a repository with one model, a model, or a version; under its own name."""
    directory = tmp_path / "model"
    target = {"repository": "digits", "model": "", "version": ""}[layout]
    source = example_models / ("digits/1" if layout == "version" else "digits")
    (directory / target).parent.mkdir(parents=True, exist_ok=True)
    (directory / target).symlink_to(source)
    settings = {"sagemaker": True, "http_endpoint": "port:0", "model_root": (example_models,)}
    async with serve(directory, **settings) as server:
        client = Client(server.http, archives)
        ping = await client.get("/ping")
        models = await client.get("/models")
        answer = await client.post("/invocations", [[[0] * 8] * 8])

    assert [200, 200, 200] == [a.status for a in (ping, models, answer)]
    name = "digits" if layout == "repository" else "model"
    url = directory / name if layout == "repository" else directory
    assert {"models": [{"modelName": name, "modelUrl": str(url)}]} == models.json


@pytest.mark.slow
async def test_a_default_model_gets_the_invocations(
    serve: Serve, archives: Path, example_models: Path
) -> None:
    settings = {
        "sagemaker": True,
        "http_endpoint": "port:0",
        "default_model": "digits",
        "default_accept": CSV,
    }
    async with serve(example_models, **settings) as server:
        client = Client(server.http, archives)
        answer = await client.post("/invocations", [[[0] * 8] * 8])

    assert (200, CSV) == (answer.status, answer.headers["content-type"])


async def test_a_container_without_its_only_model_is_not_healthy(
    serve: Serve, archives: Path, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    async with serve(tmp_path / "model", sagemaker=True, http_endpoint="port:0") as server:
        client = Client(server.http, archives)
        answers = [await client.get("/ping"), await client.post("/invocations", [1])]

    assert [(503, {"status": "Unhealthy"}), (400, answers[1].json)] == [
        (answer.status, answer.json) for answer in answers
    ]


# --- Container -----------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probing:
        probing.bind(("127.0.0.1", 0))
        port: int = probing.getsockname()[1]
        return port


@pytest.mark.parametrize("multi_model", ["true", pytest.param("false", marks=pytest.mark.slow)])
async def test_serve_is_all_that_the_platform_says(
    example_models: Path, archives: Path, tmp_path: Path, multi_model: str
) -> None:
    """`docker run IMAGE serve`: all settings are in the environment. gRPC has no port here."""
    (tmp_path / "model").symlink_to(example_models / "digits")
    port = free_port()
    environment = {
        "XLASERVE_SAGEMAKER": "true",
        "XLASERVE_DEVICE": "cpu",
        "SAGEMAKER_BASE_DIR": str(tmp_path),
        "SAGEMAKER_BIND_TO_PORT": str(port),
        "SAGEMAKER_MULTI_MODEL": multi_model,
        "XLASERVE_MODEL_ROOT": f"{archives},{example_models}",
    }
    process = await asyncio.create_subprocess_exec(
        *command("serve"), stderr=asyncio.subprocess.PIPE, env=os.environ | environment
    )
    server = ServerProcess(process, [])
    try:
        async with asyncio.timeout(START_SECONDS):
            await server.until("started")
        running = Client(f"127.0.0.1:{port}", archives)
        ping = await running.get("/ping")
        if multi_model == "true":
            await running.loaded("digits")
        answer = await running.post("/invocations", [[[0] * 8] * 8])
        status = await server.stop()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()

    assert [200, 200, 0] == [ping.status, answer.status, status]
    assert (f"0.0.0.0:{port}", "none") == (server.http, server.url)
