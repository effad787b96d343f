"""The model repository extension over gRPC, in the order of its document."""

# pyright: reportAttributeAccessIssue=false
# protobuf makes the classes of service_pb2 when it is imported, where no checker sees them.

import errno
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from support.server import RunningServer, Serve
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

import xlaserve

ENSEMBLE = {
    "max_batch_size": 4,
    "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": [2]}],
    "output": [{"name": "OUT", "data_type": "TYPE_FP32", "dims": [2]}],
    "ensemble_scheduling": {
        "step": [
            {"model_name": "double", "input_map": {"x": "IN"}, "output_map": {"y": "middle"}},
            {"model_name": "plus", "input_map": {"x": "middle"}, "output_map": {"y": "OUT"}},
        ]
    },
}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two JAX models and an ensemble of them."""
    root = tmp_path_factory.mktemp("models")
    inputs = {"x": ("FP32", [-1, 2])}
    for name, fn, value in (
        ("double", lambda p, x: {"y": x * p["v"]}, 2.0),
        ("plus", lambda p, x: {"y": x + p["v"]}, 1.0),
    ):
        params = {"v": np.full((1, 2), value, np.float32)}
        xlaserve.export_model(fn, params, inputs, root / name / "1", max_batch_size=4)
    (root / "both").mkdir()
    (root / "both/config.json").write_text(json.dumps(ENSEMBLE))
    return root


@pytest.fixture
async def server(serve: Serve, repository: Path) -> AsyncIterator[RunningServer]:
    async with serve(repository) as running:
        yield running


@pytest.fixture
async def stub(server: RunningServer) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(server.url) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


async def infer(stub: Any, model: str, tensor: str, rows: list[list[float]]) -> list[Any]:
    data = np.array(rows, np.float32)
    request = pb.ModelInferRequest(model_name=model, raw_input_contents=[data.tobytes()])
    request.inputs.add(name=tensor, datatype="FP32", shape=data.shape)
    response = await stub.ModelInfer(request)
    output = np.frombuffer(response.raw_output_contents[0], np.float32)
    return output.reshape(response.outputs[0].shape).tolist()  # type: ignore[no-any-return]


async def states(stub: Any, *, ready: bool = False) -> dict[str, str]:
    index = await stub.RepositoryIndex(pb.RepositoryIndexRequest(ready=ready))
    return {model.name: model.state for model in index.models}


async def load(stub: Any, model: str, **parameters: Any) -> None:
    request = pb.RepositoryModelLoadRequest(model_name=model)
    for name, value in parameters.items():
        kind = "bytes_param" if isinstance(value, bytes) else "string_param"
        setattr(request.parameters[name], kind, value)
    await stub.RepositoryModelLoad(request)


async def unload(stub: Any, model: str, dependents: bool | None = None) -> None:
    request = pb.RepositoryModelUnloadRequest(model_name=model)
    if dependents is not None:
        request.parameters["unload_dependents"].bool_param = dependents
    await stub.RepositoryModelUnload(request)


# --- Index ---


async def test_the_index_names_models_that_are_not_loaded(stub: Any) -> None:
    """Every model that could be loaded is there."""
    assert dict.fromkeys(("both", "double", "plus"), "UNAVAILABLE") == await states(stub)


async def test_ready_restricts_the_index(stub: Any) -> None:
    await load(stub, "plus")

    assert {"plus": "READY"} == await states(stub, ready=True)


# --- Load ---


async def test_load_and_infer(stub: Any) -> None:
    await load(stub, "double")

    assert [[2.0, 4.0]] == await infer(stub, "double", "x", [[1, 2]])


async def test_config_replaces_the_models_own(stub: Any) -> None:
    await load(stub, "double", config='{"max_batch_size": 2}')
    with pytest.raises(grpc.aio.AioRpcError, match="a batch of 1 to 2 rows"):
        await infer(stub, "double", "x", [[1, 2]] * 3)


async def test_the_documents_own_example_of_a_config_is_read(stub: Any, repository: Path) -> None:
    """It spells its keys `inputs`, `datatype` and `shape`, which ModelConfig does not have."""
    config = {
        "name": "mymodel",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [2]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [2]}],
    }
    files = {f"file:1/{p.name}": p.read_bytes() for p in (repository / "plus/1").iterdir()}
    await load(stub, "mymodel", config=json.dumps(config), **files)

    assert [[2.0, 3.0]] == await infer(stub, "mymodel", "x", [[1, 2]])


async def test_files_replace_the_models_own_until_it_is_unloaded(
    server: RunningServer, stub: Any, repository: Path
) -> None:
    scratch = server.application.settings.scratch_directory
    files = {f"file:3/{p.name}": p.read_bytes() for p in (repository / "plus/1").iterdir()}
    await load(stub, "double", config="{}", **files)

    assert [[2.0, 3.0]] == await infer(stub, "double", "x", [[1, 2]])
    assert 1 == len(list(scratch.iterdir()))

    await unload(stub, "double")

    assert [] == list(scratch.iterdir())


async def test_files_that_the_disk_has_no_room_for_exhaust_a_resource(
    server: RunningServer, stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    await load(stub, "double")
    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await load(stub, "double", **{"config": "{}", "file:1/model.json": b"{}"})

    assert grpc.StatusCode.RESOURCE_EXHAUSTED is refused.value.code()
    assert "'double', no disk space left for its files" in (refused.value.details() or "")
    assert [] == list(server.application.settings.scratch_directory.iterdir())
    assert [[2.0, 4.0]] == await infer(stub, "double", "x", [[1, 2]])


@pytest.mark.parametrize(
    ("parameters", "code"),
    [
        ({"config": "{"}, "FAILED_PRECONDITION"),
        ({"config": b"{}"}, "INVALID_ARGUMENT"),
        ({"file:1/model.json": b"{}"}, "INVALID_ARGUMENT"),
        ({"config": "{}", "file:1/../../x": b""}, "INVALID_ARGUMENT"),
        ({"config": "{}", "file:1/model.json": b"{}"}, "FAILED_PRECONDITION"),
        ({"unknown": "x"}, "INVALID_ARGUMENT"),
    ],
)
async def test_a_load_that_fails_says_why_and_keeps_what_was_served(
    stub: Any, parameters: dict[str, Any], code: str
) -> None:
    await load(stub, "double")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await load(stub, "double", **parameters)

    assert code == caught.value.code().name
    assert [[2.0, 4.0]] == await infer(stub, "double", "x", [[1, 2]])


TRICKS = [
    "..",
    "../etc",
    "a/../b",
    "model/..",
    "model/",
    "/etc/passwd",
    " ..",
    ".. ",
    "..\\x",
    "a\0b",
    "a\nb",
    "\x1b[2J",
    "%2e%2e%2f",
    "%252e%252e%252f",
    "\uff0e\uff0e",
    "a\uff0fb",
    "\u2025",
    "x" * 300,
    "",
    " ",
]
PREFIXES = ["", "a", "../", "..%2f", "1/", "\t"]


LONGEST = 255
"""Most bytes of a name, on most file systems."""


async def test_no_name_leads_out_of_its_directory(
    server: RunningServer, stub: Any, tmp_path: Path
) -> None:
    """Each as model, version and file: refused as INVALID_ARGUMENT, and nothing is written."""
    before = sorted(tmp_path.rglob("*"))
    refused = 0
    for name in [prefix + trick for prefix in PREFIXES for trick in TRICKS]:
        if name.strip() in ("a", "1/", "a..", "a ..", "a\u2025", "a\uff0e\uff0e"):
            continue  # harmless, or a version without a file, which has its own test
        for model, parameters in (
            (name, {}),
            ("double", {"config": "{}", f"file:1/{name}": b"x"}),
            ("double", {"config": "{}", f"file:{name}/model.json": b"x"}),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await load(stub, model, **parameters)
            outcome = (caught.value.code().name, model, list(parameters))
            # Triton's own clients want INTERNAL for the name of a file that no file system takes.
            is_long = parameters and len(name) > LONGEST
            assert ("INTERNAL" if is_long else "INVALID_ARGUMENT") == outcome[0], outcome
            refused += 1

    assert refused >= 200
    assert before == sorted(tmp_path.rglob("*"))


async def test_a_bad_model_fails_to_load(stub: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="failed to load") as caught:
        await load(stub, "nope")

    assert grpc.StatusCode.NOT_FOUND is caught.value.code()


async def test_an_ensemble_loads_its_steps_and_answers(stub: Any) -> None:
    await load(stub, "both")

    assert dict.fromkeys(("both", "double", "plus"), "READY") == await states(stub)
    assert [[3.0, 5.0], [7.0, 9.0], [11.0, 13.0]] == await infer(
        stub, "both", "IN", [[1, 2], [3, 4], [5, 6]]
    )


# --- Unload ---


async def test_unload(stub: Any) -> None:
    await load(stub, "double")
    await unload(stub, "double")

    assert {} == await states(stub, ready=True)


@pytest.mark.parametrize(
    ("dependents", "expected"),
    [
        (None, {"both": "UNAVAILABLE", "double": "UNAVAILABLE", "plus": "READY"}),
        (False, {"both": "UNAVAILABLE", "double": "UNAVAILABLE", "plus": "READY"}),
        (True, {"both": "UNAVAILABLE", "double": "UNAVAILABLE", "plus": "UNAVAILABLE"}),
    ],
)
async def test_unload_dependents(
    stub: Any, dependents: bool | None, expected: dict[str, str]
) -> None:
    """Without a model of one of its steps an ensemble cannot answer; with the parameter it goes."""
    await load(stub, "both")
    await unload(stub, "double", dependents)

    assert expected == await states(stub)


@pytest.mark.parametrize(
    ("at_start", "expected"),
    [
        (("double", "both"), {"both": "UNAVAILABLE", "double": "READY", "plus": "UNAVAILABLE"}),
        (("both", "double"), {"both": "UNAVAILABLE", "double": "READY", "plus": "UNAVAILABLE"}),
        (("*",), {"both": "UNAVAILABLE", "double": "READY", "plus": "READY"}),
    ],
)
async def test_unload_dependents_leaves_what_was_loaded_by_name_at_the_start(
    serve: Serve, repository: Path, at_start: tuple[str, ...], expected: dict[str, str]
) -> None:
    async with (
        serve(repository, load_model=at_start) as server,
        grpc.aio.insecure_channel(server.url) as channel,
    ):
        stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        await unload(stub, "both", dependents=True)
        shown = await states(stub)

    assert expected == shown


async def test_unload_dependents_leaves_what_was_loaded_by_name_behind_the_ensemble(
    stub: Any,
) -> None:
    """A load of a model that an ensemble has brought is a wish of its own."""
    await load(stub, "both")
    await load(stub, "plus")
    await unload(stub, "both", dependents=True)

    assert {"both": "UNAVAILABLE", "double": "UNAVAILABLE", "plus": "READY"} == await states(stub)


async def test_wrong_kinds_of_parameters_are_refused(stub: Any) -> None:
    request = pb.RepositoryModelUnloadRequest(model_name="double")
    request.parameters["unload_dependents"].string_param = "true"
    with pytest.raises(grpc.aio.AioRpcError, match="expected a boolean, got a string"):
        await stub.RepositoryModelUnload(request)
