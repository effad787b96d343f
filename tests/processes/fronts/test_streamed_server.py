"""Streams and texts of an engine with two front ends, as clients see them on real sockets."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import numpy as np
import openai
import pytest
import pytest_asyncio
import tritonclient.grpc as blocking
import tritonclient.grpc.aio as triton
from support import python_models, sequence_models, several, tiny_chat, tiny_language
from support.conditions import until
from support.events import EventReader
from support.http import connect, message
from support.process import ServerProcess
from support.tiny_chat import text_of, tokens_of

from xlaserve.serving.access.tokens import digest_of, new_token

pytestmark = pytest.mark.asyncio(loop_scope="module")
MOST_SECONDS = 120
FRONT_ENDS = 2
RATED = new_token()
LENGTH = 4096
"""Positions of the language model: filling them takes seconds."""
LETTERS_ONLY = {str(token): -100 for token in range(len(tiny_chat.SPECIAL))}
"""A logit bias that excludes special tokens, so that no answer ends early."""
LARGE = 1 << 16
"""Elements of an answer of 256 KiB."""

COUNT = """
import pathlib

class Model(PythonModel):
    def infer(self, inputs):
        count, size, number = map(int, inputs["x"])
        progress = pathlib.Path({progress!r}, str(number))
        try:
            for at in range(count):
                progress.write_text(str(at + 1))
                yield {{"y": np.full(size, at, np.float32)}}
        finally:
            pathlib.Path({progress!r}, f"{{number}} ended").touch()
"""
"""Answers `x = [count, size, number]` with 0, 1, 2, ...; records its progress in a file."""

FREE = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            x = request.inputs()[0].as_numpy()
            y = [pb_utils.Tensor("y", np.full((1, x.size), "a")), pb_utils.Tensor("z", x)]
            answers.append(pb_utils.InferenceResponse(y[: int(x[0])]))
        return answers
"""
"""Answers with texts instead of numbers, and omits outputs."""


@dataclass
class Running:
    """The shared server of these tests, and the progress file of its counting model."""

    grpc: str
    http: str
    progress: Path
    process: ServerProcess

    def computed(self, number: int) -> int:
        """Return how many answers were computed for a request."""
        file = self.progress / str(number)
        return int(file.read_text() or 0) if file.exists() else 0

    def has_ended(self, number: int) -> bool:
        """Tell whether nothing more is computed for a request."""
        return (self.progress / f"{number} ended").exists()


def rules() -> str:
    rated = {"requests_per_second": 1e-6, "burst": 2}
    tenant = {"name": "rated", "token": digest_of(RATED), "allow": ["infer", "metadata"], **rated}
    every = ["infer", "metadata", "manage", "metrics", "health"]
    return json.dumps({"caller": [tenant, {"name": "anyone", "anyone": True, "allow": every}]})


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="server")
async def one_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    """One server of three processes, which each test leaves as it was."""
    folder = tmp_path_factory.mktemp("streams")
    (folder / "rules.json").write_text(rules())
    progress = folder / "progress"
    progress.mkdir()
    models = several.repository(folder / "models")
    python_models.write(
        models, "count", COUNT.format(progress=str(progress)), python_models.VECTORS
    )
    more = 'output [{ name: "z", data_type: TYPE_INT32, dims: [ 1 ] }]'
    python_models.write(models, "free", FREE, python_models.VECTORS + more)
    sequence_models.export_fold(models)
    sequence_models.configure(models)
    tiny_chat.export(models / "story", max_length=LENGTH, slots="2")
    flags = ["--process-roles", "front-ends", "--access-rules", str(folder / "rules.json")]
    flags += ["--max-infer-stream-bytes", str(1 << 16)]
    async with several.several(models, *flags, processes=FRONT_ENDS + 1) as running:
        yield Running(running.url, running.http, progress, running)


@asynccontextmanager
async def chatting(server: Running, key: str = "none") -> AsyncIterator[Any]:
    async with openai.AsyncOpenAI(
        base_url=f"http://{server.http}/v1", api_key=key, max_retries=0
    ) as client:
        yield client


