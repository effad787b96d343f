"""Loads the example models on a GPU and prints what it does there: answers, memory, batches, OOM,
and whether copies to the device overlap with what it computes.

python tools/gpu_check.py [--json] [REPOSITORY]

Where there is no GPU it says why, and that is no failure.
"""

# Much of jax is typed, but not all that is called here.
# mypy: disallow-untyped-calls=False

import argparse
import asyncio
import json
import math
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import numpy as np

import xlaserve
from xlaserve.core.serving.batching import Executed
from xlaserve.core.serving.dispatch import Dispatcher
from xlaserve.core.threads.device import DeviceThreads
from xlaserve.errors import DeviceUnavailable, OutOfMemory
from xlaserve.models import jax_runtime, loaders, sites
from xlaserve.models.config import ModelConfig
from xlaserve.models.loaded import IN_FLIGHT, Dispatching, InFlight, LoadContext, LoadedModel
from xlaserve.models.manifest import FILE_NAME
from xlaserve.tensors import Tensor, TensorSpec

EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "models"
MEASURED_SECONDS = 0.5
OVERLAP_ROUNDS = 3
"""Each depth by turns, so that what disturbs one disturbs the other; the best counts."""

WIDE = 1 << 24
"""Columns of an input that takes milliseconds to copy: 64 MiB of FP32."""

PASSES = 100
"""How often the device goes over it, which takes about as long."""


@dataclass(frozen=True, slots=True)
class Found:
    """What one model did."""

    model: str
    load_seconds: float
    compile_seconds: float
    booked_bytes: int
    grown_bytes: int
    """By how much `bytes_in_use` of the device grew with the load."""
    left_bytes: int
    """How much of it was still there after the unload."""
    worst_difference: float
    """To the same model on the CPU, over all batch sizes."""
    rows_per_second: Mapping[int, float]
    """By batch size; 0 for a model without a batch dimension."""
    batch_limit: int


def check(directory: Path, name: str) -> Found:
    """Load one model on the GPU and on the CPU, compare, measure, unload."""
    used = _bytes_in_use()
    started = time.perf_counter()
    model = _load(directory, name, "cuda")
    seconds = time.perf_counter() - started
    grown = _bytes_in_use() - used
    reference = _load(directory, name, "cpu")
    sizes = [bucket.rows for bucket in model.info.buckets]
    worst = max(_difference(model, reference, rows) for rows in sizes)
    speed = {rows: _rows_per_second(model, rows) for rows in sizes}
    reference.close()
    model.close()
    jax_runtime.release_memory()
    return Found(
        name,
        seconds,
        model.info.compile_seconds,
        model.info.memory.total_bytes,
        grown,
        _bytes_in_use() - used,
        worst,
        speed,
        model.batch_limit,
    )


@dataclass(frozen=True, slots=True)
class Overlap:
    """What a model of large inputs did with one execution in flight, and with more."""

    input_bytes: int
    executions_per_second: Mapping[int, float]
    """By how many were in flight; the more is the better only if copies overlap."""
    booked_bytes: int
    """What the books have for the model, with all that may be in flight."""
    most_bytes: int
    """The most of `bytes_in_use` that was its own, seen behind each dispatch."""

    @property
    def gain(self) -> float:
        """Return the speed with the most in flight, with one as 1."""
        return self.executions_per_second[IN_FLIGHT] / self.executions_per_second[1]


def overlap(
    device: str = "cuda", columns: int = WIDE, seconds: float = MEASURED_SECONDS
) -> Overlap:
    """Measure a model that is copied to for about as long as it computes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "wide" / "1"
        xlaserve.export_model(_passes, None, {"x": ("FP32", [1, columns])}, path, outputs=["y"])
        used = _bytes_in_use()
        with closing(_load(path, "wide", device)) as model:
            return _overlap(model, used, seconds)


def _passes(params: None, x: jax.Array) -> jax.Array:
    wide = jax.lax.fori_loop(0, PASSES, lambda _, y: jax.numpy.tanh(y) + x, x)
    total: jax.Array = wide.sum(axis=1, keepdims=True)
    return total


def _overlap(model: LoadedModel, used: int, seconds: float) -> Overlap:
    dispatching = model.dispatching
    assert dispatching is not None, "the model is not on an accelerator"
    inputs, most = _inputs(model, 1), 0
    best: dict[int, float] = dict.fromkeys((1, IN_FLIGHT), 0.0)
    for _ in range(OVERLAP_ROUNDS):
        for depth in (1, IN_FLIGHT):
            line = Line(dispatching, inputs, depth)
            best[depth] = max(best[depth], asyncio.run(line.executions_per_second(seconds)))
            most = max(most, line.most_bytes - used)
    size = sum(tensor.nbytes for tensor in inputs.values())
    return Overlap(size, best, model.info.memory.total_bytes, most)


class Line:
    """Executions on the first replica of a model, so many of them in flight (a User)."""

    def __init__(
        self, dispatching: Dispatching, inputs: Mapping[str, Tensor], in_flight: int
    ) -> None:
        self.most_bytes = 0
        self._dispatching = dispatching
        self._inputs = inputs
        self._in_flight = in_flight
        self._done = 0
        self._problem: BaseException | None = None

    def acquire(self) -> None:
        """Need no count: the model is closed behind the measurement."""

    def release(self) -> None:
        """Need no count."""

    async def executions_per_second(self, seconds: float) -> float:
        """Return the speed; raises what an execution raised."""
        with closing(DeviceThreads(self._dispatching.queues[0])) as threads:
            dispatcher = Dispatcher(self, [threads], time.perf_counter_ns, self._in_flight)
            started = time.perf_counter()
            # One more than there is room for: the thread finds the next at once.
            for _ in range(self._in_flight + 1):
                dispatcher.submit(self._dispatch, self._ended)
            submitted = self._in_flight + 1
            while self._done < submitted and self._problem is None:
                before = self._done
                await asyncio.sleep(0)
                if time.perf_counter() - started < seconds:
                    for _ in range(self._done - before):
                        dispatcher.submit(self._dispatch, self._ended)
                        submitted += 1
            taken = time.perf_counter() - started
        if self._problem is not None:
            raise self._problem
        return self._done / taken

    def _dispatch(self, replica: int) -> InFlight:
        flight = self._dispatching.dispatch(self._inputs)
        self.most_bytes = max(self.most_bytes, _bytes_in_use())
        return flight

    def _ended(self, result: Executed | BaseException) -> None:
        self._done += 1
        if isinstance(result, BaseException):
            self._problem = result


def _limit_bytes() -> int:
    """Return the memory of the first device; 0 where it is the host's."""
    return next((limit for _, limit in sites.memory("cuda").values()), 0)


