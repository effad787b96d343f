"""Sequences over the wire: a recurrent JAX model, its state on the device, and stock clients."""

import asyncio
import json
import queue
import random
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
from structlog.testing import capture_logs
from support import sequence_models
from support.http import ask
from support.python_models import write
from support.sequence_models import configure, export_fold, folded
from support.server import RunningServer, Serve
from tritonclient.utils import InferenceServerException

from xlaserve.serving.access.tokens import digest_of, new_token

SMALL = """
parameters { key: "batch_sizes" value { string_value: "1,4" } }
instance_group [ { count: 1 kind: KIND_CPU } ]
"""
TWO = """
parameters { key: "batch_sizes" value { string_value: "1,4" } }
parameters { key: "devices" value { string_value: "0,1" } }
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that folds, for each strategy, and on two devices."""
    root = tmp_path_factory.mktemp("models")
    oldest = "oldest { max_candidate_sequences: 16 }"
    for name, strategy, more in (
        ("fold", oldest.replace("16", "1000"), SMALL),
        ("direct", "direct { }", SMALL),
        ("two", oldest, TWO),
    ):
        export_fold(root, name, max_batch_size=4)
        configure(root, name, strategy=strategy, more=more, max_batch_size=4)
    (root / "two" / "initial_state").mkdir()
    (root / "two" / "initial_state" / "seven").write_bytes(np.int64(7).tobytes())
    initial = 'initial_state { data_type: TYPE_INT64 dims: [ 1 ] data_file: "seven" }'
    configure(root, "two", strategy=oldest, more=TWO, max_batch_size=4, initial=initial)
    return root


@pytest.fixture
def model() -> str:
    return "fold"


@pytest.fixture
async def server(serve: Serve, repository: Path, model: str) -> AsyncIterator[RunningServer]:
    async with serve(repository, load_model=(model,), http_endpoint="port:0") as running:
        yield running


class Client:
    """Sends requests of sequences over gRPC, and knows what the answers should be."""

    def __init__(self, client: tritonclient.grpc.aio.InferenceServerClient, model: str) -> None:
        self._client = client
        self._model = model

    async def ask(self, id: int, value: int, *, start: bool = False, end: bool = False) -> int:
        given = tritonclient.grpc.aio.InferInput("x", [1, 1], "INT32")
        given.set_data_from_numpy(sequence_models.x(value))
        answer: Any = await self._client.infer(
            self._model, [given], sequence_id=id, sequence_start=start, sequence_end=end
        )
        assert answer.as_numpy("told").tolist() == [[start, 1, end]]
        assert answer.as_numpy("id").tolist() == [[id]]
        return int(answer.as_numpy("y")[0, 0])

    async def interleaved(self, count: int, length: int, *, initial: int = 0) -> None:
        """Have so many sequences in progress, and send what is next of any of them at random."""
        values = {
            id: [random.randrange(-99, 99) for _ in range(length)] for id in range(1, count + 1)
        }
        order = [id for id in values for _ in range(length)]
        random.shuffle(order)
        sent: dict[int, asyncio.Task[None]] = {}
        at = dict.fromkeys(values, 0)

        async def step(id: int, index: int, before: "asyncio.Task[None] | None") -> None:
            if before is not None:
                await before
            start, end = index == 0, index == length - 1
            state = await self.ask(id, values[id][index], start=start, end=end)
            assert state == folded(values[id][: index + 1], initial)

        for id in order:
            sent[id] = asyncio.ensure_future(step(id, at[id], sent.get(id)))
            at[id] += 1
        await asyncio.gather(*sent.values())


@pytest.mark.parametrize(
    ("model", "initial", "count"),
    [
        pytest.param("fold", 0, 1000, marks=pytest.mark.slow),
        ("direct", 0, 60),
        ("two", 7, 60),
    ],
)
async def test_interleaved_sequences_end_right(
    server: RunningServer, model: str, initial: int, count: int
) -> None:
    """As many as there are slots, or more, in any order of their messages."""
    async with tritonclient.grpc.aio.InferenceServerClient(server.url) as client:
        await Client(client, model).interleaved(count, 3, initial=initial)
        statistics: Any = await client.get_inference_statistics(model, as_json=True)

    (found,) = statistics["model_stats"]
    assert found["inference_count"] == str(count * 3)
    assert int(found["execution_count"]) < count * 3, "no two shared a batch"


