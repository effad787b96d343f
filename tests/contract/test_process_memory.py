"""Memory of Python model processes: shared with the server, accounted, and limited."""

import asyncio
import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.python_models import VECTORS, Start, starting, write
from support.server import Serve

from xlaserve.python_models.process import copies

PROCESS = 'parameters { key: "execution" value { string_value: "process" } }'
MIB = 1 << 20


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "models"


@pytest.fixture
def start(serve: Serve, root: Path) -> Start:
    return starting(serve, root)


@pytest.mark.slow
async def test_inputs_that_code_keeps_and_answers_stay_what_they_are(
    start: Any, root: Path
) -> None:
    """Although more messages pass through the shared memory than it can hold."""
    code = """
    class Model(PythonModel):
        kept = []

        def infer(self, inputs):
            x = inputs["x"]
            if x.size == 1:
                return {"y": np.array([float(k[0]) for k in self.kept] +
                                      [float(k[-1]) for k in self.kept], np.float32)}
            if x[0] % 2:
                self.kept.append(x)
            return {"y": x + 1}
    """
    write(root, "m", code, VECTORS + PROCESS)
    numbers = list(range(24))
    async with start(python_shared_bytes=8 * MIB) as client:
        answers = await asyncio.gather(
            *(client.infer("m", x=np.full(MIB // 4, n, np.float32)) for n in numbers)
        )
        kept = (await client.infer("m", x=np.zeros(1, np.float32)))["y"].tolist()

    for number, answer in zip(numbers, answers, strict=True):
        np.testing.assert_array_equal(np.full(MIB // 4, number + 1, np.float32), answer["y"])
    assert 2 * [n for n in numbers if n % 2] == sorted(kept[:12]) + sorted(kept[12:])


@pytest.mark.slow
async def test_a_process_that_reads_late_is_sent_the_whole_of_a_message(
    start: Any, root: Path
) -> None:
    """It is suspended during an input's transfer, for longer than the server waits per attempt."""
    code = """
    import os

    class Model(PythonModel):
        def infer(self, inputs):
            x = inputs["x"]
            return {"y": np.float32([os.getpid()]) if x.size == 1 else x + 1}
    """
    write(root, "m", code, VECTORS + PROCESS)
    x = np.arange(4 * MIB, dtype=np.float32)
    async with start(python_shared_bytes=0) as client:
        pid = int((await client.infer("m", x=np.zeros(1, np.float32)))["y"][0])
        os.kill(pid, signal.SIGSTOP)
        try:
            asked = asyncio.ensure_future(client.infer("m", x=x))
            await asyncio.sleep(5 * copies._POLL_SECONDS)
        finally:
            os.kill(pid, signal.SIGCONT)
        answer = await asked

        assert pid == int((await client.infer("m", x=np.zeros(1, np.float32)))["y"][0])
    np.testing.assert_array_equal(x + 1, answer["y"])


GROWS = """
class Model(PythonModel):
    held = []

    def infer(self, inputs):
        self.held.append(np.ones(int(inputs["x"][0]) << 20, np.uint8))
        return {"y": inputs["x"]}
"""


@pytest.mark.slow
async def test_what_a_process_holds_is_counted_while_it_runs(start: Any, root: Path) -> None:
    write(root, "m", GROWS, VECTORS + PROCESS)
    async with start(http_endpoint="port:0") as client:
        _, instance = client.server.application.registry.resolve("m")
        before = sum(instance.reservation.sizes.values())
        await client.infer("m", x=np.array([200], np.float32))
        async with asyncio.timeout(60):
            while (after := sum(instance.reservation.sizes.values())) < before + 190 * MIB:
                await asyncio.sleep(0.01)
        metrics = await client.metrics()

    assert after < before + 300 * MIB
    assert f" {after}\n" in metrics


@pytest.mark.slow
async def test_a_process_that_holds_too_much_is_ended(start: Any, root: Path) -> None:
    write(root, "m", GROWS, VECTORS + PROCESS)
    async with start(python_process_bytes=600 * MIB) as client:
        await client.infer("m", x=np.array([1], np.float32))
        async with asyncio.timeout(60):
            while True:
                try:
                    await client.infer("m", x=np.array([200], np.float32))
                except Exception as error:
                    text = str(error)
                    break

    # Memory is sampled, during a request or between requests.
    assert re.search("its process was lost .*, it held ", text)
    assert f"more than {600 * MIB} (python_process_bytes), and was killed" in text
