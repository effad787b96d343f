"""Decoupled models: configuration, and answers as clients see them."""

# pyright: reportAttributeAccessIssue=false
# protobuf creates the classes of service_pb2 at import, so type checkers do not see them.

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as triton
import tritonclient.http as triton_http
from structlog.testing import capture_logs
from support import python_models
from support.server import RunningServer, Serve
from support.stepped import export_counter
from support.wire import connect, framed, request_headers
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import InferenceServerException

from xlaserve.runtime.exported.stepped_rows import SteppedRows

FINAL = "triton_final_response"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_counter(tmp_path_factory.mktemp("stepped") / "counter" / "1", max_steps=50).parent


@pytest.fixture
def repository(exported: Path, tmp_path: Path) -> Path:
    shutil.copytree(exported, tmp_path / "models" / "counter")
    return tmp_path / "models"


@pytest.fixture
async def server(serve: Serve, repository: Path) -> AsyncIterator[RunningServer]:
    settings = {"max_infer_stream_bytes": 1 << 12}
    async with serve(
        repository, load_model=("counter",), http_endpoint="port:0", **settings
    ) as running:
        yield running


def asking(start: int, count: int, module: Any = triton) -> list[Any]:
    inputs = []
    for name, value in (("start", start), ("count", count)):
        tensor = module.InferInput(name, [1], "INT32")
        tensor.set_data_from_numpy(np.array([value], np.int32))
        inputs.append(tensor)
    return inputs


async def until_idle(server: RunningServer) -> None:
    application = server.application
    async with asyncio.timeout(60):
        while (
            application.registry.requests
            or application.grpc.open_streams
            or application.ledger.held
            or application.registry.resolve("counter")[1].users
        ):
            await asyncio.sleep(0.001)


async def answers(client: Any, *requests: dict[str, Any]) -> list[Any]:
    """Return all responses on one stream sorted by request id, then the errors."""

    async def sent() -> AsyncIterator[dict[str, Any]]:
        for request in requests:
            yield {"model_name": "counter", **request}

    found: list[Any] = []
    errors: list[Any] = []
    async for result, error in client.stream_infer(sent()):
        (errors if error else found).append(error or result)
    # Responses to different requests may interleave.
    return [*sorted(found, key=lambda one: one.get_response().id), *errors]


@pytest.mark.slow  # exports and compiles a new model
async def test_requests_that_are_stepped_together_are_answered_as_alone(
    serve: Serve, tmp_path: Path
) -> None:
    """On several streams of several connections, one of which is abandoned halfway."""
    export_counter(tmp_path / "models" / "counter" / "1", max_steps=50, max_batch_size=2)
    async with serve(tmp_path / "models", load_model=("counter",)) as server:
        async with contextlib.AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(triton.InferenceServerClient(server.url))
                for _ in range(3)
            ]
            leaving: Any = clients[2].stream_infer(sent_forever(asking(0, 50)))
            await anext(aiter(leaving))
            requests = [
                {"inputs": asking(number, 1 + number % 9), "request_id": f"{number:02}"}
                for number in range(30)
            ]
            found = await asyncio.gather(*(answers(one, *requests) for one in clients[:2]))
            leaving.cancel()
        await until_idle(server)
    expected = [(f"{n:02}", i) for n in range(30) for i in range(n, n + 1 + n % 9)]

    for answered in found:
        told = [(one.get_response().id, int(one.as_numpy("number")[0])) for one in answered]
        assert expected == told


async def sent_forever(inputs: list[Any]) -> AsyncIterator[dict[str, Any]]:
    while True:
        yield {"model_name": "counter", "inputs": inputs}


@pytest.mark.parametrize("empty_final", [False, True])
async def test_a_stepped_model_streams_its_answers(
    server: RunningServer, *, empty_final: bool
) -> None:
    """The model marks its last answer, so no empty final response follows."""
    request = {"inputs": asking(5, 3), "enable_empty_final_response": empty_final}
    async with triton.InferenceServerClient(server.url) as client:
        found = await answers(
            client, {**request, "request_id": "a"}, {**request, "request_id": "b"}
        )
    await until_idle(server)

    assert [("a", 5), ("a", 6), ("a", 7), ("b", 5), ("b", 6), ("b", 7)] == [
        (one.get_response().id, one.as_numpy("number")[0]) for one in found
    ]
    assert [False, False, True] * 2 == [
        one.get_response().parameters[FINAL].bool_param for one in found
    ]


