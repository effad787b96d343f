"""The classification extension, with the stock clients over both transports."""

import json
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import identity_models
from support.doubling import export_double
from support.http import ask
from support.server import RunningServer, Serve
from support.stock import KINDS, Stock, stock_client

SCORES = np.array([[1, 2], [4, 3]], np.float32)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    export_double(root)
    output = {"name": "y", "data_type": "TYPE_FP32", "dims": [2]}
    config = {"max_batch_size": 4, "output": [output | {"label_filename": "labels.txt"}]}
    (root / "double" / "config.json").write_text(json.dumps(config))
    (root / "double" / "labels.txt").write_text("cat\nd\u00f6g\n")
    step = {"model_name": "double", "model_version": -1, "input_map": {"x": "a"}}
    ensemble = {
        "platform": "ensemble",
        "max_batch_size": 4,
        "input": [output | {"name": "a"}],
        "output": [output | {"name": "b"}],
        "ensemble_scheduling": {"step": [step | {"output_map": {"y": "b"}}]},
    }
    (root / "both" / "1").mkdir(parents=True)
    (root / "both" / "config.json").write_text(json.dumps(ensemble))
    identity_models.write(root, "texts", "BYTES")
    return root


@pytest.fixture
async def server(serve: Serve, models: Path) -> AsyncIterator[RunningServer]:
    async with serve(models, load_model=("*",), http_endpoint="port:0") as running:
        yield running


@pytest.mark.parametrize("kind", KINDS)
async def test_the_best_classes_come_with_their_labels(server: RunningServer, kind: str) -> None:
    async with stock_client(kind, server) as client:
        found = [await classes(client, "double", 1), await classes(client, "double", 5)]
        of_ensemble = await classes(client, "both", 1, "a", "b")
        texts = client.input("x", [1], "BYTES")
        texts.set_data_from_numpy(np.array([b"a"], np.object_))
        fault = await client.fault(
            "infer", "texts", [texts], outputs=[client.output("y", class_count=1)]
        )

    assert [["4.000000:1:d\u00f6g"], ["8.000000:0:cat"]] == found[0] == of_ensemble
    assert [
        ["4.000000:1:d\u00f6g", "2.000000:0:cat"],
        ["8.000000:0:cat", "6.000000:1:d\u00f6g"],
    ] == found[1]
    assert "model 'texts', output 'y': expected numbers to be classified, got BYTES" == fault


async def classes(
    client: Stock, model: str, count: int, x: str = "x", y: str = "y"
) -> list[list[str]]:
    tensor = client.input(x, list(SCORES.shape), "FP32")
    tensor.set_data_from_numpy(SCORES)
    outputs = [client.output(y, class_count=count)]
    answer = await client.ask("infer", model, [tensor], outputs=outputs)
    return [[text.decode() for text in row] for row in answer.as_numpy(y).tolist()]


async def test_they_come_in_json_too(server: RunningServer) -> None:
    async with stock_client("http.aio", server) as client:
        tensor = client.input("x", list(SCORES.shape), "FP32")
        tensor.set_data_from_numpy(SCORES, binary_data=False)
        outputs = [client.output("y", class_count=1, binary_data=False)]
        answer = await client.ask("infer", "double", [tensor], outputs=outputs)

    output = answer.get_output("y")
    assert ("BYTES", [2, 1]) == (output["datatype"], output["shape"])
    assert ["4.000000:1:d\u00f6g", "8.000000:0:cat"] == output["data"]


async def test_an_output_is_not_both_classified_and_in_shared_memory(
    server: RunningServer,
) -> None:
    async with stock_client("grpc.aio", server) as client:
        tensor = client.input("x", list(SCORES.shape), "FP32")
        tensor.set_data_from_numpy(SCORES)
        output = client.output("y", class_count=1)
        parameters = output._get_tensor().parameters
        parameters["shared_memory_region"].string_param = "r"
        parameters["shared_memory_byte_size"].int64_param = 8
        fault = await client.fault("infer", "double", [tensor], outputs=[output])

    assert "output 'y': expected classification or shared_memory_region, not both" in fault


MANY = 50_000
LABEL = b"class %09d of very many"
LABELS_BYTES = sum(sys.getsizeof(LABEL % number) for number in range(MANY)) + sys.getsizeof(
    (None,) * MANY
)


def write_labelled(root: Path) -> None:
    """Write two models that differ in their labels alone."""
    export_double(root)
    for name, file in (("plain", ""), ("labelled", "labels.txt")):
        shutil.copytree(root / "double", root / name)
        outputs = [{"name": "y", "data_type": "TYPE_FP32", "dims": [2], "label_filename": file}]
        config = {"max_batch_size": 4, "output": outputs}
        (root / name / "config.json").write_text(json.dumps(config))
    lines = b"\n".join(LABEL % number for number in range(MANY))
    (root / "labelled" / "labels.txt").write_bytes(lines)


async def test_labels_are_part_of_their_models_memory(
    serve: Serve, tmp_path: Path, programs: str
) -> None:
    """In the books, statistics, metrics and pages, until the model is unloaded."""
    write_labelled(tmp_path)
    books: dict[str, Any] = {}
    more: dict[str, Any] = {"http_endpoint": "port:0", "compilation_cache_directory": programs}
    async with serve(tmp_path, **more) as server, stock_client("grpc.aio", server) as client:
        capacity, url = server.application.capacity, str(server.http)
        for name in ("plain", "labelled", "plain", "labelled"):
            await client.ask("load_model", name)
            statistics = (await ask(url, "GET", f"/v2/models/{name}/stats")).json
            (use,) = statistics["model_stats"][0]["memory_usage"]
            metrics = (await ask(url, "GET", "/metrics")).body.decode()
            told = f'xlaserve_model_bytes{{model="{name}",version="1",part="labels"}} '
            page = (await ask(url, "GET", f"/page/models/{name}")).json
            loaded = page["versions"][0]["loaded"]
            books[name] = {
                "capacity": capacity.used_bytes,
                "statistics": use["byte_size"],
                "metrics": int(metrics.partition(told)[2].split()[0]),
                "page": loaded["memory"]["labels"],
                "devices": loaded["devices"]["cpu:0"],
            }
            await client.ask("unload_model", name)
            left = capacity.used_bytes
            assert left == 0

    differences = {key: books["labelled"][key] - books["plain"][key] for key in books["plain"]}
    assert dict.fromkeys(books["plain"], LABELS_BYTES) == differences


async def test_a_load_is_refused_for_labels_that_there_is_no_memory_for(
    serve: Serve, tmp_path: Path, programs: str
) -> None:
    """Before it is compiled."""
    write_labelled(tmp_path)
    more: dict[str, Any] = {"compilation_cache_directory": programs}
    async with serve(tmp_path, **more) as server, stock_client("grpc.aio", server) as client:
        await client.ask("load_model", "plain")
        needed = server.application.registry.needed_bytes("plain")
    more["capacity_bytes"] = needed + LABELS_BYTES - 1
    async with serve(tmp_path, **more) as server, stock_client("grpc.aio", server) as client:
        await client.ask("load_model", "plain")
        await client.ask("unload_model", "plain")
        fault = await client.fault("load_model", "labelled")

    assert f"it needs {needed + LABELS_BYTES} bytes on cpu:0" in fault
