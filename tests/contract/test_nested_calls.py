"""Python models that call other models, in a whole server."""

import asyncio
import builtins
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import python_models
from support.python_models import Start, starting, write, write_function
from support.server import Serve

from xlaserve.python_models.nested import Nested
from xlaserve.runtime.calls import NestedRequest
from xlaserve.serving.infer_call import InferCall
from xlaserve.serving.stations.handled import accompany

SYNC = """
class Model(PythonModel):
    def load(self, context):
        self.context = context

    def infer(self, inputs):
        x = inputs["x"]
        {body}
"""
ASYNC = SYNC.replace("    def infer", "    async def infer")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "models"


@pytest.fixture
def start(serve: Serve, root: Path) -> Start:
    return starting(serve, root)


def call(root: Path, name: str, body: str, kind: str = SYNC, more: str = "") -> None:
    """Write a model that calls others."""
    write(root, name, kind.format(body=body), python_models.VECTORS + more)


ones = np.ones(2, np.float32)


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_200_calls_at_a_time_go_through_few_threads(
    start: Any, root: Path, kind: str
) -> None:
    write_function(root, "inner", "return {'y': x + 1}")
    if kind == "sync":
        call(root, "outer", "return self.context.infer_and_wait('inner', {'x': x})")
    else:
        call(root, "outer", "return await self.context.infer('inner', {'x': x})", ASYNC)
    async with start(execute_threads=1, spare_execute_threads=0) as client:
        asked = [client.infer("outer", x=np.array([n], np.float32)) for n in range(200)]
        answers = await asyncio.gather(*asked)

    assert [n + 1 for n in range(200)] == [int(answer["y"][0]) for answer in answers]


async def test_the_error_of_another_model_is_that_of_the_request(start: Any, root: Path) -> None:
    write_function(root, "inner", "raise InferenceError('too long')")
    call(root, "outer", "return self.context.infer_and_wait('inner', {'x': x})")
    call(root, "lost", "return self.context.infer_and_wait('none_such', {'x': x})")
    call(root, "wrong", "return self.context.infer_and_wait('inner', {'z': x})")
    async with start() as client:
        found = [await client.fails(name, x=ones) for name in ("outer", "lost", "wrong")]

    assert "INVALID_ARGUMENT: model 'inner': too long" in found[0]
    # Not NOT_FOUND: a mesh would then reload the model that answers.
    assert "FAILED_PRECONDITION: model 'lost'" in found[1]
    assert "unknown model: 'none_such'" in found[1]
    assert "model 'inner': unexpected inference input 'z', it has 'x'" in found[2]


async def test_a_model_that_waits_for_itself_is_told(start: Any, root: Path) -> None:
    recursion = "return {'y': x} if x[0] < 1 else self.context.infer_and_wait('%s', {'x': x - 1})"
    call(root, "alone", recursion % "alone")
    call(root, "three", recursion % "three", more="instance_group { count: 3 kind: KIND_CPU }")
    async with start() as client:
        stuck = await client.fails("alone", x=ones)
        works = await client.infer("three", x=ones * 2)
        too_deep = await client.fails("three", x=ones * 3)
        again = await client.infer("alone", x=ones * 0)

    assert "model 'alone': deadlock: all its instances wait for nested calls" in stuck
    assert "(alone -> alone)" in stuck
    assert [0, 0] == works["y"].tolist()
    assert "(three -> three -> three -> three)" in too_deep
    assert [0, 0] == again["y"].tolist()


