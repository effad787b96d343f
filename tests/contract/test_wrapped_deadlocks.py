"""A model that waits for itself gets an error, whatever wraps its instances."""

import asyncio
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.asking import Client
from support.python_models import VECTORS, Start, starting, write
from support.server import Serve

CACHED = "response_cache { enable: true }\n"
ORDERED = "dynamic_batching { preserve_ordering: true }\n"
AROUND = {"none": "", "cached": CACHED, "ordered": ORDERED, "both": CACHED + ORDERED}
CODE = """
class Model(PythonModel):
    def load(self, context):
        self.context = context
    def infer(self, inputs):
        x = inputs["x"]
        if x[0] <= 0:
            return {{"y": x}}
        found = self.context.infer_and_wait("{calls}", {{"x": x - {less}}})
        return {{"y": found["y"] + 1}}
"""


def model(
    root: Path, name: str, calls: str, around: str, *, less: int = 1, copies: int = 1
) -> None:
    group = f"instance_group [{{ count: {copies} }}]\n"
    write(root, name, CODE.format(calls=calls, less=less), VECTORS + AROUND[around] + group)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "models"
    for around in AROUND:
        model(root, f"self_{around}", f"self_{around}", around)
        model(root, f"two_{around}", f"two_{around}", around, copies=2)
        model(root, f"equal_{around}", f"equal_{around}", around, less=0, copies=2)
    for one, other in itertools.product(AROUND, repeat=2):
        model(root, f"ping_{one}_{other}", f"pong_{one}_{other}", one)
        model(root, f"pong_{one}_{other}", f"ping_{one}_{other}", other)
    return root


@pytest.fixture
def start(serve: Serve, root: Path) -> Start:
    return starting(serve, root)


def x(value: float | list[float]) -> Any:
    return np.array([value], np.float32)


async def told(client: Client, name: str, value: float) -> str:
    """Return the outcome of a request in one word."""
    async with asyncio.timeout(60):
        said = await client.fails(name, x=x(value))
    return "deadlock" if "deadlock" in said else said


async def answered(client: Client, name: str, value: float) -> list[float]:
    async with asyncio.timeout(60):
        found: list[float] = (await client.infer(name, x=x(value)))["y"].tolist()
    return found


async def test_a_wait_for_itself_is_refused_and_the_model_goes_on(start: Start) -> None:
    """Unless answers are ordered, it may call itself as often as it has instances."""
    names = [f"{kind}_{around}" for kind in ("self", "equal") for around in AROUND]
    names += [f"ping_{one}_{other}" for one in AROUND for other in AROUND]
    async with start() as client:
        found = await asyncio.gather(*(told(client, name, 9) for name in names))
        after = {name: await answered(client, name, 0) for name in names}
        two = {around: await told(client, f"two_{around}", 2) for around in AROUND}
        fits = {one: await answered(client, f"two_{one}", 1) for one in ("none", "cached")}
        ordered = {one: await told(client, f"two_{one}", 1) for one in ("ordered", "both")}

    assert dict.fromkeys(names, "deadlock") == dict(zip(names, found, strict=True))
    assert {name: [0.0] for name in names} == after
    assert dict.fromkeys(AROUND, "deadlock") == two
    assert {"none": [1.0], "cached": [1.0]} == fits
    assert dict.fromkeys(("ordered", "both"), "deadlock") == ordered


@pytest.mark.parametrize("around", AROUND)
async def test_who_waits_with_one_that_is_refused_is_answered(start: Start, around: str) -> None:
    """Its own nested call is no part of the cycle: it waits for a call that is ended."""
    name = f"self_{around}"
    async with start(name) as client:
        refused, *others = await asyncio.gather(
            told(client, name, 3), *(answered(client, name, 0) for _ in range(4))
        )

    assert "deadlock" == refused
    assert [[0.0]] * 4 == others


@pytest.mark.parametrize("around", ["none", "cached"])
async def test_a_wait_of_a_batch_for_itself_is_refused(
    serve: Serve, tmp_path: Path, around: str
) -> None:
    """The nested call belongs to the first request only, but the whole batch waits for it."""
    code = CODE.format(calls="batched", less=1).replace("x[0] <= 0", "(x <= 0).all()")
    rows = VECTORS.replace("-1", "1")
    batches = "max_batch_size: 2\ndynamic_batching { max_queue_delay_microseconds: 2000000 }\n"
    write(tmp_path / "models", "batched", code, rows + batches + AROUND[around])
    async with starting(serve, tmp_path / "models")() as client:
        async with asyncio.timeout(60):
            said = await asyncio.gather(*(client.fails("batched", x=x([n])) for n in (5, 7)))
        after = await asyncio.gather(*(client.infer("batched", x=x([n])) for n in (0, -1)))

    assert all("deadlock" in one for one in said)
    assert [[[0.0]], [[-1.0]]] == [one["y"].tolist() for one in after]
