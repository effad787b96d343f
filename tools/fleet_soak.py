"""Soak two model runtimes with a thousand registered models, and print what the clients observed.

The models share four computations, each runtime has memory for some 50 of them, and requests choose
models by Zipf's law. Alternately, a runtime is killed and restarted, and the mesh loses its state,
like one that was restarted. The mesh is the fake of the tests, which reproduces the observed
behavior of the real one. Exits with 1 if a request got a wrong answer or none, a load or an unload
failed while its runtime was alive, or a runtime did not exit cleanly. For the slowest misses it
prints where the time went, and what the runtime logged meanwhile. Needs the `test` dependency
group.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from shared_models import COMPUTATIONS, tune

_TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path.append(str(_TESTS))

# ruff: noqa: E402
from support.mesh import Mesh, dial, message
from support.mesh_cache import MeshCache, Registered, Trace
from support.process import command

from xlaserve.artifact import manifest, weights
from xlaserve.authoring.export import export_model
from xlaserve.tensors import Tensor

_WIDTH = 512
_CAPACITY_BYTES = 20 << 20
_DEFAULT_BYTES = 512 << 10
_TRY_SECONDS = 30.0
"""How long a client retries: a mesh tries one runtime after the other."""
_CLIENTS = 8
_SHOWN_MISSES = 8
_TICK_SECONDS = 0.05
_STALL_SECONDS = 0.2
_FAULTS = ("failed loads", "failed unloads", "wrong answers", "exits that were not clean")
"""Counters that must stay at zero, besides lost requests."""


@dataclass
class Seen:
    """Latencies and counts observed by the clients."""

    hits: list[float] = field(default_factory=list)
    misses: list[float] = field(default_factory=list)
    """Seconds of requests that triggered a load while no component was down."""
    disturbed: list[float] = field(default_factory=list)
    """Seconds of requests that met an outage, or moved to the other runtime."""
    slowest: list[tuple[float, str, Trace | None]] = field(default_factory=list)
    """Seconds, runtime and trace of the slowest misses, slowest first."""
    stalls: list[tuple[float, float]] = field(default_factory=list)
    """Delays of this tool's own event loop: time since the epoch, and seconds."""
    counts: Counter[str] = field(default_factory=Counter)
    expected: dict[str, Tensor] = field(default_factory=dict)
    """The expected answer of each model."""

    def missed(self, seconds: float, runtime: str, trace: Trace | None) -> None:
        """Keep the trace if this miss is among the slowest."""
        self.misses.append(seconds)
        self.slowest.append((seconds, runtime, trace))
        self.slowest.sort(key=lambda one: -one[0])
        del self.slowest[_SHOWN_MISSES:]

    async def watch_loop(self) -> None:
        """Record delays of this process's event loop, until cancelled."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(_TICK_SECONDS)
            late = time.monotonic() - before - _TICK_SECONDS
            if late > _STALL_SECONDS:
                self.stalls.append((time.time(), late))

    def check(self, model: str, answer: Any) -> None:
        """Compare an answer with the expected one."""
        got = np.frombuffer(answer.raw_output_contents[0], np.float32)
        self.counts["wrong answers"] += not np.allclose(got, self.expected[model], 1e-4, 1e-4)


class Runtime:
    """A model runtime that is killed and restarted, and the mesh's cache on top of it."""

    def __init__(
        self, folder: Path, name: str, models: Mapping[str, Registered], seen: Seen
    ) -> None:
        self._folder, self._models, self._seen = folder, models, seen
        self.name = name
        self._log = folder / f"{name}.log"
        self._url = f"unix:{folder / name}.sock"
        self._channels = AsyncExitStack()
        """Channels stay open until the end, because closing one cancels its clients' requests."""
        self._process: asyncio.subprocess.Process
        self.cache: MeshCache | None = None
        """None while the runtime is down."""
        self.counts: Counter[str] = Counter()

    async def start(self) -> None:
        """Start the runtime, and request its capacity."""
        flags = [
            *("--grpc-endpoint", self._url, "--http-endpoint", "none", "--device", "cpu"),
            *("--modelmesh", "--capacity-bytes", str(_CAPACITY_BYTES)),
            *("--default-model-size-bytes", str(_DEFAULT_BYTES), "--load-threads", "2"),
            *("--compilation-cache-directory", str(self._folder / "cache")),
        ]
        arguments = command("serve", str(self._folder / "models"), *flags)
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(*arguments, stderr=log)
        await self.forget()

    async def forget(self) -> None:
        """Start again with an empty cache, like a restarted mesh."""
        await self._away()
        mesh = await self._channels.enter_async_context(dial(self._url))
        self.cache = MeshCache(mesh, await self._ready(mesh), self._models)
        self.cache.on_answer = self._seen.check

    async def kill(self) -> None:
        """Kill the runtime, and restart it."""
        self._process.kill()
        await self._process.wait()
        await self._away()
        await self.start()

    async def stop(self) -> int:
        """Terminate the runtime as Kubernetes ends a pod, and return its exit status."""
        await self._away()
        self._process.terminate()
        status = await self._process.wait()
        await self._channels.aclose()
        return status

    def said(self, model: str, began: float, ended: float) -> list[str]:
        """Return the log lines of a period that may explain why a load of `model` took long.

        The period is in seconds since the epoch. Loads and unloads of other models are left out.
        """
        found = []
        for line in self._log.read_text(errors="replace").splitlines():
            with suppress(ValueError, KeyError):
                entry = json.loads(line)
                at = datetime.fromisoformat(entry.pop("timestamp")).timestamp()
                if began <= at <= ended and entry.get("model", model) == model:
                    shown = ", ".join(f"{name} {value}" for name, value in entry.items())
                    found.append(f"{at - began:7.3f} {shown}")
        return found

    async def _ready(self, mesh: Mesh) -> Any:
        while self._process.returncode is None:
            with suppress(grpc.aio.AioRpcError):
                answer = await mesh.status()
                if answer.status == answer.READY:
                    return answer
            await asyncio.sleep(0.1)
        raise RuntimeError(f"it ended:\n{self._log.read_text()[-2000:]}")

    async def _away(self) -> None:
        """Detach the mesh's cache, wait for its pending calls, and keep its counts."""
        left, self.cache = self.cache, None
        if left is not None:
            await left.settle()
            self.counts += left.counts


