"""An unresponsive process gets no more work, and is then replaced."""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support import python_models, several

from xlaserve.process.silence import CHECKS, Silence

ANSWER = ("--process-answer-seconds", "4")
MOST_SECONDS = 120


def test_silence_is_what_this_process_was_awake_for() -> None:
    """A process that was stopped itself must not declare the other end dead."""
    now = [0.0]
    silence = Silence(10, lambda: now[0])
    now[0] += 1000
    silence.look()
    after_a_stop = silence.seconds
    for _ in range(2 * CHECKS):
        now[0] += silence.step
        silence.look()
    before, was_long = silence.seconds, silence.is_long
    silence.heard()

    assert 2 * silence.step == after_a_stop
    assert before >= silence.limit
    assert (True, False, 0) == (was_long, silence.is_long, silence.seconds)


async def until_ready(session: aiohttp.ClientSession, status: int) -> None:
    """Poll the server's readiness until it returns this status."""
    while True:
        async with session.get("/v2/health/ready") as response:
            if response.status == status:
                return
        await asyncio.sleep(0.02)


HOLDS = """
import mmap
import re
from pathlib import Path
with Path({sign!r}).open("r+b") as file:
    sign = mmap.mmap(file.fileno(), 1)
match, text = re.compile("(a|a)+b").match, "a" * 64
sign[0] = 1
match(text)
"""
"""The body of a model that never lets the lock of the interpreter go once it has given a sign.

Nothing between the two lets it go: no thread of the process takes a connection any more.
"""


@dataclass(frozen=True)
class Harmed:
    """A worker that is made to hang."""

    pid: int
    session: aiohttp.ClientSession
    sign: Path
    """The file in which its model reports that it hangs."""
    tasks: asyncio.TaskGroup


async def stop(harmed: Harmed) -> None:
    """Stop a process, and return once it is stopped."""
    os.kill(harmed.pid, signal.SIGSTOP)
    state = Path(f"/proc/{harmed.pid}/stat")
    while state.read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "T":
        await asyncio.sleep(0.01)


async def hang(harmed: Harmed) -> None:
    """Make a process execute code that never returns, and wait until it does."""

    async def ask() -> None:
        with pytest.raises(aiohttp.ClientError):
            await harmed.session.post("/v2/models/holds/infer", json=several.who())

    harmed.tasks.create_task(ask())
    while harmed.sign.read_bytes() != b"\1":
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("harm", "reason"),
    [(stop, "it was stopped for"), (hang, "it did not respond for")],
)
async def test_a_worker_that_does_not_answer_is_not_ready_then_replaced(
    tmp_path: Path,
    harm: Callable[[Harmed], Coroutine[Any, Any, None]],
    reason: str,
) -> None:
    """The other worker answers meanwhile, on existing and new connections."""
    sign = tmp_path / "sign"
    sign.write_bytes(b"\0")
    models = several.repository(tmp_path / "models")
    body = HOLDS.format(sign=str(sign))
    python_models.write_function(models, "holds", body, several.CONFIG)
    async with (
        several.several(models, *ANSWER) as running,
        asyncio.timeout(MOST_SECONDS),
        several.one_each(running.http) as sessions,
        asyncio.TaskGroup() as tasks,
    ):
        by_pid = {await several.asked(one, running.http): one for one in sessions}
        victim, other = (several.workers(running)[number] for number in (0, 1))
        await harm(Harmed(victim, by_pid[victim], sign, tasks))
        # As many as would reach the hung worker, which accepts none.
        opened = tasks.create_task(several.connections_of(running.http, 4))
        await until_ready(by_pid[other], 400)
        answered = await several.asked(by_pid[other], running.http)
        of_new = await opened
        await several.replaced(running, 0, victim)
        await until_ready(by_pid[other], 200)
        died = [record for record in running.log if record["event"] == "worker died"]

    assert other == answered
    assert victim not in of_new
    assert [0] == [record["worker"] for record in died]
    assert died[0]["reason"].startswith(reason)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["engine", "front end"])
async def test_front_ends_and_their_engine(tmp_path: Path, part: str) -> None:
    """Clients get errors if the engine is stopped; those of a stopped front end use others."""
    flags = ("--process-roles", "front-ends", *ANSWER)
    async with (
        several.several(several.repository(tmp_path), *flags, processes=3) as running,
        asyncio.timeout(MOST_SECONDS),
        aiohttp.ClientSession(f"http://{running.http}") as session,
    ):
        await until_ready(session, 200)
        victims = several.workers(running)
        number = 0 if part == "engine" else 1
        os.kill(victims[number], signal.SIGSTOP)
        if part == "engine":
            await until_ready(session, 400)
            async with session.post("/v2/models/who/infer", json=several.who()) as response:
                refused = response.status, await response.text()
            assert 503 == refused[0], refused
        else:
            await several.connections_of(running.http, 4)
        await several.replaced(running, number, victims[number])
