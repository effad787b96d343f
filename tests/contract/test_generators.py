"""Language models over gRPC: many concurrent requests, some of them cancelled."""

# pyright: reportAttributeAccessIssue=false
# protobuf creates the classes of service_pb2 at import, so type checkers do not see them.

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import tritonclient.grpc.aio as triton
from support import tiny_language
from support.server import RunningServer, Serve
from support.tiny_language import LENGTH, VOCAB, greedy
from tritonclient.utils import InferenceServerException

CONFIG = "\n".join(
    f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}'
    for name, value in {"slots": 4, "windows": 64, "chunk": 8}.items()
)


LEVELS = "dynamic_batching { priority_levels: 2 default_priority_level: 2 }"
ONE_SLOT = CONFIG.replace('"4"', '"1"')


@pytest.fixture
async def server(serve: Serve, tmp_path: Path) -> AsyncIterator[RunningServer]:
    repository = tmp_path / "models"
    tiny_language.export(repository / "story" / "1")
    (repository / "story" / "config.pbtxt").write_text(CONFIG)
    async with serve(repository, load_model=("story",), http_endpoint="port:0") as running:
        yield running


def asking(prompt: list[int], **parameters: Any) -> dict[str, Any]:
    tensor = triton.InferInput("tokens", [len(prompt)], "INT32")
    tensor.set_data_from_numpy(np.array(prompt, np.int32))
    return {"model_name": "story", "inputs": [tensor], "parameters": parameters}


async def answered(client: Any, request: dict[str, Any], leave_after: int = 0) -> Any:
    """Return the tokens and the last answer's parameters; None if the request was cancelled."""

    async def sent() -> AsyncIterator[dict[str, Any]]:
        yield request

    tokens: list[int] = []
    last: Any = None
    stream = client.stream_infer(sent())
    async for result, error in stream:
        if error is not None:
            raise error
        tokens.append(int(result.as_numpy("token")[0]))
        last = result.get_response().parameters
        if len(tokens) == leave_after:
            stream.cancel()
            return None
    return tokens, last


async def until_idle(server: RunningServer) -> None:
    application = server.application
    async with asyncio.timeout(60):
        while (
            application.registry.requests
            or application.grpc.open_streams
            or application.ledger.held
            or application.registry.resolve("story")[1].users
        ):
            await asyncio.sleep(0.001)


@pytest.mark.slow
async def test_survivors_of_cancelled_neighbours_answer_as_they_do_alone(
    server: RunningServer,
) -> None:
    """Sixteen requests in four slots, greedy and sampled; a third is cancelled midway."""
    chance = random.Random(3)
    requests = []
    for index in range(16):
        prompt = [chance.randrange(6, VOCAB) for _ in range(chance.randrange(1, 30))]
        sampled = {"temperature": 1.2, "seed": index} if index % 2 else {}
        requests.append(
            asking(prompt, max_tokens=chance.randrange(5, 25), ignore_eos=True, **sampled)
        )
    leaving = [index % 3 == 0 for index in range(16)]
    async with triton.InferenceServerClient(server.url) as client:
        alone = [await answered(client, request) for request in requests]
        found = await asyncio.gather(
            *(
                answered(client, request, 1 + index % 4 if leaves else 0)
                for index, (request, leaves) in enumerate(zip(requests, leaving, strict=True))
            )
        )
    await until_idle(server)

    for whole, one, leaves in zip(alone, found, leaving, strict=True):
        assert (one is None) if leaves else whole[0] == one[0]


async def test_the_last_answer_says_why_it_is_the_last(server: RunningServer) -> None:
    """Prompts that are too long and invalid parameters are rejected."""
    async with triton.InferenceServerClient(server.url) as client:
        tokens, told = await answered(client, asking([7, 8, 9], max_tokens=3))
        stopped, why = await answered(client, asking([7, 8, 9], logit_bias="5:100"))
        too_long = "'story', input 'tokens': expected 1 to 64 tokens.*got 65"
        with pytest.raises(InferenceServerException, match=too_long):
            await answered(client, asking([7] * (LENGTH + 1)))
        too_much = "parameter 'top_p': expected more than 0"
        with pytest.raises(InferenceServerException, match=too_much):
            await answered(client, asking([7], top_p=1.5))
    await until_idle(server)

    assert greedy([7, 8, 9], 3) == tokens
    assert ("length", 3) == (told["finish_reason"].string_param, told["prompt_tokens"].int64_param)
    assert ([5], "stop") == (stopped, why["finish_reason"].string_param)
    assert why["stop_token"].bool_param