def exhaust() -> str:
    """Load what needs more memory than there is; return how it was refused."""
    size = math.isqrt(_limit_bytes() // 4) + 1
    # A sort has to be there as a whole; what is only multiplied and added would not.
    function = jax.jit(lambda x: jax.numpy.sort(x[:, None] * x[None, :], axis=0).sum())
    argument = jax.ShapeDtypeStruct((size,), np.float32)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "greedy.jaxexp"
        path.write_bytes(jax.export.export(function, platforms=["cuda"])(argument).serialize())
        try:
            _load(path, "greedy", "cuda").close()
        except OutOfMemory as error:
            return str(error)
    return "not refused"


def _load(path: Path, name: str, device: str) -> LoadedModel:
    return loaders.load(path, LoadContext(name, "1", ModelConfig(), device))


def _bytes_in_use() -> int:
    return int((jax.local_devices()[0].memory_stats() or {}).get("bytes_in_use", 0))


def _inputs(model: LoadedModel, rows: int) -> dict[str, Tensor]:
    random = np.random.default_rng(rows)

    def tensor(spec: TensorSpec) -> Tensor:
        shape = tuple(rows if size == -1 else size for size in spec.shape)
        return (random.random(shape) * 10).astype(spec.datatype.dtype)

    return {spec.name: tensor(spec) for spec in model.info.inputs}


def _difference(model: LoadedModel, reference: LoadedModel, rows: int) -> float:
    inputs = _inputs(model, rows)
    found, expected = model.execute(inputs), reference.execute(inputs)
    return max(
        float(np.abs(np.asarray(found[name], float) - np.asarray(expected[name], float)).max())
        for name in found
    )


def _rows_per_second(model: LoadedModel, rows: int) -> float:
    inputs, runs, started = _inputs(model, rows), 0, time.perf_counter()
    while (seconds := time.perf_counter() - started) < MEASURED_SECONDS:
        model.execute(inputs)
        runs += 1
    return runs * max(1, rows) / seconds


def _print(found: Found) -> None:
    print(
        f"{found.model}: loaded in {found.load_seconds:.2f} s, compiled in "
        f"{found.compile_seconds:.2f} s; booked {found.booked_bytes} bytes, the device grew by "
        f"{found.grown_bytes}, {found.left_bytes} left after the unload; differs from the CPU by "
        f"{found.worst_difference:.2g} at most; batches up to {found.batch_limit}"
    )
    for rows, speed in found.rows_per_second.items():
        print(f"  {rows:>5} rows {speed:>12.0f} rows/s {1e6 * max(1, rows) / speed:>9.1f} us")


def shown(found: Overlap) -> str:
    """Return a sentence that says whether copies overlapped."""
    speeds = ", ".join(
        f"{speed:.1f}/s with {depth} in flight"
        for depth, speed in found.executions_per_second.items()
    )
    return (
        f"inputs of {found.input_bytes} bytes: {speeds}, {found.gain:.2f} times as many; "
        f"booked {found.booked_bytes} bytes, at most {found.most_bytes} in use"
    )


def main() -> int:
    """Check every model of a repository, then what happens when memory ends."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("repository", nargs="?", type=Path, default=EXAMPLES)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    asked = parser.parse_args()
    try:
        jax_runtime.start("cuda")
    except DeviceUnavailable as error:
        print(f"no GPU: {error}")
        return 0
    directories = sorted(path.parent for path in asked.repository.glob(f"*/*/{FILE_NAME}"))
    found = [check(directory, directory.parent.name) for directory in directories]
    copies = overlap()
    refusal = exhaust()
    again = check(directories[0], directories[0].parent.name)
    if asked.json:
        models = [asdict(one) for one in (*found, again)]
        print(json.dumps({"models": models, "overlap": asdict(copies), "out_of_memory": refusal}))
        return 0
    print(jax.local_devices()[0].device_kind, f"limit {_limit_bytes()} bytes")
    for one in found:
        _print(one)
    print(shown(copies))
    print(f"out of memory: {refusal}")
    print("and after it:")
    _print(again)
    return 0


if __name__ == "__main__":
    sys.exit(main())
