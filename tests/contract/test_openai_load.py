"""OpenAI's endpoints under load: concurrent requests, clients that leave, and slow readers."""

import asyncio
import json
import random
import socket
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import openai
import pytest
from support import tiny_chat
from support.http import Connection, message
from support.server import RunningServer, Serve

pytestmark = pytest.mark.slow


@pytest.fixture
async def server(serve: Serve, tmp_path: Path) -> AsyncIterator[RunningServer]:
    tiny_chat.export(tmp_path / "models" / "story")
    settings: dict[str, Any] = {"load_model": ("story",), "http_endpoint": "port:0"}
    async with serve(tmp_path / "models", max_infer_stream_bytes=1 << 12, **settings) as running:
        yield running


async def until_idle(server: RunningServer) -> None:
    application = server.application
    async with asyncio.timeout(60):
        while (
            application.registry.requests
            or application.ledger.held
            or application.registry.resolve("story")[1].users
        ):
            await asyncio.sleep(0.001)


def requests(chance: random.Random, count: int) -> list[dict[str, Any]]:
    """Make chats and completions, greedy and sampled, with one or several choices."""
    found: list[dict[str, Any]] = []
    for index in range(count):
        text = "".join(chance.choice(tiny_chat.LETTERS) for _ in range(chance.randrange(1, 30)))
        asked: dict[str, Any] = {
            "model": "story",
            "max_tokens": chance.randrange(3, 25),
            "temperature": 1.3 if index % 2 else 0,
            "seed": index,
            "n": 1 + index % 3,
            "logprobs": index % 4 == 0,
            "extra_body": {"ignore_eos": index % 5 > 0},
        }
        if index % 4 == 1:
            asked |= {"prompt": text, "logprobs": None, "stop": ["ab", "q"]}
        else:
            asked |= {"messages": [{"role": "user", "content": text}]}
        found.append(asked)
    return found


async def answered(
    client: openai.AsyncOpenAI, asked: dict[str, Any], leave_after: int = -1
) -> dict[int, str] | None:
    """Return the texts of the choices, or None if the client left."""
    create: Any = client.chat.completions.create
    if "prompt" in asked:
        create = client.completions.create
    stream = await create(**asked, stream=True)
    texts: dict[int, str] = {}
    count = 0
    # A generator left to the garbage collector would be closed on an arbitrary thread.
    async with aclosing(aiter(stream)) as chunks:
        async for chunk in chunks:
            for choice in chunk.choices:
                more = choice.text if "prompt" in asked else choice.delta.content
                texts[choice.index] = texts.get(choice.index, "") + (more or "")
            count += 1
            if count == leave_after:
                await stream.close()
                return None
    return texts


async def test_survivors_of_clients_that_left_have_what_they_get_alone(
    server: RunningServer,
) -> None:
    """Sixty-four requests in four slots; a third leaves during its answer."""
    chance = random.Random(11)
    asked = requests(chance, 64)
    leaving = [chance.random() < 1 / 3 for _ in asked]
    tasks = asyncio.all_tasks()
    async with openai.AsyncOpenAI(
        base_url=f"http://{server.http}/v1", api_key="-", max_retries=0
    ) as client:
        alone = [await answered(client, one) for one in asked]
        found = await asyncio.gather(
            *(
                answered(client, one, chance.randrange(1, 6) if leaves else -1)
                for one, leaves in zip(asked, leaving, strict=True)
            )
        )
        whole = await client.completions.create(model="story", prompt="a", max_tokens=1)
    await until_idle(server)

    assert 10 < sum(leaving)
    assert 1 == len(whole.choices)
    for one, other, leaves in zip(alone, found, leaving, strict=True):
        assert other is None if leaves else one == other
    runner: Any = server.application.registry.resolve("story")[1].runner
    assert (4, 0, 0) == (runner.counts.slots, runner.counts.running, runner.counts.positions_used)
    async with asyncio.timeout(60):
        while {task for task in asyncio.all_tasks() - tasks if not task.done()}:
            await asyncio.sleep(0.01)


async def test_a_client_that_does_not_read_holds_its_slots_back(server: RunningServer) -> None:
    """Its buffered answers are limited; when it reads again, it gets everything."""
    body = {
        "model": "story",
        "prompt": "a",
        "max_tokens": 60,
        "n": 128,
        "logprobs": 20,
        "stream": True,
        "ignore_eos": True,
    }
    host, _, port = str(server.http).rpartition(":")
    loop = asyncio.get_running_loop()
    with socket.socket() as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        own.setblocking(False)
        await loop.sock_connect(own, (host, int(port)))
        reader, writer = await asyncio.open_connection(sock=own, limit=4096)
        client = Connection(reader, writer)
        close = ("Connection", "close")
        await client.send(message("POST", "/v1/completions", close, body=json.dumps(body).encode()))
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        runner: Any = server.application.registry.resolve("story")[1].runner
        batch, before = runner._slots._batch, -1
        async with asyncio.timeout(60):
            # Wait until no tokens are generated between two looks: kernel buffers are full, too.
            while not (
                before == runner.counts.output_tokens > 0
                and len(batch.running) == 4
                and all(one.is_paused for one in batch.running)
            ):
                before = runner.counts.output_tokens
                await asyncio.sleep(0.2)
        most = server.application.ledger.held
        reader._transport.resume_reading()  # type: ignore[attr-defined]
        raw = await client.ended()
        writer.close()
    await until_idle(server)

    chunks = [line for line in raw.split(b"\n") if line.startswith(b"data: {")]
    ends = [chunk for chunk in chunks if b'"finish_reason":"length"' in chunk]
    assert raw.rstrip().endswith(b"data: [DONE]\n\n\r\n0")
    assert 128 == len(ends)
    assert before < 128 * 60 == len(chunks)
    assert most < 1 << 20
