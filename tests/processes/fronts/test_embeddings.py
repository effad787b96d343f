"""`/v1/embeddings` through front ends, which read the engine's tokenizer files themselves."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from support import several, tiny_embedding

pytestmark = pytest.mark.slow
MOST_SECONDS = 120
TEXTS = ["hello", "of"]


@asynccontextmanager
async def asked(models: Path) -> AsyncIterator[Sequence[aiohttp.ClientSession]]:
    """Yield sessions with both front ends of an engine that serves the model `tiny`."""
    flags = ("--process-roles", "front-ends", "--model-control-mode", "explicit")
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(
            several.several(several.repository(models), *flags, "--load-model", "*", processes=3)
        )
        sessions = []
        for _ in range(4):
            connector = aiohttp.TCPConnector(keepalive_timeout=MOST_SECONDS)
            session = aiohttp.ClientSession(f"http://{server.http}", connector=connector)
            sessions.append(await stack.enter_async_context(session))
            async with session.get("/v2/health/ready") as answer:
                assert 200 == answer.status
        yield sessions


async def embedded(session: aiohttp.ClientSession, given: Any) -> tuple[int, Any]:
    """Return the status, and the embeddings or the error."""
    body = {"model": "tiny", "input": given}
    async with session.post("/v1/embeddings", json=body) as answer:
        found = await answer.json()
        if answer.status != 200:
            return answer.status, found["error"]["message"]
        return 200, [one["embedding"] for one in found["data"]]


async def test_texts_are_those_of_the_tokenizer_of_the_engine(tmp_path: Path) -> None:
    """This holds for every front end, also after a reload with another tokenizer."""
    tiny_embedding.export(tmp_path / "tiny")
    wanted = [tiny_embedding.expected(tiny_embedding.tokens_of(text)) for text in TEXTS]
    async with asked(tmp_path) as sessions:
        found = await asyncio.gather(*(embedded(session, TEXTS) for session in sessions))
        tokenizer = tmp_path / "tiny" / "1" / "tokenizer.json"
        tokenizer.unlink()
        async with sessions[0].post("/v2/repository/models/tiny/load") as answer:
            assert 200 == answer.status
        without = await asyncio.gather(*(embedded(session, TEXTS) for session in sessions))
        ids = [await embedded(session, [1, 5]) for session in sessions]

    for status, vectors in found:
        assert 200 == status
        assert np.allclose(wanted, vectors, atol=1e-6)
    assert {400} == {status for status, _ in without}
    assert all("tiny" in message and "text" in message for _, message in without)
    assert {200} == {status for status, _ in ids}