async def test_callers_have_sequences_of_their_own(
    serve: Serve, repository: Path, tmp_path: Path
) -> None:
    """Of one id, also where both are in progress; an end of one is none of the other."""
    tokens = {"a": new_token(), "b": new_token()}
    callers = [
        {"name": name, "token": digest_of(token), "allow": ["infer"]}
        for name, token in tokens.items()
    ]
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps({"caller": callers}))
    given = tritonclient.grpc.aio.InferInput("x", [1, 1], "INT32")

    async with (
        serve(repository, load_model=("fold",), access_rules=str(rules)) as server,
        tritonclient.grpc.aio.InferenceServerClient(server.url) as client,
    ):

        async def ask(who: str, value: int, **flags: Any) -> int:
            given.set_data_from_numpy(sequence_models.x(value))
            headers = {"authorization": f"Bearer {tokens[who]}"}
            answer: Any = await client.infer(
                "fold", [given], sequence_id=7, headers=headers, **flags
            )
            return int(answer.as_numpy("y")[0, 0])

        first = await ask("a", 5, sequence_start=True)
        with pytest.raises(InferenceServerException, match="must specify a start|sequence"):
            await ask("b", 6)
        other = await ask("b", 6, sequence_start=True)
        following = [await ask("a", 1), await ask("b", 2), await ask("b", 3, sequence_end=True)]
        last = await ask("a", 4, sequence_end=True)

    assert (folded([5]), folded([6])) == (first, other)
    assert [folded([5, 1]), folded([6, 2]), folded([6, 2, 3])] == following
    assert folded([5, 1, 4]) == last


async def test_a_stream_and_http_go_on_with_the_same_sequence(server: RunningServer) -> None:
    """Integer and string ids, of the blocking stock clients."""
    assert server.http is not None
    url = server.http.removeprefix("http://")
    await asyncio.to_thread(partial(_stream, server.url))
    await asyncio.to_thread(partial(_over_http, url))


def _stream(url: str) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    with tritonclient.grpc.InferenceServerClient(url) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        values = {101: [1, 2, 3, 4], 102: [5, 6, 7, 8]}
        for index in range(4):
            for id, inputs in values.items():
                given = tritonclient.grpc.InferInput("x", [1, 1], "INT32")
                given.set_data_from_numpy(sequence_models.x(inputs[index]))
                client.async_stream_infer(
                    "fold",
                    [given],
                    request_id=f"{id}",
                    sequence_id=id,
                    sequence_start=index == 0,
                    sequence_end=index == 3,
                )
        for index in range(4):
            for id, inputs in values.items():
                answer = answers.get(timeout=30)
                assert answer.get_response().id == f"{id}"
                assert answer.as_numpy("y").tolist() == [[folded(inputs[: index + 1])]]
        client.stop_stream()


def _over_http(url: str) -> None:
    with tritonclient.http.InferenceServerClient(url) as client:
        for index, value in enumerate((3, 4, 5)):
            given = tritonclient.http.InferInput("x", [1, 1], "INT32")
            given.set_data_from_numpy(sequence_models.x(value), binary_data=index % 2 == 0)
            answer: Any = client.infer(
                "fold",
                [given],
                sequence_id=9,
                sequence_start=index == 0,
                sequence_end=index == 2,
            )
            assert answer.as_numpy("y").tolist() == [[folded((3, 4, 5)[: index + 1])]]
        given = tritonclient.http.InferInput("x", [1, 1], "INT32")
        given.set_data_from_numpy(sequence_models.x(1))
        with pytest.raises(InferenceServerException, match="must specify the START flag"):
            client.infer("fold", [given], sequence_id=9)
        with pytest.raises(InferenceServerException, match="non-zero or non-empty correlation ID"):
            client.infer("fold", [given])
        text: Any = "a"
        with pytest.raises(InferenceServerException, match="'CORRID' of model 'fold' is UINT64"):
            client.infer("fold", [given], sequence_id=text, sequence_start=True)


@pytest.mark.parametrize(("model", "slots", "replicas"), [("fold", 1000, 1), ("two", 16, 2)])
async def test_what_clients_see_has_no_controls_and_no_states(
    server: RunningServer, model: str, slots: int, replicas: int
) -> None:
    """The configuration stays as it was written; the states are in the memory of the model."""
    assert server.http is not None
    metadata = json.loads((await ask(server.http, "GET", f"/v2/models/{model}")).body)
    config = json.loads((await ask(server.http, "GET", f"/v2/models/{model}/config")).body)
    extensions = json.loads((await ask(server.http, "GET", "/v2")).body)["extensions"]
    memory = server.application.registry.resolve(model)[1].info.memory

    assert [tensor["name"] for tensor in metadata["inputs"]] == ["x"]
    assert [tensor["name"] for tensor in metadata["outputs"]] == ["y", "told", "id"]
    assert config["sequence_batching"]["oldest"]["max_candidate_sequences"] == slots
    assert "sequence" in extensions
    assert memory.states_bytes == slots * replicas * np.int64().nbytes
    assert sum(memory.per_device.values()) == memory.total_bytes


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("strategy", ["oldest { max_candidate_sequences: 8 }", "direct { }"])
async def test_python_models_keep_their_states_by_the_id_of_the_sequence(
    serve: Serve, tmp_path: Path, strategy: str, batched: bool
) -> None:
    """Ids are strings; a request that fails interrupts what waits behind it."""
    sequence_models.write_keeper(tmp_path / "models", "keeper", strategy, batched=batched)
    async with (
        serve(tmp_path / "models", load_model=("keeper",), allow_python_models=True) as server,
        tritonclient.grpc.aio.InferenceServerClient(server.url) as client,
    ):

        async def keep(id: str, value: int, *, start: bool = False, end: bool = False) -> int:
            given = tritonclient.grpc.aio.InferInput("INPUT", [1, 1], "INT32")
            given.set_data_from_numpy(sequence_models.x(value))
            text: Any = id
            answer: Any = await client.infer(
                "keeper", [given], sequence_id=text, sequence_start=start, sequence_end=end
            )
            return int(answer.as_numpy("OUTPUT")[0, 0])

        async def follow(id: int) -> list[int]:
            await keep(str(id), id, start=True)
            with pytest.raises(InferenceServerException, match="it cannot be added"):
                await keep(str(id), 1000)
            return [await keep(str(id), 1), await keep(str(id), 10, end=True)]

        alone = await follow(1)
        with pytest.raises(InferenceServerException, match="it cannot be added"):
            await keep("99", 1000, start=True)
        with pytest.raises(InferenceServerException, match="must specify the START flag"):
            await keep("99", 1)
        # A batch fails as a whole where the class puts it together.
        together = [] if batched else await asyncio.gather(*map(follow, range(2, 30)))

    assert alone == [2, 12 + 1]
    assert together == [[id + 1, 2 * id + 11] for id in range(2, 30)][: len(together)]


