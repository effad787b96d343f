"""Configurations over the front door: obeyed, refused, or named, and what serves goes on."""

# pyright: reportAttributeAccessIssue=false
# protobuf makes the classes of service_pb2 when it is imported, where no checker sees them.

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from structlog.testing import capture_logs
from support.doubling import export_double
from support.server import RunningServer, Serve
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from xlaserve.settings.choices import ModelControlMode

TENSOR = {"name": "x", "data_type": "TYPE_FP32", "dims": [2]}
AGENT = {"name": "decrypt", "parameters": {"key": "0"}}

REFUSED: dict[str, dict[str, Any]] = {
    "model_repository_agents.agents[0].name": {"model_repository_agents": {"agents": [AGENT]}},
    "input[0].is_shape_tensor": {"input": [TENSOR | {"is_shape_tensor": True}]},
}

RAGGED = TENSOR | {"allow_ragged_batch": True}
NOT_OF_THE_MODEL: dict[str, dict[str, Any]] = {
    "expected the inputs and outputs in the configuration": {"input": [RAGGED]},
    "expected the parameter 'batch_independent' to be true": {
        "input": [RAGGED],
        "output": [TENSOR | {"name": "y"}],
        "max_batch_size": 2,
    },
    "batch_input[0].data_type: expected": {
        "batch_input": [{"target_name": ["n"], "source_input": ["x"]}]
    },
    "batch_output[0].source_input: expected": {
        "batch_output": [{"target_name": ["y"], "source_input": ["x"]}]
    },
}

_LONG = "\x1b[2J" + "x" * 900_000
"""A text that an answer must neither repeat whole nor raw."""

_PARAMETERS = (
    *("batch_sizes", "batch_independent", "compiled_shapes", "max_on_demand_shapes"),
    *("devices", "placement", "partition", "mesh"),
)