def tensor(*values: float) -> list[Any]:
    found = triton.InferInput("x", [len(values)], "FP32")
    found.set_data_from_numpy(np.array(values, np.float32))
    return [found]


async def answers(client: Any, requests: Sequence[dict[str, Any]], **more: Any) -> list[Any]:
    """Return the results of a stream of ModelStreamInfer, and its errors."""

    async def sent() -> AsyncIterator[dict[str, Any]]:
        for request in requests:
            yield request

    return [error or result async for result, error in client.stream_infer(sent(), **more)]


async def counts(server: Running, model: str) -> tuple[int, int]:
    """Return how many requests of a model were answered, and how many failed."""
    async with aiohttp.ClientSession(f"http://{server.http}") as session:
        async with session.get(f"/v2/models/{model}/stats") as response:
            (found,) = (await response.json())["model_stats"]
    kinds = found["inference_stats"]
    return kinds["success"]["count"], kinds["fail"]["count"]


async def gauge(server: Running, name: str) -> float:
    async with aiohttp.ClientSession(f"http://{server.http}") as session:
        async with session.get("/metrics") as response:
            lines = (await response.text()).splitlines()
    (line,) = [line for line in lines if line.startswith(name + "{")]
    return float(line.rpartition(" ")[2])


def difference(after: tuple[int, int], before: tuple[int, int]) -> tuple[int, int]:
    return after[0] - before[0], after[1] - before[1]


async def is_free(server: Running) -> None:
    """Return once no slot of the generator is in use."""
    async with asyncio.timeout(MOST_SECONDS):
        while await gauge(server, "xlaserve_generation_running"):
            await asyncio.sleep(0.01)


async def test_outputs_unlike_the_configuration_pass_through_front_ends(server: Running) -> None:
    found = []
    async with triton.InferenceServerClient(server.grpc) as client:
        for count in (0, 1, 2):
            result: Any = await client.infer("free", tensor(count, 5))
            outputs = result.get_response().outputs
            found.append({o.name: result.as_numpy(o.name).tolist() for o in outputs})

    texts = [[b"a", b"a"]]
    assert [{}, {"y": texts}, {"y": texts, "z": [2, 5]}] == found


async def test_each_request_of_a_stream_has_its_answers(server: Running) -> None:
    """In order, with the request's id and a marked last one, more than can be in flight."""

    def ask() -> list[Any]:
        told: list[Any] = []
        with blocking.InferenceServerClient(server.grpc) as client:
            client.start_stream(callback=lambda result, error: told.append(error or result))
            for count in (70, 3, 40):
                client.async_stream_infer(
                    "count",
                    tensor(count, 3, count),
                    request_id=str(count),
                    enable_empty_final_response=True,
                )
            client.stop_stream()
        return told

    before = await counts(server, "count")
    told = await asyncio.to_thread(ask)
    found: dict[str, list[Any]] = {}
    for one in told:
        response = one.get_response()
        is_final = response.parameters["triton_final_response"].bool_param
        values = None if is_final else one.as_numpy("y").tolist()
        found.setdefault(response.id, []).append(values)

    assert {
        str(count): [*([float(at)] * 3 for at in range(count)), None] for count in (70, 3, 40)
    } == found
    assert (3, 0) == difference(await counts(server, "count"), before)


async def test_requests_of_a_stream_are_answered_in_their_order(server: Running) -> None:
    """The model gives one answer per request, which the engine executes."""
    requests = [
        {"model_name": "echo", "inputs": tensor(number), "request_id": str(number)}
        for number in range(100)
    ]
    async with triton.InferenceServerClient(server.grpc) as client:
        told = await answers(client, requests)

    assert [[float(number)] for number in range(100)] == [
        one.as_numpy("y").tolist() for one in told
    ]


async def test_a_sequence_goes_over_streams_of_all_front_ends(server: Running) -> None:
    """Its state is in the engine: each stream continues where the previous one ended."""
    values = list(range(1, 3 * 2 * FRONT_ENDS + 1))
    told = []
    for begin in range(0, len(values), 3):
        requests = []
        for value in values[begin : begin + 3]:
            given = triton.InferInput("x", [1, 1], "INT32")
            given.set_data_from_numpy(sequence_models.x(value))
            ends = {"sequence_start": value == 1, "sequence_end": value == values[-1]}
            requests.append({"model_name": "fold", "inputs": [given], "sequence_id": 7, **ends})
        async with triton.InferenceServerClient(server.grpc) as client:
            told += [one.as_numpy("y").item() for one in await answers(client, requests)]

    expected = [sequence_models.folded(values[: at + 1]) for at in range(len(values))]
    assert expected == told