KEEPS = """
class Model(PythonModel):
    def load(self, context):
        self.kept = {}

    def infer(self, inputs):
        told = {name: inputs[name].ravel()[0] for name in ("START", "READY", "END", "CORRID")}
        if told["END"]:
            self.kept.pop(told["CORRID"], None)
        else:
            self.kept[told["CORRID"]] = inputs["x"]
        if not told["READY"]:
            self.expired = told
            raise ValueError("expired")
        names = ",".join(sorted(name.decode() for name in self.kept))
        last = getattr(self, "expired", "")
        return {"y": np.array([[names.encode(), str(last).encode()]], object)}
"""
KEEPS_CONFIG = """
max_batch_size: 4
input [{ name: "x", data_type: TYPE_STRING, dims: [ -1 ] }]
output [{ name: "y", data_type: TYPE_STRING, dims: [ 2 ] }]
sequence_batching {
  max_sequence_idle_microseconds: IDLE
  oldest { max_candidate_sequences: 8 }
  CONTROLS
}
"""


@pytest.mark.parametrize("execution", ["threads", pytest.param("process", marks=pytest.mark.slow)])
async def test_a_python_model_is_told_of_a_sequence_that_expires(
    serve: Serve, tmp_path: Path, execution: str
) -> None:
    """END, with READY for false: it need not keep what nobody goes on with.

    Nobody waits for the answer: an error is in the log.
    """
    controls = sequence_models.CONTROLS.replace("TYPE_UINT64", "TYPE_STRING")
    config = KEEPS_CONFIG.replace("CONTROLS", controls).replace("IDLE", "50000")
    said = f'parameters {{ key: "execution" value {{ string_value: "{execution}" }} }}'
    write(tmp_path, "keeps", KEEPS, config + said)
    with capture_logs() as log:
        async with (
            serve(tmp_path, load_model=("keeps",), allow_python_models=True) as server,
            tritonclient.grpc.aio.InferenceServerClient(server.url) as client,
        ):

            async def begin(id: str, *, end: bool = False) -> list[bytes]:
                given = tritonclient.grpc.aio.InferInput("x", [1, 1], "BYTES")
                given.set_data_from_numpy(np.array([[b"t"]], object))
                text: Any = id
                answer: Any = await client.infer(
                    "keeps", [given], sequence_id=text, sequence_start=True, sequence_end=end
                )
                found: list[bytes] = answer.as_numpy("y")[0].tolist()
                return found

            first = await begin("a")
            while b"a" in (seen := await begin("b", end=True))[0].split(b","):
                await asyncio.sleep(0.01)
            while not any(
                record["event"].startswith("sequence end notification failed") for record in log
            ):
                await asyncio.sleep(0.01)

    failures = [
        record for record in log if record["event"].startswith("sequence end notification failed")
    ]
    assert [("keeps", "a", True)] == [
        (record["model"], record["sequence"], "expired" in record["error"]) for record in failures
    ]
    assert b"a" == first[0]
    assert b"" == seen[0]
    assert b"b'a'" in seen[1]
    told = seen[1].decode()
    assert "'END': np.True_" in told
    assert "'READY': np.float32(0.0)" in told
    assert "'START': np.int32(0)" in told


@pytest.mark.large
async def test_ten_thousand_interleaved_sequences_end_right(serve: Serve, tmp_path: Path) -> None:
    root = tmp_path / "models"
    export_fold(root, max_batch_size=64)
    strategy = "oldest { max_candidate_sequences: 10000 }"
    configure(root, strategy=strategy, max_batch_size=64)
    settings = {"max_requests_per_model": 20_000}
    async with (
        serve(root, load_model=("fold",), **settings) as server,
        tritonclient.grpc.aio.InferenceServerClient(server.url) as client,
    ):
        await Client(client, "fold").interleaved(10_000, 4)
