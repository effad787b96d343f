"""Python models in processes of their own: what they can do, and what their end does not end."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as triton
from support import python_models
from support.asking import Client, given
from support.python_models import Start, starting, write
from support.server import Serve
from tritonclient.utils import InferenceServerException

PROCESS = 'parameters { key: "execution" value { string_value: "process" } }'
CODE = """
import os, sys, time

class Model(PythonModel):
    def load(self, context):
        self.context = context
        self.calls = context.counter("calls_total")

    def infer(self, inputs, request):
        x = inputs["x"]
        self.calls.increment()
        what = int(x[0])
        if what == 1:
            os._exit(3)
        if what == 2:
            os.kill(os.getpid(), 11)
        if what == 3:
            while True:
                pass
        if what == 4:
            sys.exit(7)
        if what == 5:
            print("printed\\n" * 5000, flush=True)
        if what == 6:
            return self.context.infer_and_wait("inner", {"x": x})
        if what == 7:
            raise InferenceError(f"refused {request.parameters['mine']} {request.id}")
        if what == 8:
            return {"y": x.astype(np.int8)}
        return {"y": np.array([os.getpid(), os.getppid()], np.float32)}
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "models"


@pytest.fixture
def start(serve: Serve, root: Path) -> Start:
    return starting(serve, root)


def what(number: int) -> "np.ndarray[Any, Any]":
    return np.array([number, 0], np.float32)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def again(client: Client, number: int = 0) -> "np.ndarray[Any, Any]":
    """Ask until the process is there again."""
    async with asyncio.timeout(60):
        while True:
            try:
                return (await client.infer("m", x=what(number)))["y"]
            except Exception as error:
                if "its process was lost" not in str(error):
                    raise
                await asyncio.sleep(0.05)


async def test_a_process_answers_calls_others_and_reports(
    start: Any, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(root, "m", CODE, python_models.VECTORS + PROCESS)
    python_models.write_function(root, "inner", "return {'y': x + 1}")
    async with start(http_endpoint="port:0") as client:
        pid, parent = (await client.infer("m", x=what(0)))["y"].tolist()
        inner = (await client.infer("m", x=what(6)))["y"].tolist()
        refused = await client.fails("m", parameters={"mine": 5}, x=what(7))
        wrong = await client.fails("m", x=what(8))
        exits = await client.fails("m", x=what(4))
        await client.infer("m", x=what(5))
        same = (await client.infer("m", x=what(0)))["y"].tolist()
        metrics = await client.metrics()
        _, instance = client.server.application.registry.resolve("m")
        held = instance.info.memory.total_bytes
        await client.grpc.unload_model("m")
        left = is_running(int(pid))

    assert parent == os.getpid() != pid
    assert [7, 1] == inner
    assert "INVALID_ARGUMENT: model 'm': refused 5 " in refused
    assert "INTERNAL: model 'm': output 'y' of its code: expected FP32[-1], got INT8[2]" in wrong
    assert "INTERNAL: model 'm': SystemExit: 7" in exits
    assert pid == same[0]
    assert 'calls_total{model="m",version="1"} 7\n' in metrics
    assert held > 1 << 20
    assert not left
    printed = capsys.readouterr().out
    assert 1 <= printed.count("line=printed") <= 1000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (1, "it ended with exit status 3; it is being restarted"),
        pytest.param(*(2, "it ended by signal SIGSEGV"), marks=pytest.mark.large),
        (3, "it was silent for 1 seconds (python_process_seconds)"),
    ],
)
async def test_a_process_that_is_lost_is_started_again(
    start: Any, root: Path, number: int, expected: str
) -> None:
    write(root, "m", CODE, python_models.VECTORS + PROCESS)
    async with start(python_process_seconds=1.0) as client:
        before, _ = (await client.infer("m", x=what(0)))["y"].tolist()
        text = await client.fails("m", x=what(number))
        after, _ = (await again(client)).tolist()

    lost = "its process was lost while it executed this request"
    assert f"INTERNAL: model 'm': {lost}, {expected}" in text
    assert before != after
    assert not is_running(int(before))
    assert not is_running(int(after))


