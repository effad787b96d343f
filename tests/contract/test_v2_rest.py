"""The KServe compatible RESTful API, section by section, in the order of its document.

Where the document shows a curl command, the test runs curl.
"""

import io
import json
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.curl import curl
from support.http import Answer, ask, connect, message
from support.server import RunningServer, Serve

HEADER = "Inference-Header-Content-Length"


def identity(datatype: str, *dims: int, batch: int = 8) -> dict[str, Any]:
    return {
        "backend": "identity",
        "max_batch_size": batch,
        "input": [{"name": "model_input", "data_type": f"TYPE_{datatype}", "dims": list(dims)}],
        "output": [{"name": "output0", "data_type": f"TYPE_{datatype}", "dims": list(dims)}],
    }


MODELS = {
    "my_model": identity("FP32", 300, 300, 3),
    "mymodel": identity("FP32", 2),
    "strings": identity("STRING", 1),
    "wide": identity("INT64", -1),
}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, example_models: Path) -> Path:
    """Identity models with the names in the document's examples, and `simple`."""
    root = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.json").write_text(json.dumps(config))
    (root / "simple").symlink_to(example_models / "simple")
    return root


@pytest.fixture
async def server(
    serve: Serve, repository: Path, example_models: Path
) -> AsyncIterator[RunningServer]:
    loaded = (*MODELS, "simple")
    async with serve(
        repository, http_endpoint="port:0", load_model=loaded, model_root=(example_models,)
    ) as running:
        yield running


@pytest.fixture
def url(server: RunningServer) -> str:
    return f"http://{server.http}"


@pytest.fixture
def address(server: RunningServer) -> str:
    assert server.http is not None
    return server.http


async def infer(address: str, model: str, request: Any, *binary: bytes) -> Answer:
    """Send JSON, followed by binary tensors."""
    head = json.dumps(request).encode()
    headers = [(HEADER, str(len(head)))] if binary else []
    return await ask(
        address, "POST", f"/v2/models/{model}/infer", *headers, body=head + b"".join(binary)
    )


def taken_apart(answer: Answer) -> tuple[Any, bytes]:
    """Return the JSON and the tensors of a binary answer."""
    length = int(answer.headers[HEADER.lower()])
    return json.loads(answer.body[:length]), answer.body[length:]


# --- Server Live API ---------------------------------------------------------------------------


async def test_server_live(url: str) -> None:
    answer = await curl(f"{url}/v2/health/live")

    assert (200, "application/json") == (answer.status, answer.headers["content-type"])
    assert {"live": True} == answer.json


# --- Server Ready API --------------------------------------------------------------------------


async def test_server_ready(url: str) -> None:
    answer = await curl(f"{url}/v2/health/ready")

    assert (200, {"ready": True}) == (answer.status, answer.json)


async def test_a_server_that_is_not_ready_is_live(server: RunningServer, url: str) -> None:
    server.application.control.begin_shutdown()
    ready = await curl(f"{url}/v2/health/ready")
    live = await curl(f"{url}/v2/health/live")

    reason = "the server is shutting down"
    assert (400, {"ready": False, "reason": reason}) == (ready.status, ready.json)
    assert 200 == live.status


# --- Server Metadata API -----------------------------------------------------------------------


async def test_server_metadata(url: str) -> None:
    answer = await curl(f"{url}/v2")

    assert 200 == answer.status
    assert "xlaserve" == answer.json["name"]
    assert answer.json["version"]
    assert {"model_repository", "binary_tensor_data"} <= set(answer.json["extensions"])


# --- Model Ready API ---------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["", "/versions/1"])
async def test_model_ready(url: str, version: str) -> None:
    answer = await curl(f"{url}/v2/models/simple{version}/ready")

    assert (200, {"name": "simple", "ready": True}) == (answer.status, answer.json)


