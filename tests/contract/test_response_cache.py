"""The response cache through the front door, with the stock clients over both transports."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as triton
import tritonclient.http.aio as triton_http
from structlog.testing import capture_logs
from support.doubling import export_double
from support.http import ask
from support.server import RunningServer, Serve

from xlaserve.serving.repeats import Repeats

CACHED = json.dumps({"response_cache": {"enable": True}})


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that doubles, and one that gives back texts."""
    root = tmp_path_factory.mktemp("models")
    export_double(root)
    (root / "texts" / "1").mkdir(parents=True)
    tensor = {"data_type": "TYPE_STRING", "dims": [-1]}
    config = {
        "backend": "identity",
        "max_batch_size": 4,
        "input": [tensor | {"name": "x"}],
        "output": [tensor | {"name": "y"}],
        "response_cache": {"enable": True},
    }
    (root / "texts" / "config.json").write_text(json.dumps(config))
    return root


@pytest.fixture
async def server(serve: Serve, repository: Path) -> AsyncIterator[RunningServer]:
    async with serve(repository, load_model=("texts",), http_endpoint="port:0") as running:
        await load(running, CACHED)
        yield running


async def load(server: RunningServer, config: str) -> None:
    async with triton.InferenceServerClient(server.url) as client:
        await client.load_model("double", config=config)


async def over_grpc(server: RunningServer, model: str, data: Any, datatype: str = "FP32") -> Any:
    tensor = triton.InferInput("x", data.shape, datatype)
    tensor.set_data_from_numpy(data)
    async with triton.InferenceServerClient(server.url) as client:
        answer: Any = await client.infer(model, [tensor])
    return answer.as_numpy("y")


async def over_http(server: RunningServer, model: str, data: Any, *, binary: bool) -> Any:
    tensor = triton_http.InferInput("x", data.shape, "FP32")
    tensor.set_data_from_numpy(data, binary_data=binary)
    async with triton_http.InferenceServerClient(str(server.http)) as client:
        return (await client.infer(model, [tensor])).as_numpy("y")


async def statistics(server: RunningServer, model: str) -> Any:
    async with triton.InferenceServerClient(server.url) as client:
        answer: Any = await client.get_inference_statistics(model, as_json=True)
    (found,) = answer["model_stats"]
    return found


def counts(found: Any) -> dict[str, int]:
    return {k: int(v.get("count", 0)) for k, v in found["inference_stats"].items()}


