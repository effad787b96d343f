"""Measures the engine without a transport, each figure as a ratio within one run.

    python tools/bench_engine.py [NAME ...]

Machines are shared and noisy, so every number is the best of several repetitions.
"""

import asyncio
import itertools
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import uvloop

import xlaserve
from xlaserve.app.server import Application
from xlaserve.errors import XlaserveError
from xlaserve.serving.engine import Engine
from xlaserve.serving.infer_call import AwaitedInfer, InferCall
from xlaserve.serving.inference import InferInput, InferRequest, InferResponse
from xlaserve.settings import Settings
from xlaserve.settings.choices import ModelControlMode
from xlaserve.tensors import DATATYPES, Tensor, from_bytes, to_bytes

REPETITIONS = 7
ROWS = 64
LARGE_WIDTH = 64_000
"""Width of a model of 200 MB."""
CYCLES = 20
MANY = 500
MEGABYTE = 1 << 20
FP32 = DATATYPES["FP32"]


def tiny(params: Any, inputs: Any) -> Any:
    """Compute four sums."""
    return {"y": inputs["x"] + params["b"]}


def mlp(params: Any, inputs: Any) -> Any:
    """Compute ten scores from 784 pixels."""
    hidden = jnp.maximum(inputs["x"] @ params["w1"] + params["b1"][None], 0)
    return {"y": hidden @ params["w2"] + params["b2"][None]}


