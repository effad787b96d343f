"""SIGTERM during text streams: each text is completed, and no new one begins."""

import asyncio
import json
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import jax
import jax.numpy as jnp
import pytest
from support import tiny_chat, tiny_language
from support.process import served
from tritonclient.grpc import service_pb2, service_pb2_grpc

pb: Any = service_pb2
EACH, TOKENS, SECONDS = 3, 40, 120
PROMPT = "hello"
PRODUCTS = 500
"""Matrix products per step: generating must take long compared to handling a signal."""


def slow_decode(params: Any, cache: Any, window: Any, tokens: Any, positions: Any) -> Any:
    """Compute what the tiny model does, and some unneeded products."""
    logits, cache = tiny_language.decode(params, cache, window, tokens, positions)
    start = jnp.eye(128, dtype=jnp.float32) * logits[0, 0]
    spent = jax.lax.fori_loop(0, PRODUCTS, lambda _, matrix: jnp.tanh(matrix @ start), start)
    # The sum might be NaN for all XLA knows, so it cannot be optimized away.
    return logits + jnp.float32(0) * spent.sum(), cache


@pytest.fixture
def models(tmp_path: Path) -> Path:
    directory = tiny_chat.export(tmp_path / "models" / "story", slots=str(2 * EACH + 1))
    written = tiny_language.export(tmp_path / "slow" / "1", decode=slow_decode)
    shutil.copytree(written, directory / "1", dirs_exist_ok=True)
    return directory.parent


class Streams:
    """Text streams in progress, and how many have begun."""

    def __init__(self, tokens: int = TOKENS) -> None:
        self._tokens = tokens
        self.begun = asyncio.Semaphore(0)
        """Released once for each stream that has begun or ended without a text."""

    async def over_rest(self, session: aiohttp.ClientSession, url: str) -> tuple[str, str]:
        """Return the text from server-sent events and the finish reason."""
        asked = {"model": "story", "prompt": PROMPT, "max_tokens": self._tokens, "stream": True}
        asked |= {"temperature": 0, "ignore_eos": True}
        pieces, reason = list[str](), ""
        async with session.post(url, json=asked) as answer:
            if answer.status != 200:
                self.begun.release()
                return await answer.text(), str(answer.status)
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                (choice,) = json.loads(line[6:])["choices"]
                if not pieces:
                    self.begun.release()
                pieces.append(choice["text"])
                reason = choice["finish_reason"] or reason
        return "".join(pieces), reason

    async def over_grpc(self, stub: Any) -> tuple[str, str]:
        """Return the text from a gRPC stream and the finish reason."""

        async def requests() -> AsyncIterator[Any]:
            tensor = pb.ModelInferRequest.InferInputTensor(name="text", datatype="BYTES", shape=[1])
            request = pb.ModelInferRequest(
                model_name="story",
                inputs=[tensor],
                outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name="text")],
                raw_input_contents=[len(PROMPT).to_bytes(4, "little") + PROMPT.encode()],
            )
            request.parameters["max_tokens"].int64_param = self._tokens
            request.parameters["ignore_eos"].bool_param = True
            yield request

        pieces, reason = list[str](), ""
        try:
            async for answer in stub.ModelStreamInfer(requests()):
                if answer.error_message:
                    self.begun.release()
                    return answer.error_message, "error"
                found = answer.infer_response
                if not pieces:
                    self.begun.release()
                pieces.append(found.raw_output_contents[0][4:].decode())
                reason = found.parameters["finish_reason"].string_param or reason
        except grpc.aio.AioRpcError as error:
            return error.details() or "", error.code().name
        return "".join(pieces), reason


async def until_refused(begin: Callable[[], Awaitable[tuple[str, str]]]) -> str:
    """Send requests until one is refused; those that arrive before the signal are answered."""
    while True:
        try:
            text, reason = await begin()
        except aiohttp.ClientConnectorError:
            return "not connected"
        if reason not in ("length", "stop"):
            return f"{reason}: {text}"


async def test_texts_that_have_begun_are_told_to_their_end(models: Path) -> None:
    """Over SSE and gRPC; new requests are refused, and the server exits in time."""
    async with (
        served(models) as server,
        aiohttp.ClientSession() as session,
        grpc.aio.insecure_channel(server.url) as channel,
        grpc.aio.insecure_channel(server.url, [("grpc.use_local_subchannel_pool", 1)]) as other,
    ):
        url = f"http://127.0.0.1:{server.http.rpartition(':')[2]}/v1/completions"
        stub, late = map(service_pb2_grpc.GRPCInferenceServiceStub, (channel, other))
        await late.ServerLive(pb.ServerLiveRequest())
        # The reference is an uninterrupted text.
        wanted = await Streams().over_rest(session, url)
        streams, behind = Streams(), Streams(tokens=1)
        asked = [
            asyncio.ensure_future(one)
            for _ in range(EACH)
            for one in (streams.over_rest(session, url), streams.over_grpc(stub))
        ]
        async with asyncio.timeout(SECONDS):
            for _ in asked:
                await streams.begun.acquire()
            server.process.send_signal(signal.SIGTERM)
            await server.until("shutting down")
            ended_before = [task.result() for task in asked if task.done()]
            refused = [
                await until_refused(partial(behind.over_grpc, late)),
                await until_refused(partial(behind.over_rest, session, url)),
            ]
            found = await asyncio.gather(*asked)
            status = await server.process.wait()

    # The signal arrived during all of the streams.
    assert [] == ended_before
    assert "length" == wanted[1]
    assert len(wanted[0]) > TOKENS / 2
    assert [wanted] * (2 * EACH) == found
    assert refused[0].startswith("UNAVAILABLE")
    assert refused[1].startswith(("not connected", "503"))
    assert 0 == status