def _request(x: Tensor) -> Any:
    request = message("inference.ModelInferRequest", model_name="any")
    tensor = request.inputs.add()
    tensor.name, tensor.datatype = "x", "FP32"
    tensor.shape.extend(x.shape)
    request.raw_input_contents.append(x.tobytes())
    return request


def _export(path: Path, kind: int) -> None:
    import jax.numpy as jnp

    params = {
        "w": np.zeros((64, _WIDTH), np.float32),
        "v": np.zeros((_WIDTH, 64 + kind), np.float32),
    }
    export_model(
        lambda p, x: jnp.tanh(x @ p["w"]) @ p["v"],
        params,
        {"x": ("FP32", [-1, 64])},
        path,
        outputs=["y"],
        max_batch_size=4,
    )


def _answer(path: Path) -> Tensor:
    """Compute a model's answer to a request of ones, from its files."""
    w, v = sorted((value for _, value in weights.read(path, manifest.WEIGHTS)), key=len)
    return np.asarray(np.tanh(w.sum(axis=0)) @ v)


async def _client(
    number: int, runtimes: list[Runtime], names: list[str], seen: Seen, until: float
) -> None:
    """Send requests until the run ends; switch to the other runtime if one does not answer."""
    chance = random.Random(number)
    wanted = list(itertools.accumulate(1 / rank for rank in range(1, len(names) + 1)))
    request = _request(np.ones((1, 64), np.float32))
    while time.monotonic() < until:
        model = chance.choices(names, cum_weights=wanted)[0]
        home = int(model.rpartition("-")[2]) // COMPUTATIONS % 2
        began, disturbed, was_held, status = time.monotonic(), False, False, "no runtime"
        runtime, cache = runtimes[home], None
        for attempt in itertools.count():
            runtime = runtimes[(home + attempt) % 2]
            cache = runtime.cache
            disturbed = disturbed or attempt > 0 or any(one.cache is None for one in runtimes)
            if cache is not None:
                was_held = cache.holds(model)
                status, _ = await cache.infer(model, request)
                if status == "OK":
                    break
                seen.counts[f"tried again: {status}"] += 1
            if time.monotonic() - began > _TRY_SECONDS:
                seen.counts[f"lost: {status}"] += 1
                break
            await asyncio.sleep(0.05)
        seconds = time.monotonic() - began
        if disturbed or was_held:
            (seen.disturbed if disturbed else seen.hits).append(seconds)
        else:
            seen.missed(seconds, runtime.name, cache.trace(model) if cache else None)