async def test_equal_requests_of_both_transports_are_executed_once(server: RunningServer) -> None:
    """Over gRPC, over HTTP as JSON and as binary: one execution, and a hit for each other."""
    data = np.array([[1.5, -0.0]], np.float32)
    answers = [
        await over_grpc(server, "double", data),
        await over_http(server, "double", data, binary=False),
        await over_http(server, "double", data, binary=True),
        await over_grpc(server, "double", data),
    ]
    found = await statistics(server, "double")

    for answer in answers:
        assert (data * 2).tobytes() == answer.tobytes()
    assert ("1", "1") == (found["execution_count"], found["inference_count"])
    assert (4, 3, 1, 1) == tuple(
        counts(found)[name] for name in ("success", "cache_hit", "cache_miss", "compute_infer")
    )


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each request was answered by its bytes."""
    found: list[bool] = []
    answer = Repeats.answer

    def noting(self: Repeats, *asked: Any) -> bytes | None:
        answered = answer(self, *asked)
        found.append(answered is not None)
        return answered

    monkeypatch.setattr(Repeats, "answer", noting)
    return found


async def test_a_message_that_came_before_is_answered_without_being_read(
    server: RunningServer, again: list[bool]
) -> None:
    """The third one: the first is executed, and the second is known by its tensors."""
    data = np.array([[1.5, -0.0]], np.float32)
    answers = [await over_grpc(server, "double", data) for _ in range(4)]
    found = await statistics(server, "double")

    assert [False, False, True, True] == again
    assert [(data * 2).tobytes()] * 4 == [answer.tobytes() for answer in answers]
    assert "1" == found["execution_count"]
    assert (4, 3, 1) == tuple(
        counts(found)[name] for name in ("success", "cache_hit", "cache_miss")
    )


async def test_a_message_that_came_before_is_read_again_once_its_model_was_loaded_again(
    server: RunningServer, again: list[bool]
) -> None:
    data = np.array([[1, 2]], np.float32)
    for _ in range(3):
        await over_grpc(server, "double", data)
    await load(server, json.dumps({"max_batch_size": 2, "response_cache": {"enable": True}}))
    for _ in range(3):
        answer = await over_grpc(server, "double", data)
        assert (data * 2).tobytes() == answer.tobytes()

    assert [False, False, True] * 2 == again
    assert server.application.response_cache is not None
    assert 1 == len(server.application.response_cache)


async def test_the_id_of_a_request_is_that_of_its_answer(
    server: RunningServer, again: list[bool]
) -> None:
    tensor = triton.InferInput("x", (1, 2), "FP32")
    tensor.set_data_from_numpy(np.array([[5, 6]], np.float32))
    ids = ["", "a", "", "b", "a", ""]
    async with triton.InferenceServerClient(server.url) as client:
        answers: list[Any] = [await client.infer("double", [tensor], request_id=one) for one in ids]

    assert ids == [answer.get_response().id for answer in answers]
    assert [False, False, False, False, False, True] == again


async def test_answers_that_are_put_into_a_form_are_made_each_time(
    server: RunningServer, again: list[bool]
) -> None:
    """Their labels are those of a file, or of a model behind an ensemble."""
    tensor = triton.InferInput("x", (1, 2), "FP32")
    tensor.set_data_from_numpy(np.array([[5, 6]], np.float32))
    wanted = [triton.InferRequestedOutput("y", class_count=1)]
    async with triton.InferenceServerClient(server.url) as client:
        for _ in range(4):
            answer: Any = await client.infer("double", [tensor], outputs=wanted)
            assert [[b"12.000000:1"]] == answer.as_numpy("y").tolist()

    assert [False] * 4 == again


async def test_answers_that_leave_in_order_are_not_given_past_it(
    server: RunningServer, again: list[bool]
) -> None:
    ordered = {"dynamic_batching": {"preserve_ordering": True}, "max_batch_size": 4}
    await load(server, json.dumps(ordered | json.loads(CACHED)))
    for _ in range(4):
        await over_grpc(server, "double", np.array([[1, 2]], np.float32))

    assert [False] * 4 == again
    found = await statistics(server, "double")
    counted = counts(found)
    assert "1" == found["execution_count"]
    assert (3, 1, 4) == tuple(counted[name] for name in ("cache_hit", "cache_miss", "success"))


async def test_what_only_looks_equal_is_not(server: RunningServer) -> None:
    for value in (0.0, -0.0, np.nan):
        data = np.array([[value, 1]], np.float32)
        for _ in range(2):
            answer = await over_grpc(server, "double", data)
            assert (data * 2).tobytes() == answer.tobytes()
    counted = counts(await statistics(server, "double"))
    assert (3, 3) == (counted["cache_hit"], counted["cache_miss"])

    for texts in ([b"ab", b"c"], [b"a", b"bc"], [b"abc", b""], [b"", b"abc"]):
        data = np.array([texts], np.object_)
        for _ in range(2):
            answer = await over_grpc(server, "texts", data, "BYTES")
            assert [texts] == answer.tolist()
    assert 4 == counts(await statistics(server, "texts"))["cache_hit"]


async def test_statistics_of_both_transports_and_metrics_agree(server: RunningServer) -> None:
    data = np.array([[3, 4]], np.float32)
    for _ in range(3):
        await over_grpc(server, "double", data)
    by_grpc = (await statistics(server, "double"))["inference_stats"]
    async with triton_http.InferenceServerClient(str(server.http)) as client:
        over_rest = await client.get_inference_statistics("double")
    by_rest = over_rest["model_stats"][0]["inference_stats"]
    metrics = (await ask(str(server.http), "GET", "/metrics")).body.decode()

    for name, count in (("cache_hit", 2), ("cache_miss", 1)):
        assert count == by_rest[name]["count"] == int(by_grpc[name]["count"])
        assert 0 < by_rest[name]["ns"] == int(by_grpc[name]["ns"])
    label = '{model="double",version="1"}'
    assert f"nv_cache_num_hits_per_model{label} 2" in metrics
    assert f"nv_cache_num_misses_per_model{label} 1" in metrics
    micros = by_rest["cache_miss"]["ns"] // 1000
    assert f"nv_cache_miss_duration_per_model{label} {micros}" in metrics
    assert f"nv_cache_hit_duration_per_model{label} " in metrics


async def test_a_reload_forgets_and_an_unload_gives_the_memory_back(server: RunningServer) -> None:
    cache = server.application.response_cache
    assert cache is not None
    data = np.array([[3, 4]], np.float32)
    await over_grpc(server, "double", data)
    one = len(cache)
    await load(server, json.dumps({"max_batch_size": 2, "response_cache": {"enable": True}}))
    reloaded = len(cache)
    await over_grpc(server, "double", data)
    async with triton.InferenceServerClient(server.url) as client:
        await client.unload_model("double")

    assert (1, 0, 0) == (one, reloaded, len(cache))
    assert 0 == cache.held
    assert 2 == server.application.registry.version("double", "1").statistics.totals().success.count


async def test_a_model_that_asks_for_none_is_executed_each_time(server: RunningServer) -> None:
    await load(server, json.dumps({}))
    data = np.array([[3, 4]], np.float32)
    for _ in range(2):
        await over_grpc(server, "double", data)
    found = await statistics(server, "double")
    metrics = (await ask(str(server.http), "GET", "/metrics")).body.decode()

    assert "2" == found["execution_count"]
    assert 0 == counts(found)["cache_hit"] == counts(found)["cache_miss"]
    assert 'nv_cache_num_hits_per_model{model="double"' not in metrics


async def test_a_server_that_keeps_no_answers_says_so(serve: Serve, repository: Path) -> None:
    with capture_logs() as lines:
        async with serve(repository, load_model=("texts",), response_cache_bytes=0) as server:
            for _ in range(2):
                await over_grpc(server, "texts", np.array([[b"a"]], np.object_), "BYTES")
            found = await statistics(server, "texts")

    assert "2" == found["execution_count"]
    (said,) = [line for line in lines if "response cache disabled" in line["event"]]
    assert ("texts", "response_cache_bytes is 0") == (said["model"], said["reason"])


async def test_an_ensemble_over_a_model_whose_answers_are_kept_has_times(
    serve: Serve, repository: Path
) -> None:
    """A step that is answered from the cache waits nowhere: it was counted as hours, and all
    statistics were INTERNAL."""
    tensor = {"data_type": "TYPE_STRING", "dims": [-1]}
    step = {"model_name": "texts", "model_version": -1, "input_map": {"x": "x"}}
    config = {
        "max_batch_size": 4,
        "input": [tensor | {"name": "x"}],
        "output": [tensor | {"name": "y"}],
        "ensemble_scheduling": {"step": [step | {"output_map": {"y": "y"}}]},
    }
    (repository / "over").mkdir()
    (repository / "over" / "config.json").write_text(json.dumps(config))
    data = np.array([[b"a"]], np.object_)
    async with serve(repository, load_model=("over",)) as server:
        for _ in range(3):
            await over_grpc(server, "over", data, "BYTES")
        found = (await statistics(server, "over"))["inference_stats"]
        hits = counts(await statistics(server, "texts"))["cache_hit"]

    assert 2 == hits
    assert int(found["queue"].get("ns", 0)) < int(found["success"]["ns"])