def write_models(root: Path) -> None:
    """Write the models of the measurements."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> Tensor:
        return random.standard_normal(shape).astype(np.float32) / 28

    xlaserve.export_model(
        lambda p, x: tiny(p, {"x": x}),
        {"b": np.ones((1, 4), np.float32)},
        {"x": ("FP32", [-1, 4])},
        root / "tiny/1",
        max_batch_size=1,
    )
    for name, hidden in (("mlp", 512), ("large", LARGE_WIDTH)):
        weights = {"w1": normal(784, hidden), "w2": normal(hidden, 10)}
        biases = {"b1": normal(hidden), "b2": normal(10)}
        xlaserve.export_model(
            lambda p, x: mlp(p, {"x": x}),
            weights | biases,
            {"x": ("FP32", [-1, 784])},
            root / name / "1",
            max_batch_size=ROWS,
        )


@asynccontextmanager
async def running(root: Path, *models: str, **settings: Any) -> AsyncIterator[Application]:
    """Run a server without clients, with the given models loaded."""
    defaults: dict[str, Any] = {
        "repository": root,
        "grpc_endpoint": "port:0",
        "http_endpoint": "none",
        "device": "cpu",
        "model_control_mode": ModelControlMode.EXPLICIT,
        "load_model": models,
    }
    application = Application(Settings.read({}, **defaults | settings))
    async with application.running():
        await application.load()
        yield application


class Written(InferCall):
    """An inference whose answer is encoded to bytes."""

    def write(self, response: InferResponse, *, last: bool) -> None:
        """Encode the first output."""
        to_bytes(FP32, response.outputs[0].data)


def request(model: str, data: Tensor) -> InferRequest:
    """Return a request for a model with one input."""
    return InferRequest(model, inputs=(InferInput("x", FP32, data),))


def best(seconds: list[float]) -> float:
    """Return the smallest time, which was disturbed least."""
    return min(seconds)


def by_hand(application: Application, model: str) -> Callable[..., Mapping[str, Any]]:
    """Return a function that executes a model directly, without the engine."""
    _, instance = application.registry.resolve(model)
    execute: Callable[..., Mapping[str, Any]] = instance.runner.execute  # type: ignore[attr-defined]
    return execute


async def measure_overhead(root: Path) -> None:
    """Measure a tiny model through the engine, and by calling its executable."""
    count = 50
    # Execute on the event loop, which is the path to measure, even if the warm-up was disturbed.
    async with running(root, "tiny", inline_execution_seconds=0.1) as application:
        engine, wire = application.engine, np.ones((1, 4), np.float32).tobytes()
        _, instance = application.registry.resolve("tiny")
        copy: Any = instance.runner._copies[0]  # type: ignore[attr-defined]
        program, leaves = copy.table.program_for(1), copy.leaves

        def directly() -> None:
            for _ in range(count):
                x = np.frombuffer(wire, np.float32).reshape(1, 4)
                (y,) = program.call(leaves, [x])
                to_bytes(FP32, np.asarray(y))

        async def through_engine() -> None:
            for _ in range(count):
                x = from_bytes(FP32, (1, 4), wire)
                call = Written()
                engine.begin(call, request("tiny", x))
                assert call.has_ended

        hand, engined = [], []
        # Many short repetitions, so that some are undisturbed.
        for _ in range(REPETITIONS * 200):
            hand.append(_timed(directly))
            engined.append(await _awaited(through_engine))
        by, through = best(hand) / count * 1e6, best(engined) / count * 1e6
        print(
            f"tiny model, bytes to bytes: by hand {by:.1f} us, through the engine {through:.1f} us"
        )
        print(f"  ratio {through / by:.2f} (to reach: at most 1.5)")


async def measure_batching(root: Path) -> None:
    """Measure 64 one-row requests at once: against one batch by hand, and without batching."""
    rates: dict[str, float] = {}
    rows = np.random.default_rng(0).random((ROWS, 784), np.float32)
    for batching in (True, False):
        async with running(root, "mlp", dynamic_batching=batching) as application:
            execute = partial(by_hand(application, "mlp"), {"x": rows})
            hand, engined = [], []
            for _ in range(REPETITIONS * 20):
                hand.append(_timed(execute))
                engined.append(await _at_once(application.engine, rows))
            rates["hand"] = max(rates.get("hand", 0), ROWS / best(hand))
            rates["on" if batching else "off"] = ROWS / best(engined)
            ((_, totals),) = [
                (r.name, r.totals)
                for r in application.control.catalog.statistics()
                if r.name == "mlp"
            ]
            print(f"  batches of {'on' if batching else 'off'}: ", end="")
            print({b.batch_size: b.compute_infer.count for b in totals.batches})
    print("MLP 784-512-10, 64 one-row requests at once, rows per second:")
    print(", ".join(f"{name} {rate:,.0f}" for name, rate in rates.items()))
    print(f"  on / hand {rates['on'] / rates['hand']:.2f} (to reach: at least 0.8)")
    print(f"  on / off {rates['on'] / rates['off']:.2f} (to reach: at least 3)")


async def measure_unloads(root: Path) -> None:
    """Load and unload a 200 MB model while another one answers requests."""
    async with running(root, "mlp") as application:
        arrays = _live_arrays()
        resident: list[int] = []
        failed, answered = 0, 0
        row = np.zeros((1, 784), np.float32)
        for _ in range(CYCLES):
            loading = asyncio.ensure_future(application.control.load("large"))
            while not loading.done():
                try:
                    await application.engine.infer(request("mlp", row))
                    answered += 1
                except XlaserveError:
                    failed += 1
                await asyncio.sleep(0.001)
            await loading
            await application.engine.infer(request("large", row))
            await application.control.unload("large")
            resident.append(_resident_bytes())
        growth = resident[-1] / resident[1] - 1
        print(f"{CYCLES} loads and unloads of 200 MB beside {answered} requests, {failed} failed:")
        print("  resident MB", [round(size / MEGABYTE) for size in resident])
        print(f"  last against second {growth:+.1%} (to reach: within 3 %)")
        print(f"  live arrays {arrays} before, {_live_arrays()} after")


async def measure_books(root: Path) -> None:
    """Compare the reservation of a 200 MB model with the growth of the process."""
    async with running(root, "mlp") as application:
        row = np.zeros((1, 784), np.float32)
        # The first load of a process also allocates what later ones share.
        await application.control.load("large")
        await application.control.unload("large")
        before, booked = _resident_bytes(), application.capacity.used_bytes
        await application.control.load("large")
        await application.engine.infer(request("large", row))
        grown = _resident_bytes() - before
        reported = application.capacity.used_bytes - booked
        print(f"books: {reported / MEGABYTE:.1f} MB reported, grown by {grown / MEGABYTE:.1f} MB")
        print(f"  reported / grown {reported / grown:.2f} (to reach: 0.9 to 1.1)")


async def measure_loading(root: Path) -> None:
    """Measure the latency of one model while another one loads and compiles."""
    async with running(root, "mlp") as application:
        quiet: list[float] = []
        busy: list[float] = []
        for _ in range(3):
            pause = asyncio.ensure_future(asyncio.sleep(2))
            quiet += await _ask_until(application.engine, pause)
            loading = asyncio.ensure_future(application.control.load("large"))
            busy += await _ask_until(application.engine, loading)
            await application.control.unload("large")
        first, second = (float(np.percentile(times, 99)) * 1e3 for times in (quiet, busy))
        print(f"p99 of a model: quiet {first:.2f} ms, while another loads {second:.2f} ms")
        print(f"  ratio {second / first:.1f} (to reach: at most 3)")


async def _ask_until(engine: Engine, done: "asyncio.Future[None]") -> list[float]:
    row, times = np.zeros((1, 784), np.float32), []
    while not done.done():
        started = time.perf_counter()
        await engine.infer(request("mlp", row))
        times.append(time.perf_counter() - started)
        await asyncio.sleep(0.001)
    await done
    return times


async def measure_many(root: Path) -> None:
    """Measure 500 small models in one process."""
    repository = root / "many"
    for number in range(MANY):
        shutil.copytree(root / "tiny/1", repository / f"m{number}/1", dirs_exist_ok=True)
    row = np.zeros((1, 4), np.float32)
    async with running(repository) as application:
        marks = []
        for number in range(MANY):
            if number % 100 == 0:
                marks.append((number, time.perf_counter(), _resident_bytes()))
            await application.control.load(f"m{number}")
        marks.append((MANY, time.perf_counter(), _resident_bytes()))
        for number in range(MANY):
            await application.engine.infer(request(f"m{number}", row))
        print(f"{MANY} small models loaded, all answer; by hundreds:")
        for (_, began, small), (count, ended, large) in itertools.pairwise(marks):
            each, size = (ended - began) / 100 * 1e3, (large - small) / 100 / MEGABYTE
            print(f"  up to {count}: {each:.0f} ms and {size:.2f} MB for each model")


def _live_arrays() -> int:
    return len(jax.live_arrays())  # type: ignore[no-untyped-call]


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


async def _at_once(engine: Engine, rows: Tensor) -> float:
    """Request every row separately, all in one iteration of the event loop."""
    requests = [request("mlp", rows[index : index + 1]) for index in range(len(rows))]
    calls = [AwaitedInfer() for _ in requests]
    started = time.perf_counter()
    for call, one in zip(calls, requests, strict=True):
        engine.begin(call, one)
    await asyncio.gather(*(call.answered() for call in calls))
    return time.perf_counter() - started


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


async def _awaited(call: Callable[[], Awaitable[object]]) -> float:
    started = time.perf_counter()
    await call()
    return time.perf_counter() - started


MEASUREMENTS: Mapping[str, Callable[[Path], Awaitable[None]]] = MappingProxyType(
    {
        "overhead": measure_overhead,
        "batching": measure_batching,
        "unloads": measure_unloads,
        "books": measure_books,
        "loading": measure_loading,
        "many": measure_many,
    }
)


def main() -> None:
    """Run the measurements named on the command line, or all of them."""
    names = sys.argv[1:] or list(MEASUREMENTS)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_models(root)
        for name in names:
            uvloop.run(MEASUREMENTS[name](root))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