async def _disturb(runtimes: list[Runtime], seen: Seen, until: float, every: float) -> None:
    """Take down one component after the other."""
    for turn in itertools.count():
        await asyncio.sleep(every)
        if time.monotonic() > until - every:
            return
        if turn % 3 == 2:
            seen.counts["restarts of the mesh"] += 1
            for runtime in runtimes:
                await runtime.forget()
        else:
            seen.counts["kills of a runtime"] += 1
            await runtimes[turn % 3].kill()


def _shown(name: str, seconds: list[float]) -> str:
    if not seconds:
        return f"{name}: none"
    found = np.quantile(seconds, (0.5, 0.99, 1)) * 1e3
    return f"{name}: {len(seconds)}, p50 {found[0]:.1f} ms, p99 {found[1]:.0f}, most {found[2]:.0f}"


def _traced(seen: Seen, runtimes: list[Runtime]) -> Iterator[str]:
    """Yield the trace of the slowest misses, and what their runtimes logged meanwhile."""
    for seconds, name, trace in seen.slowest:
        if trace is None:
            yield f"a miss of {1e3 * seconds:.0f} ms at {name}, evicted again"
            continue
        parts = {**trace.stages, "the rest": seconds - sum(trace.stages.values())}
        shown = ", ".join(f"{part} {1e3 * took:.0f}" for part, took in parts.items())
        yield f"a miss of {1e3 * seconds:.0f} ms at {name}: {shown}"
        ended = trace.began + seconds
        late = sum(late for at, late in seen.stalls if trace.began < at <= ended + _TICK_SECONDS)
        if late:
            yield f"    this tool itself did not run for {1e3 * late:.0f} ms of it"
        runtime = next(one for one in runtimes if one.name == name)
        for line in runtime.said(trace.model, trace.began, ended):
            yield f"    {line}"


async def soak(folder: Path, count: int, seconds: float) -> bool:
    """Run the soak, print the observations, and return whether all checks passed."""
    root = folder / "models"
    for kind in range(COMPUTATIONS):
        _export(folder / "exported" / str(kind) / "1", kind)
    models, seen = {}, Seen()
    for number in range(count):
        name = f"model-{number}"
        tune(folder / "exported" / str(number % COMPUTATIONS) / "1", root / name / "1", number)
        models[name] = Registered(str(root / name), str(root / name))
        seen.expected[name] = _answer(root / name / "1")
    runtimes = [Runtime(folder, f"runtime-{n}", models, seen) for n in range(2)]
    for runtime in runtimes:
        await runtime.start()
    until = time.monotonic() + seconds
    clients = [_client(n, runtimes, list(models), seen, until) for n in range(_CLIENTS)]
    watching = asyncio.create_task(seen.watch_loop())
    await asyncio.gather(*clients, _disturb(runtimes, seen, until, seconds / 10))
    watching.cancel()
    for runtime in runtimes:
        seen.counts["exits that were not clean"] += await runtime.stop() != 0
    counts = runtimes[0].counts + runtimes[1].counts + seen.counts
    load = os.getloadavg()[0]
    print(f"{count} models, {seconds:.0f} s, {_CLIENTS} clients, load of the machine {load:.1f}")
    print(_shown("loaded already", seen.hits))
    print(_shown("loaded for the request", seen.misses))
    print(_shown("while a part was away", seen.disturbed))
    for name, value in sorted(counts.items()):
        print(f"{name}: {value}")
    for line in _traced(seen, runtimes):
        print(line)
    return not any(name in _FAULTS or name.startswith("lost") for name in counts)


def main() -> int:
    """Parse the arguments and soak; return 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=600)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        held = asyncio.run(soak(Path(folder), arguments.models, arguments.seconds))
    return int(not held)


if __name__ == "__main__":
    sys.exit(main())
