"""Measure the latency of one model while others load and compile.

    python tools/load_latency.py [--rounds 5] [--seconds 6] [--rate 200]

Two servers with the same models and without a compilation cache: one compiles in its own process
(`compile_processes` 0), the other in a child (1). In each round each server receives requests for a
small model at a fixed rate: first idle; then while a third server, which gets no requests, loads
encoders one after the other, each with six batch sizes; then while it loads these itself. Latency
added by the third server is due to the machine and unavoidable. The server that goes first
alternates. Requests are sent when they are due, whether or not earlier ones were answered, and
latency is measured from then.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import jax
import numpy as np

from xlaserve.authoring.export import export_model

LAYERS, WIDTH, TOKENS = 4, 128, 16
ENCODERS = 4
_START_SECONDS = 120
_ASKED = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}


def _encoder(params: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    for query, out in zip(params[::2], params[1::2], strict=True):
        y = x @ query
        weights = jax.nn.softmax(y @ y.swapaxes(1, 2), axis=-1)
        x = x + jax.nn.gelu(weights @ y) @ out
    return x


def export_models(root: Path) -> list[str]:
    """Write the requested model, and encoders of several widths; return their names."""
    export_model(
        lambda p, x: {"y": x * p},
        np.float32(2),
        {"x": ("FP32", [-1, 4])},
        root / "asked" / "1",
        max_batch_size=4,
    )
    random, names = np.random.default_rng(0), []
    for number in range(ENCODERS):
        width = WIDTH + 8 * number
        params = [random.standard_normal((width, width), np.float32) for _ in range(2 * LAYERS)]
        names.append(f"encoder{number}")
        export_model(
            _encoder,
            params,
            {"x": ("FP32", [-1, TOKENS, width])},
            root / names[-1] / "1",
            outputs=["y"],
            max_batch_size=32,
        )
    return names


@dataclass(slots=True)
class Server:
    """A running server, and its measurements."""

    processes: int
    url: str
    idle: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    """Latencies while the third server loads."""
    loading: list[float] = field(default_factory=list)
    beside_ratios: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    """Each round's p99 while loading, relative to the idle one."""
    loads: int = 0


@asynccontextmanager
async def _serving(root: Path, processes: int) -> AsyncIterator[Server]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "xlaserve.cli", "serve", str(root), "--device", "cpu"),
        *("--grpc-endpoint", "port:0", "--http-endpoint", "port:0", "--load-model", "asked"),
        *("--model-control-mode", "explicit", "--compilation-cache-directory", "none"),
        *("--compile-processes", str(processes), "--no-background-compile"),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stderr is not None
        url = ""
        async with asyncio.timeout(_START_SECONDS):
            async for line in process.stderr:
                record = json.loads(line)
                url = record["http"] if record["event"] == "listening" else url
                if record["event"] == "started":
                    break
        reading = asyncio.ensure_future(process.stderr.read())
        yield Server(processes, f"http://{url}")
    finally:
        process.terminate()
        await process.wait()
    await reading


async def _ask(session: aiohttp.ClientSession, server: Server, due: float) -> float:
    async with session.post(f"{server.url}/v2/models/asked/infer", json=_ASKED) as answer:
        await answer.read()
        answer.raise_for_status()
    return time.perf_counter() - due


@dataclass(frozen=True, slots=True)
class _How:
    seconds: float
    rate: int


async def _measured(session: aiohttp.ClientSession, server: Server, how: _How) -> list[float]:
    """Return the latencies of requests at a fixed rate, in milliseconds."""
    start, asked = time.perf_counter(), []
    for number in range(int(how.seconds * how.rate)):
        due = start + number / how.rate
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        asked.append(asyncio.ensure_future(_ask(session, server, due)))
    return [1000 * one for one in await asyncio.gather(*asked)]


async def _load(session: aiohttp.ClientSession, server: Server, models: Sequence[str]) -> None:
    """Load and unload models until cancelled."""
    while True:
        for model in models:
            for verb in ("load", "unload"):
                url = f"{server.url}/v2/repository/models/{model}/{verb}"
                async with session.post(url) as answer:
                    answer.raise_for_status()
            server.loads += 1


def _p99(found: Sequence[float]) -> float:
    return statistics.quantiles(found, n=100)[98]


async def _measured_while(
    session: aiohttp.ClientSession, server: Server, loads: Coroutine[None, None, None], how: _How
) -> list[float]:
    loading = asyncio.ensure_future(loads)
    found = await _measured(session, server, how)
    loading.cancel()
    await asyncio.gather(loading, return_exceptions=True)
    return found


async def _round(
    session: aiohttp.ClientSession, server: Server, third: Server, models: Sequence[str], how: _How
) -> None:
    idle = await _measured(session, server, how)
    beside = await _measured_while(session, server, _load(session, third, models), how)
    busy = await _measured_while(session, server, _load(session, server, models), how)
    server.idle += idle
    server.beside += beside
    server.loading += busy
    server.beside_ratios.append(_p99(beside) / _p99(idle))
    server.ratios.append(_p99(busy) / _p99(idle))


def _rows(servers: Sequence[Server]) -> Iterator[str]:
    for one in servers:
        yield f"compile_processes {one.processes}, {one.loads} loads"
        yield f"  idle:                    {_line(one.idle)}"
        yield f"  another server loads:    {_line(one.beside)}{_of_idle(one.beside_ratios)}"
        yield f"  loading:                 {_line(one.loading)}{_of_idle(one.ratios)}"


def _line(found: Sequence[float]) -> str:
    return f"p50 {statistics.median(found):6.2f} ms, p99 {_p99(found):6.2f}"


def _of_idle(ratios: Sequence[float]) -> str:
    return (
        f", of the idle p99 {statistics.median(ratios):5.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f} in the rounds)"
    )


async def _main(rounds: int, how: _How) -> None:
    async with AsyncExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        models = export_models(root)
        *servers, third = [
            await stack.enter_async_context(_serving(root, count)) for count in (0, 1, 1)
        ]
        timeout = aiohttp.ClientTimeout(total=_START_SECONDS)
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        print(f"load of the machine before: {os.getloadavg()[0]:.1f}")
        for number in range(rounds):
            for server in servers if number % 2 else servers[::-1]:
                await _round(session, server, third, models, how)
        for row in _rows(servers):
            print(row)
        print(f"load of the machine behind: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--rate", type=int, default=200)
    given = parser.parse_args()
    asyncio.run(_main(given.rounds, _How(given.seconds, given.rate)))
