"""A stopped child process (SIGSTOP) gets no work and is replaced, for all kinds of processes."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from support import python_models, several
from support.server import Serve

from xlaserve.language.limited import Limited, LimitedProcess, Limits
from xlaserve.language.templates import Template
from xlaserve.process.silence import CHECKS, Stopped, is_stopped
from xlaserve.runtime.programs.compilers.process import CompilerProcess, ProcessEndedError

MOST_SECONDS = 120
IN_PROCESS = "\nparameters { key: 'execution' value { string_value: 'process' } }"
SLEEPS = "import time; time.sleep(3600)"


async def until(holds: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(MOST_SECONDS):
        while not holds():
            await asyncio.sleep(0.01)


async def test_silence_counts_while_a_process_is_stopped() -> None:
    """A busy process may be silent for any time."""
    with subprocess.Popen(  # noqa: ASYNC220 - it starts at once
        [sys.executable, "-c", SLEEPS]
    ) as process:
        try:
            now = [0.0]
            stopped = Stopped(process.pid, 10, lambda: now[0])

            def look_often() -> bool:
                for _ in range(2 * CHECKS):
                    now[0] += stopped.step
                    stopped.look()
                return stopped.is_over

            while_it_sleeps = look_often()
            process.send_signal(signal.SIGSTOP)
            await until(lambda: is_stopped(process.pid))
            while_it_is_stopped = look_often()
            process.send_signal(signal.SIGCONT)
            await until(lambda: not is_stopped(process.pid))
            behind_it = look_often()
        finally:
            process.kill()

    assert (False, True, False) == (while_it_sleeps, while_it_is_stopped, behind_it)
    assert not is_stopped(process.pid)


def running(limited: Limited) -> LimitedProcess:
    """Return the current process."""
    assert limited._process is not None
    return limited._process


FORKS = """
import os, time
from xlaserve.language import confining

def answer(asked):
    if asked["sleeps_in"] == os.getppid():
        time.sleep(3600)
    return {"fork": os.getpid()}

confining.serve(lambda first: answer)
"""


@pytest.mark.parametrize("is_busy", [False, True])
async def test_a_fork_that_is_stopped_is_replaced(is_busy: bool, tmp_path: Path) -> None:
    """Whether it is working on a request, or about to get one."""
    script = tmp_path / "forks.py"
    script.write_text(FORKS)
    limited = Limited((str(script),), Limits(seconds=600), {}, called="a", model="m")
    try:
        fork = limited.ask({"sleeps_in": 0})["fork"]
        asked = {"sleeps_in": running(limited).pid if is_busy else 0}
        if is_busy:
            asking = asyncio.create_task(asyncio.to_thread(limited.ask, asked))
            await asyncio.sleep(0)
            os.kill(fork, signal.SIGSTOP)
        else:
            os.kill(fork, signal.SIGSTOP)
            await until(lambda: is_stopped(fork))
            asking = asyncio.create_task(asyncio.to_thread(limited.ask, asked))
        found = await asking
    finally:
        limited.close()

    assert found["fork"] != fork


async def busy(limited: Limited) -> "asyncio.Task[Any]":
    """Give a process a task that takes an hour there; return once it works on it."""
    victim = running(limited).pid
    asking = asyncio.create_task(asyncio.to_thread(limited.ask, {"sleeps_in": victim}))
    await until(limited._asking.locked)
    return asking


async def test_a_process_that_is_killed_is_replaced_at_once(tmp_path: Path) -> None:
    """Even though its fork server keeps the pipes open."""
    script = tmp_path / "forks.py"
    script.write_text(FORKS)
    limited = Limited((str(script),), Limits(seconds=600), {}, called="a", model="m")
    try:
        fork = limited.ask({"sleeps_in": 0})["fork"]
        asking = await busy(limited)
        os.kill(running(limited).pid, signal.SIGKILL)
        async with asyncio.timeout(MOST_SECONDS):
            found = await asking
    finally:
        limited.close()

    assert found["fork"] != fork


async def test_a_model_that_is_closed_waits_for_no_text(tmp_path: Path) -> None:
    """No text is waiting, and a later text finds no process."""
    script = tmp_path / "forks.py"
    script.write_text(FORKS)
    limited = Limited((str(script),), Limits(seconds=600), {}, called="a", model="m")
    limited.ask({"sleeps_in": 0})
    asking = await busy(limited)
    async with asyncio.timeout(MOST_SECONDS):
        await asyncio.to_thread(limited.close)
    with pytest.raises(OSError, match="it is being unloaded"):
        await asking
    with pytest.raises(OSError, match="it is being unloaded"):
        limited.ask({"sleeps_in": 0})


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
async def test_a_template_is_rendered_by_another_process(number: int) -> None:
    """The template is not blamed for what happened to the first process."""
    loops = "{% for i in range(1000) %}{% for j in range(1000 * n) %}{% endfor %}{% endfor %}"
    template = Template({"default": f"{loops}a text"}, {})
    try:
        template.render([], variables={"n": 0})
        process = psutil.Process(victim := running(template._process).pid)
        before = process.cpu_times().user
        rendering = asyncio.to_thread(template.render, [], variables={"n": 12})
        asking = asyncio.create_task(rendering)
        await until(lambda: process.cpu_times().user > before)
        os.kill(victim, number)
        text = await asking
        by = running(template._process).pid
    finally:
        template.close()

    assert ("a text", True) == (text, by != victim)


async def test_a_process_that_compiles_is_ended() -> None:
    """Its caller gets an error that it was stopped, and uses another process."""
    made = CompilerProcess((sys.executable, "-c", SLEEPS), dict(os.environ))
    try:
        os.kill(made.pid, signal.SIGSTOP)
        with pytest.raises(ProcessEndedError, match=r"stopped for \d+ seconds") as found:
            await asyncio.to_thread(made.line)
    finally:
        made.stop()

    assert (True, False) == (found.value.is_foreign, found.value.is_limit)


async def test_a_python_model_is_not_ready_then_has_another_process(
    serve: Serve, tmp_path: Path
) -> None:
    """Other models are served meanwhile; requests to this one are rejected, not queued."""
    python_models.write_function(tmp_path, "spawned", several.WHO, several.CONFIG + IN_PROCESS)
    python_models.write_function(tmp_path, "who", several.WHO, several.CONFIG)
    start = python_models.starting(serve, tmp_path)
    async with start() as client, asyncio.timeout(MOST_SECONDS):

        async def by(model: str) -> int:
            answer = await client.infer(model, x=np.ones(1, np.float32))
            return int(answer["y"][0])

        victim = await by("spawned")
        os.kill(victim, signal.SIGSTOP)
        while await client.grpc.is_model_ready("spawned"):
            await asyncio.sleep(0.01)
        refused = await client.fails("spawned", x=np.ones(1, np.float32))
        other = await by("who")
        while not await client.grpc.is_model_ready("spawned"):
            await asyncio.sleep(0.01)
        then = await by("spawned")

    assert refused.startswith("UNAVAILABLE: "), refused
    assert "it is stopped (SIGSTOP)" in refused
    assert os.getpid() == other
    assert then not in (victim, other)