async def test_a_model_that_is_not_loaded_is_not_ready(address: str) -> None:
    await ask(address, "POST", "/v2/repository/models/simple/unload")
    answer = await ask(address, "GET", "/v2/models/simple/ready")

    assert (400, {"name": "simple", "ready": False}) == (answer.status, answer.json)


@pytest.mark.parametrize("path", ["nope", "simple/versions/7"])
async def test_readiness_of_what_there_is_not(address: str, path: str) -> None:
    answer = await ask(address, "GET", f"/v2/models/{path}/ready")

    assert 404 == answer.status
    assert answer.error.startswith("Request for unknown model")


# --- Model Metadata API ------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["", "/versions/1"])
async def test_model_metadata(url: str, version: str) -> None:
    answer = await curl(f"{url}/v2/models/my_model{version}")

    assert 200 == answer.status
    assert {
        "name": "my_model",
        "versions": ["1"],
        "platform": "identity",
        "inputs": [{"name": "model_input", "datatype": "FP32", "shape": [-1, 300, 300, 3]}],
        "outputs": [{"name": "output0", "datatype": "FP32", "shape": [-1, 300, 300, 3]}],
    } == answer.json


async def test_metadata_of_an_unknown_model(address: str) -> None:
    answer = await ask(address, "GET", "/v2/models/nope")

    assert 404 == answer.status
    assert "Request for unknown model: 'nope' is not found" == answer.error


async def test_the_models_that_answer(address: str) -> None:
    answer = await ask(address, "GET", "/v2/models")

    assert {"models": sorted([*MODELS, "simple"])} == answer.json


# --- Inference API: JSON -----------------------------------------------------------------------


@pytest.mark.parametrize("version", ["", "/versions/1"])
@pytest.mark.parametrize("nested", [True, False])
async def test_inference_on_json(url: str, version: str, nested: bool) -> None:
    """tensor_data is multi-dimensional or flat; only the element count is validated."""
    data: Any = [[1.5, 2], [3, -4]] if nested else [1.5, 2, 3, -4]
    tensor = {"name": "model_input", "shape": [2, 2], "datatype": "FP32", "data": data}
    request = {"id": "42", "parameters": {"x": 1}, "inputs": [tensor], "model_name": "ignored"}
    answer = await curl(
        f"{url}/v2/models/mymodel{version}/infer",
        *("--header", "Content-Type: application/json", "--data", json.dumps(request)),
    )

    assert (200, "application/json") == (answer.status, answer.headers["content-type"])
    assert {
        "model_name": "mymodel",
        "model_version": "1",
        "id": "42",
        "outputs": [
            {"name": "output0", "datatype": "FP32", "shape": [2, 2], "data": [1.5, 2, 3, -4]}
        ],
    } == answer.json


async def test_inference_of_a_jax_model(address: str) -> None:
    row = {"shape": [1, 16], "datatype": "INT32"}
    inputs = [
        {"name": "INPUT0", "data": list(range(16)), **row},
        {"name": "INPUT1", "data": [[2] * 16], **row},
    ]
    answer = await infer(address, "simple", {"inputs": inputs, "outputs": [{"name": "OUTPUT1"}]})

    assert [("OUTPUT1", [n - 2 for n in range(16)])] == [
        (output["name"], output["data"]) for output in answer.json["outputs"]
    ]


async def test_strings_are_json_strings(address: str) -> None:
    tensor = {"name": "model_input", "shape": [2, 1], "datatype": "BYTES", "data": ["a", "€\0"]}
    answer = await infer(address, "strings", {"inputs": [tensor]})

    assert ["a", "€\0"] == answer.json["outputs"][0]["data"]


async def test_integers_of_64_bits_are_exact(address: str) -> None:
    data = [2**63 - 1, -(2**63), 2**53 + 1]
    tensor = {"name": "model_input", "shape": [1, 3], "datatype": "INT64", "data": data}
    answer = await infer(address, "wide", {"inputs": [tensor]})

    assert data == answer.json["outputs"][0]["data"]


