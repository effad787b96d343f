"""Checks that inputs are copied to the device while it computes earlier requests."""

# jax is only partly typed.
# mypy: disallow-untyped-calls=False

import asyncio
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import jax

import xlaserve
from gpu_check.device import Device, Options, inputs_of
from gpu_check.findings import Finding, judged, measured, unknown
from xlaserve.artifact.target_sizes import IN_FLIGHT
from xlaserve.concurrency.device import DeviceThreads
from xlaserve.runtime.loaded import Dispatching, InFlight, LoadedModel
from xlaserve.serving.infer_call import Executed
from xlaserve.serving.stations.dispatch import Dispatcher
from xlaserve.tensors import Tensor

_ROUNDS = 3
"""Both depths alternate within a round, so that disturbances affect both; the best counts."""

_PASSES = 100
"""Passes over its input on the device: they take about as long as the copy."""

_LEAST_GAIN = 1.1
"""Smallest gain that counts as overlap; 2 would be perfect."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """The speed of a model with large inputs, with one and with several executions in flight."""

    input_bytes: int
    executions_per_second: Mapping[int, float]
    """Keyed by the number in flight; more of them are faster only if copies overlap."""
    reserved_bytes: int
    """Bytes reserved for the model, including all executions in flight."""
    most_bytes: int
    """Peak of the model's share of `bytes_in_use`, sampled after each dispatch."""

    @property
    def gain(self) -> float:
        """Return the speed with the most executions in flight, relative to one."""
        return self.executions_per_second[IN_FLIGHT] / self.executions_per_second[1]


def check_overlap(device: Device, options: Options) -> Iterator[Finding]:
    """Check that copies to the device overlap with computation; report the memory held."""
    found = overlap(device, options)
    speeds = ", ".join(
        f"{speed:.1f}/s with {depth} in flight"
        for depth, speed in found.executions_per_second.items()
    )
    said = f"inputs of {found.input_bytes} bytes: {speeds}, {found.gain:.2f} times as many"
    values = {"gain": found.gain, "executions_per_second": dict(found.executions_per_second)}
    if device.platform == "cpu":
        # The CPU stands in for an accelerator here: it copies and computes on the same cores.
        yield measured("overlap", "wide", said, **values)
        yield unknown("memory in flight", "wide", f"{found.reserved_bytes} bytes reserved")
        return
    yield judged("overlap", "wide", found.gain > _LEAST_GAIN, said, **values)
    said = f"{found.reserved_bytes} bytes reserved, at most {found.most_bytes} in use"
    yield judged(
        "memory in flight", "wide", found.most_bytes <= found.reserved_bytes, said,
        reserved_bytes=found.reserved_bytes, most_bytes=found.most_bytes,
    )  # fmt: skip


def overlap(device: Device, options: Options) -> Overlap:
    """Measure a model whose inputs take about as long to copy as to process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "wide" / "1"
        inputs = {"x": ("FP32", [1, options.wide_columns])}
        xlaserve.export_model(
            _passes, None, inputs, path, outputs=["y"], platforms=("cpu", "cuda", "tpu")
        )
        used = device.bytes_in_use()
        with closing(device.load(path, "wide")) as model:
            return _overlap(device, model, used, options.seconds)


def _passes(params: None, x: jax.Array) -> jax.Array:
    wide = jax.lax.fori_loop(0, _PASSES, lambda _, y: jax.numpy.tanh(y) + x, x)
    total: jax.Array = wide.sum(axis=1, keepdims=True)
    return total


def _overlap(device: Device, model: LoadedModel, used: int, seconds: float) -> Overlap:
    dispatching = model.dispatching
    assert dispatching is not None, "the model is not on an accelerator"
    inputs, most = inputs_of(model, 1), 0
    best: dict[int, float] = dict.fromkeys((1, IN_FLIGHT), 0.0)
    for _ in range(_ROUNDS):
        for depth in (1, IN_FLIGHT):
            line = Line(device, dispatching, inputs, depth)
            best[depth] = max(best[depth], asyncio.run(line.executions_per_second(seconds)))
            most = max(most, line.most_bytes - used)
    size = sum(tensor.nbytes for tensor in inputs.values())
    return Overlap(size, best, model.info.memory.total_bytes, most)


class Line:
    """Keeps a fixed number of executions in flight on a model's first replica (a User)."""

    def __init__(
        self,
        device: Device,
        dispatching: Dispatching,
        inputs: Mapping[str, Tensor],
        in_flight: int,
    ) -> None:
        self.most_bytes = 0
        self._device = device
        self._dispatching = dispatching
        self._inputs = inputs
        self._in_flight = in_flight
        self._done = 0
        self._problem: BaseException | None = None

    def acquire(self) -> None:
        """Do nothing: the model is closed after the measurement, so no use count is needed."""

    def release(self) -> None:
        """Do nothing (see `acquire`)."""

    async def executions_per_second(self, seconds: float) -> float:
        """Return the executions per second; raises the exception of a failed execution."""
        with closing(DeviceThreads(self._dispatching.queues[0])) as threads:
            dispatcher = Dispatcher(self, [threads], time.perf_counter_ns, self._in_flight)
            started = time.perf_counter()
            # One more than the limit, so that the device thread always finds the next execution
            # queued.
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
        self.most_bytes = max(self.most_bytes, self._device.bytes_in_use())
        return flight

    def _ended(self, result: Executed | BaseException) -> None:
        self._done += 1
        if isinstance(result, BaseException):
            self._problem = result
