"""Python models that read and write by content type, with the stock clients."""

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import tritonclient.grpc.aio as triton
import tritonclient.http.aio as triton_http
from support.asking import Client, client
from support.python_models import write
from support.server import Serve, serving

from xlaserve.model_config import mlserver_settings

CODE = """
from xlaserve import PythonModel, content_types


class Shouts(PythonModel):
    inputs = {"text": ("BYTES", [1])}
    outputs = {"shout": ("BYTES", [1])}
    max_batch_size = 8

    def infer(self, inputs, request):
        kind = request.parameters["content_type"]
        words = content_types.decode(inputs["text"], kind)
        return {"shout": content_types.encode([word.upper() for word in words], kind)}
"""


async def test_a_model_obeys_the_content_type_of_the_request(serve: Serve, tmp_path: Path) -> None:
    version = tmp_path / "models" / "shouts" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(CODE)
    asked = {"str": ([b"cat", b"dog"], [b"CAT", b"DOG"]), "base64": ([b"YQ=="], [b"QQ=="])}
    found = []
    async with (
        serve(
            tmp_path / "models",
            load_model=("shouts",),
            http_endpoint="port:0",
            allow_python_models=True,
        ) as server,
        triton.InferenceServerClient(server.url) as grpc,
        triton_http.InferenceServerClient(str(server.http)) as http,
    ):
        for client, module in ((grpc, triton), (http, triton_http)):
            for kind, (given, _) in asked.items():
                data = np.array(given, np.object_).reshape(-1, 1)
                tensor: Any = module.InferInput("text", data.shape, "BYTES")
                tensor.set_data_from_numpy(data)
                answer: Any = await client.infer(
                    "shouts", [tensor], parameters={"content_type": kind}
                )
                found.append(answer.as_numpy("shout")[:, 0].tolist())

    assert [expected for _, expected in asked.values()] * 2 == found