async def test_models_that_are_paused_before_their_last_answer_end_with_it(
    serve: Serve, repository: Path
) -> None:
    """Any unsent answer pauses all requests; they resume while an earlier one is sent."""
    settings = {"load_model": ("counter",), "max_infer_stream_bytes": 1}
    request = pb.ModelInferRequest(model_name="counter")
    for name, value in (("start", 5), ("count", 1)):
        request.inputs.add(name=name, datatype="INT32", shape=[1])
        request.raw_input_contents.append(np.array([value], np.int32).tobytes())
    async with serve(repository, **settings) as server, connect(server.url) as wire:
        stream = wire.open(request_headers("/inference.GRPCInferenceService/ModelStreamInfer"))
        # In a single write, so that all requests begin before the first answer.
        wire.h2.send_data(stream, 8 * framed(request.SerializeToString()), end_stream=True)
        wire.flush()
        trailers = await wire.trailers(stream)
        await until_idle(server)

    assert "0" == trailers["grpc-status"], trailers


async def test_more_answers_than_it_may_give_are_an_error(server: RunningServer) -> None:
    """The error follows the permitted answers, and the stream remains usable."""
    async with triton.InferenceServerClient(server.url) as client:
        found = await answers(
            client, {"inputs": asking(0, 51)}, {"inputs": asking(7, 1), "request_id": "z"}
        )
    await until_idle(server)

    assert [*range(50), 7] == [one.as_numpy("number")[0] for one in found[:51]]
    (error,) = found[51:]
    assert "'counter' did not finish within 50 answers: raise max_steps" in error.message()


async def test_a_request_has_a_timeout_of_its_own_within_a_stream(server: RunningServer) -> None:
    """Its timeout in microseconds covers its answers only; other requests continue."""
    with capture_logs() as lines:
        async with triton.InferenceServerClient(server.url) as client:
            found = await answers(
                client,
                {"inputs": asking(0, 50), "timeout": 1, "request_id": "a"},
                {"inputs": asking(7, 3), "timeout": 60_000_000, "request_id": "b"},
                {"inputs": asking(9, 1), "timeout": 0, "request_id": "c"},
            )
        await until_idle(server)

    rest = [one.as_numpy("number")[0] for one in found[:-1] if one.get_response().id != "a"]
    assert [7, 8, 9, 9] == rest
    assert "the deadline of the request has passed" in found[-1].message()
    assert not [line for line in lines if "parameters" in line]


