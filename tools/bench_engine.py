"""Measures the engine without a transport, each figure as a ratio within one run.

    python tools/bench_engine.py [NAME ...]

Machines are shared and noisy: every number is the best of several repetitions.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np
import uvloop

import xlaserve
from xlaserve.app import Application
from xlaserve.core.engine import Engine
from xlaserve.core.inference import InferInput, InferRequest
from xlaserve.settings import ModelControlMode, Settings
from xlaserve.tensors import DATATYPES, Tensor, from_bytes, to_bytes

REPETITIONS = 7
ROWS = 64
FP32 = DATATYPES["FP32"]


def tiny(params: Any, inputs: Any) -> Any:
    """Return four sums."""
    return {"y": inputs["x"] + params["b"]}


def mlp(params: Any, inputs: Any) -> Any:
    """Return ten scores of 784 pixels."""
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
    parameters = {
        "w1": normal(784, 512),
        "b1": normal(512),
        "w2": normal(512, 10),
        "b2": normal(10),
    }
    xlaserve.export_model(
        lambda p, x: mlp(p, {"x": x}),
        parameters,
        {"x": ("FP32", [-1, 784])},
        root / "mlp/1",
        max_batch_size=ROWS,
    )


@asynccontextmanager
async def running(root: Path, **settings: Any) -> AsyncIterator[Application]:
    """Run a server without clients."""
    defaults: dict[str, Any] = {
        "repository": root,
        "grpc_endpoint": "port:0",
        "http_endpoint": "none",
        "device": "cpu",
        "model_control_mode": ModelControlMode.NONE,
    }
    application = Application(Settings.read({}, **defaults | settings))
    async with application.running():
        await application.load()
        yield application


def request(model: str, data: Tensor) -> InferRequest:
    """Ask a model of one input."""
    return InferRequest(model, inputs=(InferInput("x", FP32, data),))


def best(seconds: list[float]) -> float:
    """Return the time that noise disturbed least."""
    return min(seconds)


def by_hand(application: Application, model: str) -> Callable[..., Mapping[str, Any]]:
    """Return what executes a model with nothing around it."""
    _, instance = application.registry.resolve(model)
    execute: Callable[..., Mapping[str, Any]] = instance.runner.execute  # type: ignore[union-attr]
    return execute


async def measure_overhead(root: Path) -> None:
    """Bytes to bytes of a tiny model: through the engine, and by calling the executable."""
    count = 3000
    async with running(root) as application:
        engine, wire = application.engine, np.ones((1, 4), np.float32).tobytes()
        _, instance = application.registry.resolve("tiny")
        program: Any = instance.runner._programs[1]  # type: ignore[union-attr]
        leaves: Any = instance.runner._leaves  # type: ignore[union-attr]

        def directly() -> None:
            for _ in range(count):
                x = np.frombuffer(wire, np.float32).reshape(1, 4)
                (y,) = program.call(leaves, [x])
                np.asarray(y).view(np.uint8).data

        async def through_engine() -> None:
            for _ in range(count):
                x = from_bytes(FP32, (1, 4), wire)
                response = await engine.infer(request("tiny", x))
                to_bytes(FP32, response.outputs[0].data)

        hand, engined = [], []
        for _ in range(REPETITIONS):
            hand.append(_timed(directly))
            engined.append(await _awaited(through_engine))
        by, through = best(hand) / count * 1e6, best(engined) / count * 1e6
        print(
            f"tiny model, bytes to bytes: by hand {by:.1f} us, through the engine {through:.1f} us"
        )
        print(f"  ratio {through / by:.2f} (to reach: at most 1.5)")


async def measure_batching(root: Path) -> None:
    """64 one-row requests at once: against one batch by hand, and with batching off."""
    rates: dict[str, float] = {}
    for batching in (True, False):
        async with running(root, dynamic_batching=batching) as application:
            rows = np.random.default_rng(0).random((ROWS, 784), np.float32)
            execute = by_hand(application, "mlp")
            hand, engined = [], []
            for _ in range(REPETITIONS * 3):
                hand.append(_timed(lambda: execute({"x": rows})))
                engined.append(await _at_once(application.engine, rows))
            rates["hand"] = max(rates.get("hand", 0), ROWS / best(hand))
            rates["on" if batching else "off"] = ROWS / best(engined)
            ((_, totals),) = [
                (r.name, r.totals) for r in application.engine.statistics() if r.name == "mlp"
            ]
            print(f"  batches of {'on' if batching else 'off'}: ", end="")
            print({b.batch_size: b.compute_infer.count for b in totals.batches})
    print("MLP 784-512-10, 64 one-row requests at once, rows per second:")
    print(", ".join(f"{name} {rate:,.0f}" for name, rate in rates.items()))
    print(f"  on / hand {rates['on'] / rates['hand']:.2f} (to reach: at least 0.8)")
    print(f"  on / off {rates['on'] / rates['off']:.2f} (to reach: at least 3)")


async def _at_once(engine: Engine, rows: Tensor) -> float:
    requests = [request("mlp", rows[index : index + 1]) for index in range(len(rows))]
    started = time.perf_counter()
    await asyncio.gather(*map(engine.infer, requests))
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
    {"overhead": measure_overhead, "batching": measure_batching}
)


def main() -> None:
    """Run the measurements that the command line names, or all of them."""
    names = sys.argv[1:] or list(MEASUREMENTS)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_models(root)
        for name in names:
            uvloop.run(MEASUREMENTS[name](root))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