KINDS = """
class Kinds(PythonModel):
    decoded = True
    inputs = {"x": ("BYTES", [-1])}
    outputs = {"y": ("BYTES", [-1]), "said": ("BYTES", [1])}

    def infer(self, inputs):
        return {"y": inputs["x"], "said": [repr(inputs["x"])]}
"""
MOVED = {
    "name": "moved",
    "implementation": "kinds.Kinds",
    "inputs": [
        {
            "name": "x",
            "datatype": "BYTES",
            "shape": [-1],
            "parameters": {"content_type": "base64"},
        }
    ],
    "outputs": [
        {"name": "y", "datatype": "BYTES", "shape": [-1]},
        {"name": "said", "datatype": "BYTES", "shape": [1]},
    ],
}
"""A `model-settings.json` of MLServer, whose model is served by what stands for it."""
CONFIGURED = """
parameters { key: "content_type.x" value { string_value: "str" } }
parameters { key: "content_type.y" value { string_value: "base64" } }
"""
TABLE = """
class Table(PythonModel):
    decoded = True
    inputs = {"n": ("INT64", [1]), "s": ("BYTES", [1])}
    outputs = {"n": ("INT64", [1]), "s": ("BYTES", [1])}
    max_batch_size = 8

    def infer(self, frame):
        assert type(frame).__name__ == "DataFrame", frame
        return frame[frame["n"] >= 0].assign(n=frame["n"] * 2)
"""
GIVEN = """
from datetime import datetime

VALUES = {
    "texts": ["a", "b"], "binaries": [b"a"], "times": [datetime(2026, 1, 2)],
    "object": {"a": 1}, "array": np.array([b"x"], object), "none": [], "mixed": ["a", b"b"],
    "number": [1],
}

class Given(PythonModel):
    decoded = True
    inputs = {"x": ("BYTES", [1])}
    outputs = {"y": ("BYTES", [-1])}

    async def infer(self, inputs, request):
        yield {"y": VALUES[request.parameters["case"]]}
"""
TOGETHER = """
class Together(PythonModel):
    decoded = batched = True
    inputs = outputs = {"x": ("BYTES", [1])}
    max_batch_size = 8

    def infer(self, inputs):
        return inputs
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def asked(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    """A client of a server whose models want their inputs decoded."""
    root: Path = tmp_path_factory.mktemp("models")
    write(root, "kinds", KINDS)
    write(root, "configured", KINDS, CONFIGURED)
    write(root, "table", TABLE)
    write(root, "given", GIVEN)
    settings_file = root / "moved" / "model-settings.json"
    write(root, "moved", KINDS)
    settings_file.write_text(json.dumps(MOVED))
    stands_for = mlserver_settings.read(settings_file.parent)
    assert stands_for is not None
    (root / "moved" / "config.pbtxt").write_text(stands_for.pbtxt)
    scratch = tmp_path_factory.mktemp("scratch")
    settings: dict[str, Any] = {"load_model": ("*",), "allow_python_models": True}
    async with (
        serving(scratch, root, http_endpoint="port:0", **settings) as server,
        client(server) as found,
    ):
        yield found


async def post(asked: Client, model: str, body: dict[str, Any], accept: str = "*/*") -> str:
    request = urllib.request.Request(
        f"http://{asked.server.http}/v2/models/{model}/infer",
        json.dumps(body).encode(),
        {"Accept": accept},
    )

    def ask() -> str:
        try:
            with urllib.request.urlopen(request) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            return str(error.read().decode())

    return await asyncio.to_thread(ask)


def texts(name: str, *elements: str, **parameters: Any) -> dict[str, Any]:
    shape = [len(elements)]
    tensor = {"name": name, "datatype": "BYTES", "shape": shape, "data": elements}
    return {**tensor, "parameters": parameters}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("model", "of_request", "of_input", "read", "kind"),
    [
        ("kinds", "", "", "array([b'YQ==']", "np"),
        ("kinds", "", "str", "['YQ==']", "str"),
        ("kinds", "base64", "", "[b'a']", "base64"),
        ("kinds", "str", "base64", "[b'a']", "base64"),
        ("configured", "np", "", "['YQ==']", "base64"),
        ("moved", "", "", "[b'a']", "base64"),
        ("configured", "", "np", "array([b'YQ==']", "base64"),
    ],
)
async def test_the_server_decodes_for_a_model_that_asks_for_it(
    asked: Client, model: str, of_request: str, of_input: str, read: str, kind: str
) -> None:
    """An input's own content type, the configuration's, the request's: the first that is said."""
    own = {"content_type": of_input} if of_input else {}
    whole = {"content_type": of_request} if of_request else {}
    wanted = [{"name": "said"}]
    if model != "configured" or read.startswith("array"):
        wanted.append({"name": "y"})
    body = {"inputs": [texts("x", "YQ==", **own)], "parameters": whole, "outputs": wanted}
    found = json.loads(await post(asked, model, body))

    assert found["outputs"][0]["data"][0].startswith(read), found
    if len(wanted) > 1:
        assert {"content_type": kind} == found["outputs"][1]["parameters"]
        assert ["YQ=="] == found["outputs"][1]["data"]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("case", "wanted", "kind", "data"),
    [
        ("texts", "", "str", ["a", "b"]),
        ("texts", "hg_json", "hg_json", ['["a", "b"]']),
        ("binaries", "", "base64", ["YQ=="]),
        ("times", "", "datetime", ["2026-01-02T00:00:00"]),
        ("object", "", "hg_json", ['{"a": 1}']),
        ("array", "", "np", ["x"]),
        ("none", "", "str", []),
        ("mixed", "", "np", ["a", "b"]),
    ],
)
async def test_outputs_are_written_by_what_is_asked_for_or_by_their_value(
    asked: Client, case: str, wanted: str, kind: str, data: list[str]
) -> None:
    outputs = [{"name": "y", "parameters": {"content_type": wanted} if wanted else {}}]
    body = {"inputs": [texts("x", "")], "parameters": {"case": case}, "outputs": outputs}
    text = await post(asked, "given", body, "text/event-stream")
    found = json.loads(text.splitlines()[0].removeprefix("data: "))

    assert [(kind, data)] == [
        (one["parameters"]["content_type"], one["data"]) for one in found["outputs"]
    ]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_request_of_columns_is_a_data_frame_both_ways(asked: Client) -> None:
    pytest.importorskip("pandas")
    numbers = {"name": "n", "datatype": "INT64", "shape": [2, 1], "data": [3, 4]}
    words = {**texts("s", "cat", "dog", content_type="str"), "shape": [2, 1]}
    body = {"inputs": [numbers, words], "parameters": {"content_type": "pd"}}
    found = json.loads(await post(asked, "table", body))

    assert {"content_type": "pd"} == found["parameters"]
    assert [("n", [6, 8]), ("s", ["cat", "dog"])] == [
        (one["name"], one["data"]) for one in found["outputs"]
    ]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("model", "element", "parameters", "problem"),
    [
        (
            "kinds",
            "a!",
            {"content_type": "base64"},
            "model 'kinds', input 'x': expected base64, got b'a!'",
        ),
        (
            "kinds",
            "a",
            {"content_type": "xml"},
            "parameter 'content_type': expected one of np, str",
        ),
        ("kinds", "a", {"content_type": 7}, "parameter 'content_type': expected one of np, str"),
        ("given", "a", {"case": "number"}, "output 'y' of its code: expected"),
    ],
)
async def test_what_cannot_be_decoded_or_written_names_the_tensor(
    asked: Client, model: str, element: str, parameters: dict[str, Any], problem: str
) -> None:
    body = {"inputs": [texts("x", element)], "parameters": parameters}
    accept = "text/event-stream" if model == "given" else "*/*"

    assert problem in json.loads(await post(asked, model, body, accept))["error"]


async def test_requests_of_different_contents_are_not_put_together(
    serve: Serve, tmp_path: Path
) -> None:
    write(tmp_path / "models", "together", TOGETHER)
    async with (
        serve(tmp_path / "models", allow_python_models=True) as server,
        client(server) as asking,
    ):
        text = await asking.refused("together")

    assert (
        "batching requests needs decoded = False, since each request may have its own content types"
        in text
    )