HOSTILE: dict[str, str] = {
    "nested": '{"parameters":' * 5000 + "{}" + "}" * 5000,
    "lists": "[" * 5000 + "]" * 5000,
    "digits": '{"max_batch_size": ' + "9" * 200_000 + "}",
    "exponent": '{"max_batch_size": 1e999999}',
    "too large": '{"max_batch_size": 2147483648}',
    "negative": '{"max_batch_size": -1}',
    "twice": '{"max_batch_size": 1, "max_batch_size": 2}',
    "spelled twice": '{"max_batch_size": 1, "maxBatchSize": 2}',
    "unknown": '{"max_batch_sizes": 1}',
    "many": json.dumps({"input": [{"name": f"x{i}"} for i in range(30_000)]}),
    "large": json.dumps({"name": "x" * (1 << 20)}),
    "surrogate": '{"name": "\\ud800"}',
    "not text": '{"name": "a\\u0000b"}',
    "two choices": '{"dynamic_batching": {}, "sequence_batching": {}}',
    "nothing": "",
    "null": "null",
    "name": json.dumps({"name": _LONG}),
    "input": json.dumps({"input": [TENSOR | {"name": _LONG}]}),
    "dims": json.dumps({"input": [TENSOR | {"dims": [1] * 9000}]}),
    "backend": json.dumps({"backend": _LONG}),
    "platform": json.dumps({"platform": _LONG}),
    **{name: json.dumps({"parameters": {name: {"string_value": _LONG}}}) for name in _PARAMETERS},
    "file": json.dumps({"default_model_filename": _LONG}),
    "key": json.dumps({"model_warmup": [{"inputs": {_LONG: {"input_data_file": "a"}}}]}),
    "default": json.dumps(
        {
            "input": [TENSOR | {"optional": True}],
            "parameters": {"default.x": {"string_value": _LONG}},
        }
    ),
    "step": json.dumps(
        {
            "input": [TENSOR],
            "output": [TENSOR | {"name": "y"}],
            "ensemble_scheduling": {
                "step": [
                    {"model_name": _LONG, "input_map": {"x": "x"}, "output_map": {"y": "y"}},
                ]
            },
        }
    ),
    "version zero": '{"version_policy": {"specific": {"versions": [0]}}}',
}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and a copy for each configuration that is on disk."""
    root = tmp_path_factory.mktemp("models")
    export_double(root)
    for name, data in (
        ("refused", b"batch_input { kind: BATCH_ELEMENT_COUNT }"),
        ("bytes", b'name: "\xff"'),
        ("open", b'input { name: "x'),
        ("deep", b"optimization { " * 5000),
        ("escape", b'name: "\\777"'),
    ):
        shutil.copytree(root / "double", root / name)
        (root / name / "config.pbtxt").write_bytes(data)
    return root


@pytest.fixture
async def server(serve: Serve, repository: Path) -> AsyncIterator[RunningServer]:
    async with serve(repository, load_model=("double",)) as running:
        yield running


@pytest.fixture
async def stub(server: RunningServer) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(server.url) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


async def double(stub: Any) -> list[float]:
    data = np.array([[1, 2]], np.float32)
    request = pb.ModelInferRequest(model_name="double", raw_input_contents=[data.tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=data.shape)
    response = await stub.ModelInfer(request)
    return [float(one) for one in np.frombuffer(response.raw_output_contents[0], np.float32)]


async def load(stub: Any, model: str, config: str | None = None) -> str:
    """Return what a load answers, empty where it succeeds."""
    request = pb.RepositoryModelLoadRequest(model_name=model)
    if config is not None:
        request.parameters["config"].string_param = config
    try:
        await stub.RepositoryModelLoad(request)
    except grpc.aio.AioRpcError as error:
        assert error.code() in (
            grpc.StatusCode.FAILED_PRECONDITION,
            grpc.StatusCode.INVALID_ARGUMENT,
        )
        return error.details() or "failed"
    return ""


async def test_a_reload_with_a_field_that_would_change_answers_keeps_what_serves(
    stub: Any,
) -> None:
    """The answer names the field, and that it is not implemented."""
    for field, config in REFUSED.items():
        answer = await load(stub, "double", json.dumps(config))

        assert f"{field}: is not implemented" in answer, answer
        assert [2, 4] == await double(stub)
    for text, config in NOT_OF_THE_MODEL.items():
        answer = await load(stub, "double", json.dumps(config))

        assert text in answer, answer
        assert [2, 4] == await double(stub)


async def test_a_reload_with_a_hostile_configuration_keeps_what_serves(stub: Any) -> None:
    for name, config in HOSTILE.items():
        answer = await load(stub, "double", config)

        assert answer, name
        assert answer.isprintable(), name
        assert len(answer) < 2000, name
        assert [2, 4] == await double(stub)


async def test_a_configuration_that_appears_on_disk_and_is_refused_keeps_what_serves(
    serve: Serve, repository: Path, tmp_path: Path
) -> None:
    """Under poll nobody is told; the index says why."""
    shutil.copytree(repository / "double", tmp_path / "models/double")
    async with (
        serve(tmp_path / "models", model_control_mode=ModelControlMode.POLL) as server,
        grpc.aio.insecure_channel(server.url) as channel,
    ):
        stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        before = await double(stub)
        config = tmp_path / "models/double/config.pbtxt"
        config.write_text("instance_group { passive: true }")
        with capture_logs() as lines:
            await server.application.control.follower.poll()
        after = await double(stub)
        config.unlink()
        await server.application.control.follower.poll()

        assert [2, 4] == before == after == await double(stub)
    (error,) = [line["error"] for line in lines if line["log_level"] == "error"]

    assert "config.pbtxt: instance_group[0].passive: is not implemented" in error


@pytest.mark.parametrize("name", ["refused", "bytes", "open", "deep", "escape"])
async def test_a_configuration_on_disk_that_cannot_be_obeyed_fails_its_load(
    stub: Any, name: str
) -> None:
    answer = await load(stub, name)

    assert answer.startswith(f"failed to load '{name}', config.pbtxt: ")
    assert len(answer) < 2000


@pytest.mark.parametrize(
    ("file", "answer"),
    [
        ("labels.txt", ""),
        (
            "missing.txt",
            "missing.txt is missing",
        ),
        (
            "../../secret",
            'expected a file in the directory of the model, got "../../secret"',
        ),
        (
            "/etc/passwd",
            'expected a file in the directory of the model, got "/etc/passwd"',
        ),
        ("1", "1 is not a regular file"),
    ],
)
async def test_a_file_of_labels_must_be_there(
    stub: Any, repository: Path, file: str, answer: str
) -> None:
    (repository / "double/labels.txt").write_text("a\nb\n")
    (repository.parent / "secret").write_text("hunter2")
    config = {"output": [TENSOR | {"name": "y", "label_filename": file}]}
    found = await load(stub, "double", json.dumps(config))

    assert found.startswith("failed to load 'double', " if answer else "")
    assert "label_filename" in found or not answer
    assert answer in found if answer else found == ""


@pytest.mark.parametrize("name", ["config.json", "config.pbtxt"])
async def test_a_configuration_that_is_a_link_out_is_not_read(
    stub: Any, repository: Path, name: str
) -> None:
    """Its first word was told to whoever asked for the load."""
    (repository.parent / "secret").write_text("hunter2 is the password")
    shutil.copytree(repository / "double", repository / f"link-{name[7:]}")
    (repository / f"link-{name[7:]}" / name).symlink_to(repository.parent / "secret")
    answer = await load(stub, f"link-{name[7:]}")

    assert f"'{name}' is outside the model repository and every model_root" in answer
    assert "hunter2" not in answer


async def test_a_warm_up_is_executed_before_the_model_is_ready(stub: Any, repository: Path) -> None:
    """With a file that is there; without it the load fails, and says which one."""
    data = {"data_type": "TYPE_FP32", "dims": [2], "input_data_file": "raw"}
    config = {"model_warmup": [{"name": "w", "batch_size": 2, "inputs": {"x": data}}]}
    answer = await load(stub, "double", json.dumps(config))
    assert "warmup/raw is missing" in answer
    folder = repository / "double" / "warmup"
    folder.mkdir()
    (folder / "raw").write_bytes(np.ones(2, np.float32).tobytes())
    with capture_logs() as lines:
        assert "" == await load(stub, "double", json.dumps(config))
    shutil.rmtree(folder)

    assert not [line for line in lines if "without effect" in line["event"]]


async def test_fields_without_effect_are_one_line_of_the_log(stub: Any) -> None:
    config = {
        "optimization": {"graph": {"level": 1}},
        "metric_tags": {"a": "b"},
        "parameters": {"mine": {"string_value": "1"}},
        "model_transaction_policy": {"decoupled": False},
    }
    with capture_logs() as lines:
        assert "" == await load(stub, "double", json.dumps(config))

    (named,) = [line["fields"] for line in lines if "without effect" in line["event"]]
    assert ["metric_tags", "optimization", 'parameters["mine"]'] == named


async def test_gpus_are_named_that_a_server_without_any_passes_over(stub: Any) -> None:
    config = {"instance_group": [{"kind": "KIND_AUTO", "count": 2, "gpus": [0]}]}
    with capture_logs() as lines:
        assert "" == await load(stub, "double", json.dumps(config))

    (named,) = [line["fields"] for line in lines if "without effect" in line["event"]]
    assert ["instance_group.gpus"] == named


async def test_a_configuration_that_is_obeyed_has_no_line_in_the_log(stub: Any) -> None:
    with capture_logs() as lines:
        assert "" == await load(stub, "double", '{"max_batch_size": 3}')

    assert [] == [line for line in lines if "without effect" in line["event"]]
