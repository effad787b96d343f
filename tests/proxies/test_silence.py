"""Chats through proxies, and streams and connections that are idle beyond the usual timeouts.

One server is behind all proxies, so that all connections are silent at the same time.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from proxies.conftest import Placed
from proxies.test_grpc import request, stub, values_of
from proxies.test_rest import body_of
from support import generating, tiny_chat
from support.conditions import until
from support.proxy_place import Place
from support.proxy_programs import PROXIES
from support.proxy_results import results

pytestmark = [pytest.mark.large, pytest.mark.timeout(900)]

SILENT_SECONDS = 80
"""Longer than the default proxy timeout of 60 s, and than the server's idle timeout of 75 s."""
LIMIT_SECONDS = 400
CHAT = {
    "model": "chat",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 6,
    "temperature": 0,
}


EVENTS = f"/v2/models/{generating.PREFIX}/infer"


class Silence:
    """A barrier for tests that stay silent together."""

    def __init__(self, awaited: int) -> None:
        self._awaited = awaited
        self.reached = 0
        """Number of tests that are silent or have ended."""
        self._end = asyncio.Event()

    async def keep(self) -> None:
        """Stay silent, together with all others."""
        self.reached += 1
        await self._end.wait()

    async def last(self) -> None:
        """Return once all have been silent for the whole period."""
        await until(lambda: self.reached >= self._awaited)
        await asyncio.sleep(SILENT_SECONDS)

    def end(self) -> None:
        """End the silence."""
        self._end.set()


Check = Callable[[Place, Silence], Awaitable[None]]


async def kept_client(place: Place, silence: Silence) -> None:
    """A client notices whether its connection was closed; its next request is answered."""
    async with place.client() as client:
        first = await client.ask("POST", "/v2/models/m/infer", body=body_of(1, 2))
        await silence.keep()
        second = None
        if not client.reader.at_eof():
            second = await client.ask("POST", "/v2/models/m/infer", body=body_of(3, 4))
    if second is None:
        async with place.client() as client:
            second = await client.ask("POST", "/v2/models/m/infer", body=body_of(3, 4))

    assert [[1, 2], [3, 4]] == [one.json["outputs"][0]["data"] for one in (first, second)]


async def silent_events(place: Place, silence: Silence) -> None:
    """Server-sent events: the second comes long after the first."""
    async with place.client() as client:
        accept = ("Accept", "text/event-stream")
        await client.send("POST", EVENTS, accept, body=body_of(2, 2))
        status, _ = await client.head()
        chunks = client.chunks()
        first = await anext(chunks)
        await silence.keep()
        rest = b"".join([chunk async for chunk in chunks])

    # The last event marks the end.
    assert (200, [1, 2]) == (status, [part.count(b"\n\n") for part in (first, rest)])


async def silent_stream(place: Place, silence: Silence) -> None:
    async with place.channel() as channel:
        stream = stub(channel).ModelStreamInfer(timeout=LIMIT_SECONDS)
        await stream.write(request(1, 2))
        found = [values_of((await stream.read()).infer_response)]
        await silence.keep()
        await stream.write(request(3, 4))
        found.append(values_of((await stream.read()).infer_response))

    assert [[1, 2], [3, 4]] == found


async def silent_answers(place: Place, silence: Silence) -> None:
    """The client has sent everything, and the server is silent."""
    async with place.channel() as channel:
        stream = stub(channel).ModelStreamInfer(timeout=LIMIT_SECONDS)
        await stream.write(request(2, 2, model=generating.PREFIX))
        await stream.done_writing()
        found = [values_of((await stream.read()).infer_response)]
        await silence.keep()
        found.append(values_of((await stream.read()).infer_response))

    assert [[0, 0], [1, 1]] == found


async def silent_watch(place: Place, silence: Silence) -> None:
    """No message follows the first answer, and the call stays open."""
    async with place.channel() as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        stream = health.Watch(health_pb2.HealthCheckRequest(), timeout=LIMIT_SECONDS)
        answer = await stream.read()
        await silence.keep()
        is_over = stream.done()
        stream.cancel()

    assert (health_pb2.HealthCheckResponse.SERVING, False) == (answer.status, is_over)


async def kept_channel(place: Place, silence: Silence) -> None:
    async with place.channel() as channel:
        first = await stub(channel).ModelInfer(request(1, 2), timeout=LIMIT_SECONDS)
        await silence.keep()
        second = await stub(channel).ModelInfer(request(3, 4), timeout=LIMIT_SECONDS)

    assert [[1, 2], [3, 4]] == [values_of(one) for one in (first, second)]


REST: Mapping[str, Check] = {
    "a kept-alive connection, idle for 80 s": kept_client,
    "events after 80 s of silence": silent_events,
}
GRPC: Mapping[str, Check] = {
    "a stream after 80 s of silence": silent_stream,
    "answers after 80 s of silence": silent_answers,
    "a watch, silent for 80 s": silent_watch,
    "a channel, idle for 80 s": kept_channel,
}


async def test_silence_ends_nothing(placed: Placed) -> None:
    async with placed(*PROXIES, tls=False) as places:
        tried = {
            place.proxy.name: {**REST, **(GRPC if place.proxy.speaks_grpc else {})}
            for place in places
        }
        silence = Silence(sum(map(len, tried.values())))
        places[0].generation.may_go_on.clear()  # a setting of the single server
        trying = [
            asyncio.ensure_future(place.try_one(name, _silently(check, silence), LIMIT_SECONDS))
            for place in places
            for name, check in tried[place.proxy.name].items()
        ]
        await silence.last()
        silence.end()
        places[0].generation.may_go_on.set()
        await asyncio.gather(*trying)

    for place in places:
        name = place.proxy.name
        assert results(name, tried[name]) == place.found


def _silently(check: Check, silence: Silence) -> Callable[[Place], Awaitable[None]]:
    async def tried(place: Place) -> None:
        try:
            await check(place, silence)
        except Exception:
            silence.reached += 1
            raise

    return tried


# --- chats -------------------------------------------------------------------------------------


async def chat(place: Place) -> None:
    body = json.dumps(CHAT).encode()
    async with place.client() as client:
        answer = await client.ask("POST", "/v1/chat/completions", body=body)

    assert answer.json["choices"][0]["message"]["content"]


async def chat_events(place: Place) -> None:
    """Each token is a separate event, and together they form the whole answer."""
    whole = json.dumps(CHAT).encode()
    body = json.dumps({**CHAT, "stream": True}).encode()
    async with place.client() as client:
        answer = await client.ask("POST", "/v1/chat/completions", body=whole)
        events = await client.ask("POST", "/v1/chat/completions", body=body)
    lines = [line[6:] for line in events.body.decode().splitlines() if line.startswith("data: ")]
    parts: list[Any] = [json.loads(line)["choices"] for line in lines[:-1]]
    deltas = [part[0]["delta"].get("content") or "" for part in parts if part]

    assert "text/event-stream" == events.headers["content-type"].partition(";")[0]
    assert "[DONE]" == lines[-1]
    assert answer.json["choices"][0]["message"]["content"] == "".join(deltas)
    assert len([delta for delta in deltas if delta]) > 1


CHATS = {"a chat": chat, "a streamed chat": chat_events}


async def test_every_chat_is_as_the_page_says(placed: Placed, tmp_path: Path) -> None:
    tiny_chat.export(tmp_path / "models" / "chat", max_length=32, slots="1")
    async with placed(*PROXIES, tls=False) as places:
        for place in places:
            await place.try_all(CHATS)

    for place in places:
        assert results(place.proxy.name, CHATS) == place.found