async def test_events_come_one_by_one(server: Running) -> None:
    """`generate_stream` with a model that takes tokens; they equal those computed by NumPy."""
    prompt = tokens_of("abc")
    body = {"tokens": prompt, "max_tokens": 40, "ignore_eos": True}
    text = json.dumps(body).encode()
    async with connect(server.http) as client:
        reader = EventReader(client)
        await client.send(message("POST", "/v2/models/story/generate_stream", body=text))
        await reader.head()
        events = await reader.events()
    tokens = [data["token"] for _, data in events if "token" in data]

    assert 40 == len(tokens)
    greedy = tiny_language.greedy(prompt, 40)
    same = len(greedy) - (greedy[-1] == tiny_language.STOP)
    assert greedy[:same] == tokens[:same]


async def test_a_chat_is_streamed(server: Running) -> None:
    """By every front end, using the chat template and tokenizer files of the model."""
    said = [{"role": "user", "content": "hello"}]
    prompt = [1, 2, *tokens_of("hello"), 3]
    greedy = tiny_language.greedy(prompt, 8)
    before = await counts(server, "story")
    found = []
    for _ in range(2 * FRONT_ENDS):
        async with chatting(server) as client:
            stream = await client.chat.completions.create(
                model="story", messages=said, max_tokens=8, temperature=0, stream=True
            )
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
            found.append("".join(pieces))

    assert [text_of(greedy)] * len(found) == found
    assert (len(found), 0) == difference(await counts(server, "story"), before)


async def test_a_whole_answer_is_what_the_stream_says(server: Running) -> None:
    """On both endpoints, a non-streaming request gets the same text at once."""
    async with chatting(server) as client:
        whole = await client.completions.create(
            model="story", prompt="abc", max_tokens=6, temperature=0
        )
    async with aiohttp.ClientSession(f"http://{server.http}") as session:
        body = {"tokens": tokens_of("abc"), "max_tokens": 6}
        async with session.post("/v2/models/story/generate", json=body) as response:
            plain = await response.json()
    greedy = tiny_language.greedy(tokens_of("abc"), 6)

    assert text_of(greedy) == whole.choices[0].text
    assert greedy == plain["tokens"]


async def test_a_stop_text_is_no_failure(server: Running) -> None:
    """The engine ends the answer, and counts it once as answered."""
    bias = {"logit_bias": LETTERS_ONLY, "temperature": 0}
    async with chatting(server) as client:
        whole = await client.completions.create(model="story", prompt="abc", max_tokens=12, **bias)
        stop = whole.choices[0].text[3:6]
        before = await counts(server, "story")
        cut = await client.completions.create(
            model="story", prompt="abc", max_tokens=LENGTH - 8, stop=stop, **bias
        )
    await is_free(server)

    expected = whole.choices[0].text.partition(stop)[0]
    assert (expected, "stop") == (cut.choices[0].text, cut.choices[0].finish_reason)
    assert (1, 0) == difference(await counts(server, "story"), before)


async def test_a_client_that_leaves_frees_its_slot(server: Running) -> None:
    """In the middle of its answer; all slots are taken and released this way."""
    tokens = "xlaserve_generation_output_tokens_total"
    before = await gauge(server, tokens)
    async with chatting(server) as client:
        streams = [
            await client.completions.create(
                model="story",
                prompt="abc",
                max_tokens=LENGTH - 8,
                logit_bias=LETTERS_ONLY,
                stream=True,
            )
            for _ in range(2)
        ]
        for stream in streams:
            await anext(aiter(stream))
            await stream.close()
        await is_free(server)
        assert await gauge(server, tokens) - before < 2 * (LENGTH - 8)
        answer = await client.completions.create(model="story", prompt="abc", max_tokens=2)

    assert answer.choices