@pytest.mark.slow
async def test_each_copy_has_a_process(start: Any, root: Path) -> None:
    """Two copies compute at the same time, whatever holds the lock of Python."""
    group = "instance_group { count: 2 kind: KIND_CPU }"
    code = """
    import os, pathlib, time

    class Model(PythonModel):
        def infer(self, inputs):
            place = pathlib.Path(__file__).parent.parent.parent.parent
            (place / f"begun{os.getpid()}").touch()
            while len(list(place.glob("begun*"))) < 2:
                time.sleep(0.01)
            return {"y": np.array([os.getpid()], np.float32)}
    """
    write(root, "m", code, python_models.VECTORS + PROCESS + group)
    async with start() as client:
        asked = await asyncio.gather(*(client.infer("m", x=what(0)) for _ in range(2)))

    assert 2 == len({float(answer["y"][0]) for answer in asked})


@pytest.mark.slow
async def test_a_process_that_waits_for_another_model_is_not_silent(start: Any, root: Path) -> None:
    write(root, "m", CODE, python_models.VECTORS + PROCESS)
    python_models.write_function(root, "inner", "import time; time.sleep(2.5); return {'y': x + 1}")
    async with start(python_process_seconds=1.0) as client:
        answer = (await client.infer("m", x=what(6)))["y"].tolist()

    assert [7, 1] == answer


STREAM = """
class Model(PythonModel):
    def infer(self, inputs):
        for number in range(int(inputs["x"][0])):
            yield {"y": np.array([number], np.float32)}
"""


@pytest.mark.slow
async def test_many_answers_come_from_a_process_too(start: Any, root: Path) -> None:
    write(root, "m", STREAM, python_models.VECTORS + PROCESS)

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "m", "inputs": [given(triton, "x", what(50))]}

    found = []
    async with start() as client:
        async for result, error in client.grpc.stream_infer(requests()):
            assert error is None
            found.append(int(result.as_numpy("y")[0]))
            if len(found) == 50:
                break

    assert list(range(50)) == found


LOADS = {
    "raises": ("raise ValueError('no weights')", "model.py raised ValueError: no weights"),
    "dies": ("import os; os._exit(9)", "it ended with exit status 9"),
}


@pytest.mark.slow
async def test_what_keeps_a_process_from_loading_is_in_the_error_of_the_load(
    start: Any, root: Path
) -> None:
    for name, (code, _) in LOADS.items():
        write(root, name, code, python_models.VECTORS + PROCESS)
    write(root, "hangs", "while True: pass", python_models.VECTORS + PROCESS)
    wrong = PROCESS.replace('"process"', '"elsewhere"')
    write(root, "wrong", CODE, python_models.VECTORS + wrong)
    async with start(load_model=("none_such",)) as client:
        found = {name: await client.refused(name) for name in (*LOADS, "wrong")}
    async with start(load_model=("none_such",), load_seconds=1.0) as client:
        found["hangs"] = await client.refused("hangs")

    for name, (_, expected) in LOADS.items():
        assert f"failed to load '{name}', {expected}" in found[name]
    assert "after 1 seconds (load_seconds)" in found["hangs"]
    assert "expected threads or process, got 'elsewhere'" in found["wrong"]
    async with asyncio.timeout(60):
        while _children():
            await asyncio.sleep(0.05)


def _children() -> list[str]:
    """Return the processes of models that this process has."""
    shown = subprocess.run(
        ["ps", "-o", "args=", "--ppid", str(os.getpid())],
        capture_output=True,
        text=True,
        check=False,
    )
    return [line for line in shown.stdout.splitlines() if "process.child" in line]


@pytest.mark.slow
async def test_no_process_outlives_a_server_that_is_killed(root: Path) -> None:
    write(root, "m", CODE, python_models.VECTORS + PROCESS)
    server = subprocess.Popen(  # noqa: ASYNC220 - there is nothing else to wait for
        [
            *(sys.executable, "-m", "xlaserve.cli", "serve", str(root), "--allow-python-models"),
            *("--grpc-endpoint", "port:0", "--http-endpoint", "none", "--device", "cpu"),
            *("--compilation-cache-directory", "none"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert server.stdout is not None
    with server, server.stdout as lines:
        address = next(line for line in lines if '"listening"' in line)
        assert any('"started"' in line for line in lines)
        url = address.partition('"grpc": "')[2].partition('"')[0]
        async with triton.InferenceServerClient(url) as client:
            result: Any = await client.infer("m", [given(triton, "x", what(0))])
            pid = int(result.as_numpy("y")[0])
            # It spins, and looks at nothing.
            spinning = asyncio.ensure_future(client.infer("m", [given(triton, "x", what(3))]))
            await asyncio.sleep(0)
            server.send_signal(signal.SIGKILL)
            with pytest.raises(InferenceServerException):
                await spinning
    async with asyncio.timeout(60):
        while is_running(pid):
            await asyncio.sleep(0.01)