# --- Inference API: encoded images and raw data ------------------------------------------------


def encoded(kind: str, color: tuple[int, int, int] = (255, 0, 128)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (30, 20), color).save(file, kind)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
async def test_an_encoded_image(address: str, kind: str) -> None:
    """The document's example: no binary_data_size, and the length before the image."""
    image = encoded(kind)
    tensor = {"name": "model_input", "shape": [1], "datatype": "BYTES"}
    request = {"model_name": "my_model", "inputs": [tensor]}
    binary_output = {"outputs": [{"name": "output0", "parameters": {"binary_data": True}}]}
    answer = await infer(
        address, "my_model", request | binary_output, struct.pack("<I", len(image)) + image
    )
    described, data = taken_apart(answer)
    pixels = np.frombuffer(data, np.float32).reshape(1, 300, 300, 3)

    assert [1, 300, 300, 3] == described["outputs"][0]["shape"]
    np.testing.assert_allclose([255, 0, 128], pixels[0, 150, 150], atol=2)


async def test_a_batch_of_encoded_images(address: str) -> None:
    colors = [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
    images = [encoded("PNG", color) for color in colors]
    tensor = {"name": "model_input", "shape": [3], "datatype": "BYTES"}
    request = {"inputs": [tensor], "parameters": {"binary_data_output": True}}
    parts = [struct.pack("<I", len(image)) + image for image in images]
    _, data = taken_apart(await infer(address, "my_model", request, b"".join(parts)))
    pixels = np.frombuffer(data, np.float32).reshape(3, 300, 300, 3)

    np.testing.assert_array_equal(colors, pixels[:, 150, 150])


async def test_raw_data(address: str) -> None:
    """The document's other example: FP32 of [3,300,300,3], 3 240 000 bytes."""
    x = np.random.default_rng(0).random((3, 300, 300, 3), np.float32)
    tensor = {"name": "model_input", "shape": [3, 300, 300, 3], "datatype": "FP32"}
    request = {"model_name": "my_model", "inputs": [tensor]}
    binary = {"parameters": {"binary_data_output": True}}
    answer = await infer(address, "my_model", request | binary, x.tobytes())
    described, data = taken_apart(answer)

    assert 3 * 1080000 == len(data) == described["outputs"][0]["parameters"]["binary_data_size"]
    assert x.tobytes() == data


async def test_raw_data_by_curl(url: str, tmp_path: Path) -> None:
    """The body is large enough for curl to send Expect: 100-continue."""
    x = np.arange(8 * 270000, dtype=np.float32)
    head = b'{"inputs":[{"name":"model_input","shape":[8,300,300,3],"datatype":"FP32"}]}'
    (tmp_path / "body").write_bytes(head + x.tobytes())
    answer = await curl(
        *("--header", "Content-Type: application/octet-stream"),
        *("--header", f"{HEADER}: {len(head)}"),
        *("--data-binary", f"@{tmp_path / 'body'}", f"{url}/v2/models/my_model/infer"),
    )

    assert x.tolist() == answer.json["outputs"][0]["data"]


async def test_strings_in_the_binary_extension(address: str) -> None:
    """Each string is preceded by its length in four bytes, little-endian."""
    tensor = {"name": "model_input", "shape": [2, 1], "datatype": "BYTES"}
    packed = b"\1\0\0\0a\3\0\0\0\xe2\x82\xac"
    answer = await infer(address, "strings", {"inputs": [tensor]}, packed)

    assert ["a", "€"] == answer.json["outputs"][0]["data"]


# --- Inference API: the response ---------------------------------------------------------------


async def test_a_binary_output(address: str) -> None:
    """The document's example: the answer of FP32 [2,2] carries 16 bytes."""
    x = np.array([[1, 2], [3, 4]], np.float32)
    tensor = {"name": "model_input", "shape": [2, 2], "datatype": "FP32", "data": x.tolist()}
    output = {"name": "output0", "parameters": {"binary_data": True}}
    answer = await infer(address, "mymodel", {"inputs": [tensor], "outputs": [output]})
    described, data = taken_apart(answer)

    assert "application/octet-stream" == answer.headers["content-type"]
    assert [
        {
            "name": "output0",
            "datatype": "FP32",
            "shape": [2, 2],
            "parameters": {"binary_data_size": 16},
        }
    ] == described["outputs"]
    assert x.tobytes() == data


async def test_a_raw_request(address: str) -> None:
    """With an empty JSON header the whole body is the tensor, and the answer is binary."""
    x = np.array([1, 2], np.float32)
    answer = await ask(address, "POST", "/v2/models/mymodel/infer", (HEADER, "0"), body=x.tobytes())

    assert x.tobytes() == taken_apart(answer)[1]


async def test_an_error(address: str) -> None:
    tensor = {"name": "model_input", "shape": [1, 2], "datatype": "FP32", "data": [1]}
    answer = await infer(address, "mymodel", {"inputs": [tensor]})

    assert (400, "application/json") == (answer.status, answer.headers["content-type"])
    assert (
        "model 'mymodel', input 'model_input': expected 2 elements for FP32[1,2], got 1 elements"
        == answer.error
    )


@pytest.mark.parametrize("end", ["//..", "/..", "//", "/../infer"])
async def test_a_path_is_not_truncated(address: str, end: str) -> None:
    """The document warns of `//..` at the end of a path; here it matches no route."""
    tensor = {"name": "model_input", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}
    async with connect(address) as connection:
        answer = await connection.ask(
            message(
                "POST",
                f"/v2/models/mymodel/infer{end}",
                body=json.dumps({"inputs": [tensor]}).encode(),
            )
        )

    assert 404 == answer.status
    assert end in answer.error


# --- Digits as JSON, binary tensors, and bare files ----------------------------------------------


@pytest.fixture
async def digits(serve: Serve, example_models: Path) -> AsyncIterator[str]:
    async with serve(example_models, load_model=("digits",), http_endpoint="port:0") as running:
        assert running.http is not None
        yield running.http


def seven(kind: str, example_models: Path) -> bytes:
    picture = Image.open(example_models.parent / "data/seven.png")
    file = io.BytesIO()
    picture.resize((64, 64), Image.Resampling.NEAREST).save(file, kind)
    return file.getvalue()


async def recognised(address: str, image: bytes, form: str) -> Any:
    """Return the digit that the model recognizes, or the answer if it is an error."""
    if form == "raw":
        answer = await ask(address, "POST", "/v2/models/digits/infer", (HEADER, "0"), body=image)
    else:
        request = {"inputs": [{"name": "image", "shape": [1], "datatype": "BYTES"}]}
        binary = struct.pack("<I", len(image)) + image if form == "prefixed" else image
        answer = await infer(address, "digits", request, binary)
    if answer.status != 200:
        return answer
    if form == "raw":
        return np.argmax(np.frombuffer(taken_apart(answer)[1], np.float32))
    return np.argmax(answer.json["outputs"][0]["data"])


async def test_a_digit_is_recognised(
    digits: str, example_models: Path, subtests: pytest.Subtests
) -> None:
    """As the extension says, like OVMS's clients with a single image, and as a bare file."""
    for kind in ("JPEG", "PNG"):
        for form in ("prefixed", "bare", "raw"):
            with subtests.test(kind=kind, form=form):
                assert 7 == await recognised(digits, seven(kind, example_models), form)


async def test_the_file_of_the_readme_is_recognised(digits: str, example_models: Path) -> None:
    """A raw file whose size happens to equal the tensor's would be taken for the tensor."""
    file = (example_models.parent / "data" / "seven.png").read_bytes()

    assert 7 == await recognised(digits, file, "raw")