async def test_a_client_that_does_not_read_holds_back_its_own_answers(server: Running) -> None:
    """Its model pauses while another stream gets its answers; reading on, it misses none."""
    count, other = 400, 300
    url = f"http://{server.http}"
    body = json.dumps({"x": [count, LARGE, 1]}).encode()
    async with (
        triton.InferenceServerClient(server.grpc) as client,
        aiohttp.ClientSession(url, read_bufsize=1 << 12) as session,
    ):
        async with session.post("/v2/models/count/generate_stream", data=body) as slow:
            assert slow.status == 200
            request = {"model_name": "count", "inputs": tensor(other, LARGE, 2)}
            told = await answers(client, [request])
            assert len(told) == other
            assert server.computed(1) < other // 2
            lines = []
            async for line in _lines(slow):
                lines.append(line)

    assert [float(at) for at in range(count)] == lines
    assert server.has_ended(1)


async def _read_to_its_end(stream: Any) -> None:
    async for _, error in stream:
        assert error is None


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[float]:
    """Yield the first element of each event, whatever its length."""
    buffered = b""
    async for chunk in response.content.iter_chunked(1 << 20):
        *events, buffered = (buffered + chunk).split(b"\n\n")
        for event in events:
            _, _, start = event.partition(b'"y":[')
            if start:
                yield float(start[:16].partition(b",")[0])


async def test_a_stream_that_is_cancelled_ends_at_the_engine(server: Running) -> None:
    """The model's generator is closed."""

    async def sent() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "count", "inputs": tensor(1 << 22, 1, 3)}
        await asyncio.Event().wait()

    before = await counts(server, "count")
    async with triton.InferenceServerClient(server.grpc) as client:
        stream: Any = client.stream_infer(sent())
        result, _ = await anext(stream)
        stream.cancel()
        await until(lambda: server.has_ended(3))

    assert [0.0] == result.as_numpy("y").tolist()
    async with asyncio.timeout(MOST_SECONDS):
        while difference(await counts(server, "count"), before) != (0, 1):
            await asyncio.sleep(0.01)


async def test_quotas_count_a_stream_once(server: Running) -> None:
    """A rate of two admits two requests, however many answers and processes they have."""

    async def asked() -> int:
        async with chatting(server, RATED) as client:
            try:
                stream = await client.completions.create(
                    model="story", prompt="abc", max_tokens=4, stream=True
                )
                return len([chunk async for chunk in stream])
            except openai.RateLimitError:
                return 0

    found = [await asked() for _ in range(4)]

    assert [True, True, False, False] == [bool(count) for count in found]


@pytest.mark.slow
async def test_an_engine_that_dies_ends_its_streams(server: Running) -> None:
    """gRPC reports UNAVAILABLE and SSE an error; texts are available again afterwards."""
    victim = several.workers(server.process)[0]
    headers = {"triton_grpc_error": "true"}

    async def sent() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "count", "inputs": tensor(1 << 22, 1, 4)}
        await asyncio.Event().wait()

    text = json.dumps({"x": [1 << 22, 1, 5]}).encode()
    async with triton.InferenceServerClient(server.grpc) as client, connect(server.http) as events:
        stream: Any = client.stream_infer(sent(), headers=headers)
        await anext(stream)
        reader = EventReader(events)
        await events.send(message("POST", "/v2/models/count/generate_stream", body=text))
        await reader.head()
        await reader.event()
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await _read_to_its_end(stream)
        last = (await reader.events())[-1]

    assert grpc.StatusCode.INTERNAL is raised.value.code()
    for told in (raised.value.details() or "", last[1]["error"]):
        assert "model 'count': the engine process ended while it executed this request" in told
    async with asyncio.timeout(MOST_SECONDS), chatting(server) as chat:
        while True:
            try:
                answer = await chat.completions.create(model="story", prompt="abc", max_tokens=3)
                break
            except openai.InternalServerError as error:
                assert error.status_code == 503
                await asyncio.sleep(0.05)
    greedy = tiny_language.greedy(tokens_of("abc"), 3)
    assert len(greedy) == answer.usage.completion_tokens