@pytest.mark.slow  # compiles programs of every size and steps 10,000 requests
async def test_ten_thousand_requests_share_batches_and_end_right(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten streams, requests of different lengths: the batches change all the time."""
    export_counter(tmp_path / "models" / "counter" / "1", max_steps=50, max_batch_size=16)
    together: list[int] = []
    advance = SteppedRows.advance

    def note(self: SteppedRows, rows: Any) -> Any:
        together.append(len(rows))
        return advance(self, rows)

    monkeypatch.setattr(SteppedRows, "advance", note)
    settings = {"max_infer_stream_requests": 1000, "max_requests_per_model": 20_000}
    async with (
        serve(tmp_path / "models", load_model=("counter",), **settings) as server,
        triton.InferenceServerClient(server.url) as client,
    ):
        asked = [
            {"inputs": asking(number, 1 + number % 7), "request_id": str(number)}
            for number in range(10_000)
        ]
        found = await asyncio.gather(*(answers(client, *asked[one::10]) for one in range(10)))
        await until_idle(server)
    numbers: dict[int, list[int]] = {}
    sums: dict[int, list[float]] = {}
    for one in [one for answered in found for one in answered]:
        key = int(one.get_response().id)
        numbers.setdefault(key, []).append(int(one.as_numpy("number")[0]))
        sums.setdefault(key, []).append(float(one.as_numpy("sums")[1]))
    expected = {key: list(range(key, key + 1 + key % 7)) for key in range(10_000)}

    assert expected == numbers
    assert {
        key: [2.0 * sum(r[: n + 1]) for n in range(len(r))] for key, r in expected.items()
    } == sums
    # The best batch size is measured, possibly on a busy machine.
    assert 8 <= max(together) <= 16
    assert sum(together) / len(together) > 4


async def test_one_answer_is_not_to_be_had(server: RunningServer) -> None:
    """The error says how to get the answers (as in Triton: UNIMPLEMENTED, 501)."""
    text = "support models with decoupled transaction policy"
    async with triton.InferenceServerClient(server.url) as client:
        with pytest.raises(InferenceServerException) as refused:
            await client.infer("counter", asking(0, 2))
    assert server.http is not None
    url = server.http.removeprefix("http://")

    def ask() -> InferenceServerException:
        with triton_http.InferenceServerClient(url) as client:
            with pytest.raises(InferenceServerException) as error:
                client.infer("counter", asking(0, 2, triton_http))
        return error.value

    over_http = await asyncio.to_thread(ask)

    assert "StatusCode.UNIMPLEMENTED" == refused.value.status()
    assert "501" == over_http.status()
    for told in (refused.value.message(), over_http.message()):
        assert "'counter'" in told
        assert "ModelStreamInfer" in told
        assert text in told


async def test_the_configuration_says_that_it_is_decoupled(server: RunningServer) -> None:
    async with triton.InferenceServerClient(server.url) as client:
        described: Any = await client.get_model_config("counter")
        config = described.config
        metadata: Any = await client.get_model_metadata("counter")

    assert config.model_transaction_policy.decoupled
    assert ["start", "count"] == [tensor.name for tensor in config.input]
    assert ["start", "count"] == [tensor.name for tensor in metadata.inputs]
    assert ["number", "sums", "random"] == [tensor.name for tensor in metadata.outputs]


async def test_a_configuration_asks_for_it_of_models_that_can(
    serve: Serve, repository: Path
) -> None:
    """The returned configuration may be sent back; models with a single answer are rejected."""
    config = {"model_transaction_policy": {"decoupled": True}}
    (repository / "counter" / "config.json").write_text(
        json.dumps(config | {"parameters": {"max_steps": {"string_value": "2"}}})
    )
    tensor = {"data_type": "TYPE_FP32", "dims": [1]}
    once = {"input": [{"name": "x", **tensor}], "output": [{"name": "y", **tensor}], **config}
    (repository / "once" / "1").mkdir(parents=True)
    (repository / "once" / "config.json").write_text(json.dumps(once | {"backend": "identity"}))
    async with (
        serve(repository, load_model=("counter",)) as server,
        triton.InferenceServerClient(server.url) as client,
    ):
        answered: Any = await client.get_model_config("counter", as_json=True)
        await client.load_model("counter", config=json.dumps(answered["config"]))
        found = await answers(client, {"inputs": asking(1, 2)}, {"inputs": asking(1, 3)})
        with pytest.raises(InferenceServerException) as refused:
            await client.load_model("once")

    assert 5 == len(found)
    assert "within 2 answers" in found[4].message()
    assert "model_transaction_policy.decoupled: expected false" in refused.value.message()


@pytest.mark.slow
async def test_the_state_of_all_requests_is_bounded(serve: Serve, repository: Path) -> None:
    """By the ledger, like everything held for clients."""
    many = 1 << 19
    export_counter(
        repository / "heavy" / "1",
        begin=lambda params, start, count: np.zeros(many, np.float32),
        step=lambda params, state, start, count: (state, {"y": start}, (start > count)[0]),
    )
    async with (
        serve(repository, load_model=("heavy", "counter"), max_held_bytes=2 * many) as server,
        triton.InferenceServerClient(server.url) as client,
    ):
        request = {"inputs": asking(1, 0), "model_name": "heavy"}
        found = await answers(client, request, {"inputs": asking(1, 1)}, request)
        await until_idle(server)

    assert [1] == found[0].as_numpy("number").tolist()
    assert 3 == len(found)
    for refused in found[1:]:
        assert "no memory for the state of the model of 2097152 bytes" in refused.message()


ENDLESS = {
    "plain": """
        class Model(PythonModel):
            inputs = outputs = {"x": ("INT32", [1])}

            def infer(self, inputs):
                while True:
                    yield {"x": inputs["x"]}
        """,
    "awaits": """
        import asyncio

        class Model(PythonModel):
            inputs = outputs = {"x": ("INT32", [1])}

            async def infer(self, inputs):
                while True:
                    await asyncio.sleep(0)
                    yield {"x": inputs["x"]}
        """,
}


@pytest.mark.parametrize("kind", ENDLESS)
async def test_an_unload_cuts_off_python_models_that_go_on(
    serve: Serve, tmp_path: Path, kind: str
) -> None:
    """Their memory is freed after `drain_seconds`, even if a client is still reading."""
    python_models.write(tmp_path / "models", "m", ENDLESS[kind])
    tensor = triton.InferInput("x", [1], "INT32")
    tensor.set_data_from_numpy(np.zeros(1, np.int32))
    settings = {"allow_python_models": True, "drain_seconds": 0.2, "load_model": ("m",)}
    async with (
        serve(tmp_path / "models", **settings) as server,
        triton.InferenceServerClient(server.url) as client,
    ):
        _, instance = server.application.registry.resolve("m")

        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield {"model_name": "m", "inputs": [tensor]}

        stream: Any = client.stream_infer(requests())
        await anext(stream)
        async with asyncio.timeout(60):
            await client.unload_model("m")
            ends = [error async for _, error in stream if error]
            while instance.users:
                await asyncio.sleep(0.001)

    assert ["drain_seconds" in end.message() for end in ends] == [True]