async def test_models_that_wait_for_each_other_are_told(
    start: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither request calls a model twice: only the two together form a deadlock."""
    wait = "import builtins; builtins._both.wait(60) if x[0] > 1 else None"
    for name, other in (("a", "b"), ("b", "a")):
        go_on = f"self.context.infer_and_wait('{other}', {{'x': x - 1}})"
        call(root, name, f"{wait}\n        return {go_on} if x[0] > 1 else {{'y': x}}")
    monkeypatch.setattr(builtins, "_both", threading.Barrier(2), raising=False)
    async with start() as client:
        asked = [client.infer(name, x=ones * 2) for name in ("a", "b")]
        found = await asyncio.gather(*asked, return_exceptions=True)

    failed = [one for one in found if isinstance(one, Exception)]
    assert 1 <= len(failed)
    assert all("deadlock" in str(one) for one in failed)
    assert all(one["y"].tolist() == [1, 1] for one in found if isinstance(one, dict))


@pytest.mark.slow
async def test_a_call_ends_with_the_request_that_it_is_part_of(
    start: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(
        root,
        "slow",
        """
        import asyncio, builtins

        class Model(PythonModel):
            async def infer(self, inputs):
                builtins._began.set()
                await asyncio.sleep(1000)
        """,
        python_models.VECTORS,
    )
    call(root, "outer", "return self.context.infer_and_wait('slow', {'x': x})")
    began = threading.Event()
    monkeypatch.setattr(builtins, "_began", began, raising=False)
    async with start() as client:
        asked = asyncio.ensure_future(client.infer("outer", x=ones))
        assert await asyncio.to_thread(began.wait, 60)
        asked.cancel()
        registry = client.server.application.registry
        async with asyncio.timeout(60):
            while registry.requests:
                await asyncio.sleep(0.01)


async def test_many_answers_of_another_model_are_read_as_they_come(start: Any, root: Path) -> None:
    write(
        root,
        "count",
        """
        class Model(PythonModel):
            def infer(self, inputs):
                for number in range(int(inputs["x"][0])):
                    yield {"y": np.array([number], np.float32)}
        """,
        python_models.VECTORS,
    )
    call(
        root,
        "sum",
        "found = [one['y'][0] for one in self.context.stream('count', {'x': x})]\n"
        "        return {'y': np.array([sum(found), len(found)], np.float32)}",
    )
    async with start() as client:
        answer = await client.infer("sum", x=np.array([100], np.float32))

    assert [4950, 100] == answer["y"].tolist()


async def test_metrics_of_a_model_come_and_go_with_it(start: Any, root: Path) -> None:
    write(
        root,
        "m",
        """
        class Model(PythonModel):
            def load(self, context):
                self.texts = context.counter("texts_total", "Texts", kind="short")
                self.longest = context.gauge("longest_text")

            def infer(self, inputs):
                self.texts.increment(2)
                self.longest.set(7.5)
                return {"y": inputs["x"]}
        """,
        python_models.VECTORS,
    )
    async with start(http_endpoint="port:0") as client:
        await client.infer("m", x=ones)
        shown = await client.metrics()
        await client.grpc.unload_model("m")
        gone = await client.metrics()

    assert "# HELP texts_total Texts\n# TYPE texts_total counter\n" in shown
    assert 'texts_total{kind="short",model="m",version="1"} 2\n' in shown
    assert 'longest_text{model="m",version="1"} 7.5\n' in shown
    assert "texts_total" not in gone


async def test_a_warm_up_may_call_other_models(start: Any, root: Path) -> None:
    sample = """model_warmup { name: "sample" batch_size: 1 inputs { key: "x" value {
        data_type: TYPE_FP32 dims: [ 2 ] zero_data: true } } }"""
    write_function(root, "inner", "return {'y': x + 1}")
    call(root, "outer", "return self.context.infer_and_wait('inner', {'x': x})", more=sample)
    async with start(load="inner") as client:
        await client.grpc.load_model("outer")
        answer = await client.infer("outer", x=ones)

    assert [2, 2] == answer["y"].tolist()


ROWS = """
max_batch_size: 2
input [{ name: "x", data_type: TYPE_FP32, dims: [ 1 ] }]
output [{ name: "y", data_type: TYPE_FP32, dims: [ 1 ] }]
dynamic_batching { max_queue_delay_microseconds: 30000000 }
"""
HOLDS = """
import asyncio, builtins

class Model(PythonModel):
    async def infer(self, inputs):
        builtins._began.append(len(inputs["x"]))
        while not builtins._goes_on.is_set():
            await asyncio.sleep(0.01)
        return {"y": inputs["x"] + 1}
"""


@pytest.mark.parametrize("leaves", [0, 1])
async def test_a_call_for_a_batch_goes_on_while_a_request_of_it_does(
    start: Any, root: Path, monkeypatch: pytest.MonkeyPatch, leaves: int
) -> None:
    """If any request of the batch leaves, the others get their answers from the same call."""
    write(root, "holds", HOLDS, ROWS.partition("dynamic")[0])
    write(
        root,
        "outer",
        SYNC.format(body="return self.context.infer_and_wait('holds', {'x': x})"),
        ROWS,
    )
    began, goes_on = list[int](), threading.Event()
    monkeypatch.setattr(builtins, "_began", began, raising=False)
    monkeypatch.setattr(builtins, "_goes_on", goes_on, raising=False)
    async with start() as client, asyncio.timeout(60):
        row = np.ones((1, 1), np.float32)
        asked = []
        registry = client.server.application.registry
        for number in range(2):
            asked.append(asyncio.ensure_future(client.infer("outer", x=row * number)))
            while registry.requests <= number:
                await asyncio.sleep(0.01)
        while not began:
            await asyncio.sleep(0.01)
        asked[leaves].cancel()
        while registry.requests > 2:  # wait for the remaining request, and the call
            await asyncio.sleep(0.01)
        goes_on.set()
        answer = await asked[1 - leaves]

    assert [2] == began
    assert [[2.0 - leaves]] == answer["y"].tolist()


@pytest.mark.parametrize(
    ("deadlines", "expected"),
    [([7.0], 7.0), ([None], None), ([5.0, 9.0], 9.0), ([5.0, None], None)],
)
def test_a_call_for_a_batch_may_take_as_long_as_the_last_of_its_requests(
    deadlines: list[float | None], expected: float | None
) -> None:
    calls = [InferCall() for _ in deadlines]
    for one, deadline in zip(calls, deadlines, strict=True):
        one.deadline = deadline
    accompany(calls, is_shared=len(calls) > 1)
    nested = [Nested(one, NestedRequest("m", {})) for one in calls]

    assert [expected] * len(calls) == [one.deadline for one in nested]
