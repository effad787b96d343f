"""The processes of one server end together."""

import asyncio
from pathlib import Path

import pytest
from support import several

MOST_SECONDS = 60


@pytest.mark.slow
async def test_sigterm_ends_all_of_it(tmp_path: Path) -> None:
    """The parent drains its workers, and ends when they have."""
    async with several.several(several.repository(tmp_path)) as running:
        workers = several.workers(running).values()

        assert await running.stop() == 0

        for pid in workers:
            await asyncio.wait_for(several.is_gone(pid), MOST_SECONDS)
    stopped = [record.get("worker") for record in running.log if record["event"] == "stopped"]
    assert {0, 1, None} == set(stopped)
    assert stopped[-1] is None


@pytest.mark.slow
async def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    """Nothing else would ever stop them."""
    async with several.several(several.repository(tmp_path)) as running:
        running.process.kill()

        for pid in several.workers(running).values():
            await asyncio.wait_for(several.is_gone(pid), MOST_SECONDS)
