"""A process that somebody has stopped is given nothing, then replaced: those below a server."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support import python_models, several
from support.server import Serve

from xlaserve.language.templates import Template
from xlaserve.models.compilers.process import CompilerProcess, ProcessEndedError
from xlaserve.silence import LOOKS, Stopped, is_stopped

MOST_SECONDS = 120
IN_PROCESS = "\nparameters { key: 'execution' value { string_value: 'process' } }"
SLEEPS = "import time; time.sleep(3600)"


async def until(holds: Callable[[], bool]) -> None:
    """Return once something holds."""
    async with asyncio.timeout(MOST_SECONDS):
        while not holds():
            await asyncio.sleep(0.01)


async def test_silence_counts_while_a_process_is_stopped() -> None:
    """One that is busy says nothing for as long as it likes."""
    with subprocess.Popen(  # noqa: ASYNC220 - it starts at once
        [sys.executable, "-c", SLEEPS]
    ) as process:
        try:
            now = [0.0]
            stopped = Stopped(process.pid, 10, lambda: now[0])

            def look_often() -> bool:
                for _ in range(2 * LOOKS):
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


async def test_a_template_is_rendered_by_another_process() -> None:
    template = Template({"default": "a text"}, {})
    try:
        template.render([])
        assert template._process is not None
        victim = template._process.pid
        os.kill(victim, signal.SIGSTOP)
        await until(lambda: is_stopped(victim))
        text = await asyncio.to_thread(template.render, [])
        by = template._process.pid
    finally:
        template.close()

    assert ("a text", True) == (text, by != victim)


async def test_a_process_that_compiles_is_ended() -> None:
    """Whoever asks it is told that it was stopped, and asks another one."""
    made = CompilerProcess((sys.executable, "-c", SLEEPS), dict(os.environ))
    try:
        os.kill(made.pid, signal.SIGSTOP)
        with pytest.raises(ProcessEndedError, match="stopped for 5 seconds") as found:
            await asyncio.to_thread(made.line)
    finally:
        made.stop()

    assert (True, False) == (found.value.was_stopped, found.value.is_limit)


async def test_a_python_model_is_not_ready_then_has_another_process(
    serve: Serve, tmp_path: Path
) -> None:
    """Requests to others are answered meanwhile, and its own are refused rather than kept."""
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
