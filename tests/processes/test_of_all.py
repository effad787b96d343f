"""Requests that one worker answers for all of them, over every interface."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import tritonclient.grpc.aio as triton
from prometheus_client.parser import text_string_to_metric_families
from support import several
from support.process import ServerProcess

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
MOST_SECONDS = 60


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="server")
async def one_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ServerProcess]:
    """A server of two processes, each of which has answered one request of `who`."""
    models = several.repository(tmp_path_factory.mktemp("models"))
    async with several.several(models) as running:
        found = await several.connections_of(running.http, 2)
        assert [1, 1] == list(found.values())
        yield running


async def each_worker(url: str, stack: AsyncExitStack) -> list[aiohttp.ClientSession]:
    """Open a connection to each of two workers."""
    made = [aiohttp.ClientSession(f"http://{url}", raise_for_status=True) for _ in range(2)]
    sessions = [await stack.enter_async_context(session) for session in made]
    for session in sessions:
        async with session.get("/v2/health/live"):
            pass
    return sessions


async def got(session: aiohttp.ClientSession, path: str) -> Any:
    async with session.get(path) as response:
        return await response.json(content_type=None)


async def test_statistics_are_of_all_workers_whichever_is_asked(server: ServerProcess) -> None:
    async with AsyncExitStack() as stack:
        sessions = await each_worker(server.http, stack)
        found = [await got(one, "/v2/models/who/stats") for one in sessions]
        client = await stack.enter_async_context(triton.InferenceServerClient(server.url))
        over_grpc = await client.get_inference_statistics("who")

    counts = [one["model_stats"][0]["inference_stats"]["success"]["count"] for one in found]
    assert [2, 2] == counts
    assert over_grpc is not None
    assert 2 == over_grpc.model_stats[0].inference_stats.success.count


async def test_metrics_are_of_all_workers_and_name_them(server: ServerProcess) -> None:
    """Counters are added up; other metrics appear once per worker."""
    async with AsyncExitStack() as stack:
        sessions = await each_worker(server.http, stack)
        texts = []
        for session in sessions:
            async with session.get("/metrics") as response:
                texts.append(await response.text())
    for text in texts:
        samples = {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        of_who = (("model", "who"), ("version", "1"))

        assert 2 == samples["nv_inference_request_success_total", *of_who]
        assert 1 == samples["xlaserve_model_ready", *of_who]
        assert 1 == samples["xlaserve_model_loads_total", *of_who]
        for worker in "01":
            assert 1 == samples["xlaserve_worker_answered", ("worker", worker)]
            assert 0 < samples["process_resident_memory_bytes", ("worker", worker)]
            assert ("xlaserve_event_loop_lag_seconds_count", ("worker", worker)) in samples


async def test_pages_and_the_index_are_of_all_workers(server: ServerProcess) -> None:
    async with AsyncExitStack() as stack:
        (session, _) = await each_worker(server.http, stack)
        status = await got(session, "/status.json?search=who")
        (row,) = status["models"]
        async with session.post("/v2/repository/index") as response:
            index = await response.json()
        async with asyncio.timeout(MOST_SECONDS):
            while True:
                history = await got(session, "/history.json")
                if history["recent"] and history["recent"][-1]["success"] == 2:
                    break

    assert (2, {}) == (row["requests"]["success"], status["missing"])
    assert [("echo", "READY", ""), ("who", "READY", "")] == [
        (one["name"], one["state"], one["reason"]) for one in index
    ]
    assert {} == history["missing"]
    of_who = {one["name"]: one.get("success", 0) for one in history["recent"][-1]["models"]}
    assert 2 == of_who["who"]
