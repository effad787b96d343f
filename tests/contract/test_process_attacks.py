"""Hostile Python models in separate processes: nothing hangs, and nothing leaks."""

import asyncio
import gc
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as triton
from support.asking import Client, given
from support.python_models import VECTORS, Start, starting, write, write_function
from support.server import Serve

from xlaserve.process.silence import Stopped
from xlaserve.python_models import copies
from xlaserve.python_models.process import copies as process_copies
from xlaserve.python_models.process import pipe

PROCESS = 'parameters { key: "execution" value { string_value: "process" } }'
WORST = """
import gc, os, signal, sys, threading, time

def pipe():
    return next(one for one in gc.get_objects() if type(one).__name__ == "Pipe").socket

class Model(PythonModel):
    forked = 0

    def load(self, context):
        self.context = context

    def infer(self, inputs):
        x = inputs["x"]
        what = int(x[0])
        if what == 1:  # both go on from here
            self.forked = os.fork() or os.getpid()
        if what == 2:  # what is forked has the end of the pipe that it was forked with
            self.forked = os.fork()
            if not self.forked:
                time.sleep(1000)
            return {"y": np.array([self.forked], np.float64).view(np.float32)}
        if what == 3:
            os._exit(3)
        if what == 4:
            os.closerange(0, 3)
        if what == 5:
            os.write(1, b"x" * 100 + b"\\n" if len(x) < 3 else bytes(20 << 20))
        if what == 6:  # half of a message
            pipe().send(bytes([16, 0, 0]))
            os.kill(os.getpid(), signal.SIGSTOP)
        if what == 7:
            pipe().send(b"\\xff" * 12)
        if what == 8:  # a message of nothing that is known
            pipe().send(bytes([14, 0, 0, 0]) + bytes(8) + b"\\x82\\xa4kind\\xa1?\\xa7tensors\\x90")
        if what == 9:
            return self.context.infer_and_wait("m", {"x": x})
        return {"y": np.array([os.getpid()], np.float64).view(np.float32)}
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "models"


@pytest.fixture
def start(serve: Serve, root: Path) -> Start:
    return starting(serve, root)


def _memory_of_processes() -> set[str]:
    """Return the mappings and descriptors of memory shared with Python models."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    links = []
    for one in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            links.append(f"{one.name} {one.readlink()}")
    return {line for line in (*maps, *links) if "xlaserve-python" in line}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Check that a server leaves nothing behind that was not there before."""
    gc.collect()
    before = _memory_of_processes()
    yield
    gc.collect()

    assert _memory_of_processes() <= before


def what(number: int, size: int = 2) -> "np.ndarray[Any, Any]":
    return np.full(size, number, np.float32)


async def pid_of(client: Client, number: int = 0, size: int = 2) -> int:
    answer = (await client.infer("m", x=what(number, size)))["y"]
    return int(answer.view(np.float64)[0])


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def until_gone(*pids: int) -> None:
    async with asyncio.timeout(60):
        while any(map(is_running, pids)):
            await asyncio.sleep(0.01)


async def again(client: Client) -> int:
    """Retry until the process has been restarted."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await pid_of(client)
            except Exception as error:
                if "its process was lost" not in str(error):
                    raise
                await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_what_a_process_forks_neither_speaks_for_it_nor_outlives_it(
    start: Any, root: Path
) -> None:
    write(root, "m", WORST, VECTORS + PROCESS)
    async with start(python_process_seconds=0) as client:
        first = await pid_of(client, 1)
        same = await pid_of(client)
        forked = await pid_of(client, 2)
        lost = await client.fails("m", x=what(3))
        await until_gone(forked)
        second = await again(client)
        left = await pid_of(client, 2)
        await client.grpc.unload_model("m")
        await until_gone(first, second, left)

    assert first == same != second
    assert "it ended with exit status 3" in lost


async def test_a_process_that_calls_itself_is_told(start: Any, root: Path) -> None:
    write(root, "m", WORST, VECTORS + PROCESS)
    async with start() as client:
        text = await client.fails("m", x=what(9))
        pid = await pid_of(client)

    assert pid
    assert "deadlock: all its instances wait for nested calls (m -> m)" in text