async def test_one_answer_has_the_tokens_of_many(server: RunningServer) -> None:
    """Over gRPC, REST and `generate`, with the parameters of a stream's last answer."""
    assert server.http is not None
    prompt, seeded = [9, 8, 7], {"max_tokens": 5, "temperature": 1.3, "seed": 4, "logprobs": 2}
    body = {
        "inputs": [{"name": "tokens", "datatype": "INT32", "shape": [3], "data": prompt}],
        "parameters": seeded,
    }
    async with triton.InferenceServerClient(server.url) as client:
        many, last = await answered(client, asking(prompt, **seeded))
        one: Any = await client.infer(**asking(prompt, **seeded))
        told = one.get_response().parameters
        wrong: dict[str, Any] = asking(prompt) | {"outputs": [triton.InferRequestedOutput("token")]}
        with pytest.raises(InferenceServerException, match="one answer 'token', it has 'tokens'"):
            await client.infer(**wrong)
        too_long = "'story', input 'tokens': expected 1 to 64 tokens.*got 65"
        with pytest.raises(InferenceServerException, match=too_long):
            await client.infer(**asking([7] * (LENGTH + 1)))
    async with aiohttp.ClientSession(f"http://{server.http}") as session:
        async with session.post("/v2/models/story/infer", json=body) as response:
            rest = await response.json()
        plain = {"tokens": prompt, "parameters": seeded}
        async with session.post("/v2/models/story/generate", json=plain) as response:
            generated = await response.json()
        body["parameters"] = {"top_p": 7}
        async with session.post("/v2/models/story/infer", json=body) as response:
            refused = await response.json()
        body["parameters"] = {"max_tokens": 1, "priority": 1}
        async with session.post("/v2/models/story/infer", json=body) as response:
            preferred = await response.json()
        body["parameters"] = {"max_tokens": 1, "priority": 0}
        async with session.post("/v2/models/story/infer", json=body) as response:
            assert 200 == response.status
    await until_idle(server)
    outputs = {output["name"]: output for output in rest["outputs"]}

    assert many == one.as_numpy("tokens").tolist() == outputs["tokens"]["data"]
    assert many == generated["tokens"]
    assert ("length", 3) == (told["finish_reason"].string_param, told["prompt_tokens"].int64_param)
    assert last["finish_reason"].string_param == rest["parameters"]["finish_reason"]
    assert "length" == generated["finish_reason"]
    assert (len(many), 2 * len(many)) == (
        len(one.as_numpy("logprobs")),
        len(outputs["top_tokens"]["data"]),
    )
    assert "parameter 'top_p'" in refused["error"]
    assert "expected 0, since the model has no priority_levels, got 1" in preferred["error"]


@pytest.mark.slow
@pytest.mark.parametrize(("config", "begins"), [(ONE_SLOT, 5), (f"{ONE_SLOT}\n{LEVELS}", 1)])
async def test_priorities_count_where_the_queue_has_levels(
    serve: Serve, tmp_path: Path, config: str, begins: int
) -> None:
    """With levels, ahead of all queued requests; otherwise first come, first served."""
    repository = tmp_path / "models"
    tiny_language.export(repository / "story" / "1")
    (repository / "story" / "config.pbtxt").write_text(config)
    async with serve(repository, load_model=("story",)) as running:
        runner: Any = running.application.registry.resolve("story")[1].runner
        held, step, order = threading.Event(), runner._programs.step, []

        def step_later(*arguments: Any) -> Any:
            assert held.wait(60)
            return step(*arguments)

        runner._programs.step = step_later
        async with triton.InferenceServerClient(running.url) as client:

            async def asked(number: int, priority: int) -> None:
                request = asking([7, 8], max_tokens=1) | {"priority": priority}
                await answered(client, request)
                order.append(number)

            tasks = []
            priorities = [0, 0, 0, 2, 0, 1] if LEVELS in config else [0] * 6
            for number, priority in enumerate(priorities):
                tasks.append(asyncio.create_task(asked(number, priority)))
                station = running.application.registry.resolve("story")[1].station
                async with asyncio.timeout(60):
                    while len(list(station.pending_since())) < number:
                        await asyncio.sleep(0.001)
            held.set()
            await asyncio.gather(*tasks)
        await until_idle(running)

    # At most two requests, those already in the slot or its thread, may finish or be preempted
    # first.
    assert order.index(5) in ({0, 1, 2} if begins == 1 else {begins})


@pytest.mark.slow
async def test_survivors_among_preempted_and_cancelled_ones_answer_as_they_do_alone(
    serve: Serve, tmp_path: Path
) -> None:
    """Prompts with common prefixes, two priorities, two slots; a third is cancelled midway."""
    repository = tmp_path / "models"
    tiny_language.export(repository / "story" / "1")
    two_slots = CONFIG.replace('"4"', '"2"')
    (repository / "story" / "config.pbtxt").write_text(f"{two_slots}\n{LEVELS}")
    chance = random.Random(5)
    trunk = [chance.randrange(6, VOCAB) for _ in range(30)]
    requests = []
    for index in range(48):
        prompt = [*trunk[: chance.randrange(31)], *chance.choices(range(6, VOCAB), k=3)]
        sampled = {"temperature": 1.2, "seed": index, "frequency_penalty": 0.5}
        parameters = {"max_tokens": chance.randrange(5, 25), "ignore_eos": True}
        request = asking(prompt, **parameters, **(sampled if index % 2 else {}))
        requests.append(request | {"priority": 1 if index % 3 == 2 else 0})
    leaving = [chance.random() < 1 / 3 for _ in requests]
    async with (
        serve(repository, load_model=("story",)) as running,
        triton.InferenceServerClient(running.url) as client,
    ):
        alone = [await answered(client, request) for request in requests]

        async def later(index: int) -> Any:
            await asyncio.sleep(0.002 * index)
            leave_after = 1 + index % 4 if leaving[index] else 0
            return await answered(client, requests[index], leave_after)

        found = await asyncio.gather(*map(later, range(len(requests))))
        counts: Any = running.application.registry.resolve("story")[1].runner
        preempted, cached = counts.counts.preemptions, counts.counts.cached_tokens
        await until_idle(running)

    assert preempted
    assert cached
    for whole, one, leaves in zip(alone, found, leaving, strict=True):
        assert (one is None) if leaves else whole[0] == one[0]