@pytest.mark.slow
async def test_closed_descriptors_and_a_flood_of_lines_end_nothing(
    start: Any, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(root, "m", WORST, VECTORS + PROCESS)
    async with start() as client:
        pids = [await pid_of(client, number, size) for number, size in ((5, 3), (4, 2), (0, 2))]

    assert 1 == len(set(pids))
    assert len(capsys.readouterr().out) < 4 << 20


@pytest.mark.parametrize("number", [6, 7, 8])
@pytest.mark.slow
async def test_a_message_that_is_none_ends_the_process_and_not_the_server(
    start: Any, root: Path, number: int
) -> None:
    write(root, "m", WORST, VECTORS + PROCESS)
    async with start(python_process_seconds=1.0) as client:
        before = await pid_of(client)
        text = await client.fails("m", x=what(number))
        after = await again(client)
        await until_gone(before)

    assert before != after
    assert "INTERNAL: model 'm': its process was lost while it executed this request" in text


@pytest.mark.parametrize("shared", [pytest.param(0, marks=pytest.mark.slow), 64 << 20])
@pytest.mark.slow
async def test_a_process_that_is_stopped_within_a_transfer_can_be_unloaded(
    start: Any, root: Path, shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even without a timeout, and before the server notices that it is stopped."""
    monkeypatch.setattr(Stopped, "look", lambda stopped: None)
    monkeypatch.setattr(process_copies, "UNLOAD_SECONDS", 0.5)
    monkeypatch.setattr(pipe, "STALLED_SECONDS", 0.5)
    write(root, "m", WORST, VECTORS + PROCESS)
    async with start(
        python_process_seconds=0, python_shared_bytes=shared, drain_seconds=0.5
    ) as client:
        pid = await pid_of(client)
        os.kill(pid, signal.SIGSTOP)
        asked = [asyncio.ensure_future(client.infer("m", x=what(0, 4 << 20))) for _ in range(3)]
        async with asyncio.timeout(60):
            # How many reach the process together depends on timing.
            while client.server.application.registry.requests < 3 or not sum(
                len(c._groups) for c in _copies(client)
            ):
                await asyncio.sleep(0.01)
            await client.grpc.unload_model("m")
            answers = await asyncio.gather(*asked, return_exceptions=True)
        await until_gone(pid)

    assert all(isinstance(answer, Exception) for answer in answers)


def _copies(client: Client) -> Any:
    _, instance = client.server.application.registry.resolve("m")
    runner: Any = instance.runner
    return runner._copies


@pytest.mark.slow
async def test_requests_that_are_cancelled_at_any_point_leave_nothing(
    start: Any, root: Path
) -> None:
    write_function(root, "m", "return {'y': x}", VECTORS + PROCESS)
    async with start(python_shared_bytes=4 << 20) as client:
        _, instance = client.server.application.registry.resolve("m")
        for turns in range(60):
            asked = [asyncio.ensure_future(client.infer("m", x=what(n, 50_000))) for n in range(3)]
            for _ in range(turns):
                await asyncio.sleep(0)
            for one in asked[1:]:
                one.cancel()
            assert [0] == (await asked[0])["y"][:1].tolist()
        (copy,) = _copies(client)
        async with asyncio.timeout(60):
            while copy._groups or instance.users:
                await asyncio.sleep(0.01)
        # Shared memory is freed once its last users are known.
        answers = [await client.infer("m", x=what(n, 400_000)) for n in range(5)]
        gc.collect()
        taken = len(copy._pipe.writer._allocated)

    assert list(range(5)) == [int(answer["y"][0]) for answer in answers]
    assert taken <= 2


SENDERS = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.senders = []

    def execute(self, requests):
        self.senders += [request.get_response_sender() for request in requests]

    def finalize(self):
        while True:
            time.sleep(1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["threads", "process"])
async def test_a_model_that_never_answers_and_never_ends_can_be_unloaded(
    start: Any, root: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (copies, process_copies):
        monkeypatch.setattr(module, "UNLOAD_SECONDS", 0.5)
    monkeypatch.setattr("xlaserve.python_models.triton.copies.UNLOAD_SECONDS", 0.5)
    decoupled = "model_transaction_policy { decoupled: True }"
    more = PROCESS if where == "process" else ""
    write(root, "m", SENDERS, VECTORS + decoupled + more, begin="")

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "m", "inputs": [given(triton, "x", what(0))]}
        await asyncio.Event().wait()

    async with start(drain_seconds=0.5) as client:
        _, instance = client.server.application.registry.resolve("m")
        answers = client.grpc.stream_infer(requests()).__aiter__()
        asking = asyncio.ensure_future(answers.__anext__())
        async with asyncio.timeout(60):
            while not instance.users:
                await asyncio.sleep(0.01)
            await client.grpc.unload_model("m")
            _, error = await asking
            ready = await client.grpc.is_model_ready("m")

    assert error is not None
    assert not ready
