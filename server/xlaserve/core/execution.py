"""Where requests are executed: on the event loop when they are quick, else in threads.

By themselves, or in a batch with others of their model.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, TypeVar, cast

import numpy as np

from xlaserve.core.batching import (
    Answered,
    Batcher,
    BatchPolicy,
    BatchQueue,
    Executed,
    ShapeKey,
    Tensors,
    Waiting,
    pack,
)
from xlaserve.core.ensemble import EnsemblePlan
from xlaserve.core.on_demand import ShapeCompiler
from xlaserve.core.registry import Instance
from xlaserve.core.statistics import Execution
from xlaserve.core.workers import Workers
from xlaserve.models.config import ModelConfig
from xlaserve.models.loaded import LoadedModel, ModelInfo, Value

T = TypeVar("T")

WORTH_SECONDS = 20e-6
"""What it costs to queue a request: a model that is quicker than this is not worth it."""

DEFAULT_MAX_QUEUED = 1024
_MICROSECOND_NS = 1000

Outcome: TypeAlias = tuple[Mapping[str, Value], Execution]
"""The outputs of a model, and what they took."""


@dataclass(frozen=True, slots=True)
class ExecutionPolicy:
    """What the settings say of execution."""

    inline_seconds: float
    """A model that its warm-up measured quicker than this runs on the event loop."""
    max_queued: int = DEFAULT_MAX_QUEUED
    """Requests that may wait for a batch, where a model does not say."""
    batching: bool = True


class Executor:
    """Executes requests that are checked, admitted, and hold a lease on their instance."""

    def __init__(
        self,
        workers: Workers,
        policy: ExecutionPolicy,
        now_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._workers = workers
        self._shapes = ShapeCompiler(workers)
        self._policy = policy
        self._now_ns = now_ns

    def at_once(self, instance: Instance, inputs: Mapping[str, Value]) -> Outcome | None:
        """Run a model that is quick enough here and now; None where it is not."""
        model = instance.runner
        if isinstance(model, EnsemblePlan) or model.on_demand or self._batches(instance, model):
            return None
        return self._inline(model, rows_of(model.info, inputs), inputs)

    def _inline(
        self, model: LoadedModel, rows: int, inputs: Mapping[str, Value], *, resident: bool = False
    ) -> Outcome | None:
        if model.expected_seconds(rows) > self._policy.inline_seconds:
            return None
        begun = self._now_ns()
        outputs = model.execute(inputs, resident=resident)
        return outputs, Execution(rows, begun, 0, self._now_ns() - begun)

    async def execute(
        self,
        instance: Instance,
        model: LoadedModel,
        inputs: Mapping[str, Value],
        *,
        resident: bool = False,
    ) -> Outcome:
        """Run a model on the inputs of one request.

        With `resident` the outputs may stay on the device; such a request is never batched.
        """
        rows = rows_of(model.info, inputs)
        if not resident and self._batches(instance, model):
            return await self._in_batch(instance, model, rows, inputs)
        done = None
        if model.on_demand is None:
            done = self._inline(model, rows, inputs, resident=resident)
        if done is not None:
            return done
        submitted = self._now_ns()
        executable = await self._shapes.find(instance, model, inputs)
        call = partial(executable.execute, inputs, resident=resident)
        outputs, begun, ended = await self._in_thread(instance, call)
        return outputs, Execution(rows, submitted, begun - submitted, ended - begun)

    async def _in_thread(
        self, instance: Instance, call: Callable[[], Mapping[str, Value]]
    ) -> tuple[Mapping[str, Value], int, int]:
        timed = partial(_timed, self._now_ns, call)
        running = _in_thread(self._workers, instance, timed, instance.queued.discard)
        instance.queued.add(running)
        return await asyncio.wrap_future(running)

    # --- in batches ---

    def _batches(self, instance: Instance, model: LoadedModel) -> bool:
        """Tell whether putting requests together saves more than the queue costs."""
        if instance.batches is None:
            inline = min(WORTH_SECONDS, self._policy.inline_seconds)
            gains = model.batch_limit > 1 and model.expected_seconds(1) > inline
            instance.batches = self._policy.batching and gains
        return instance.batches

    async def _in_batch(
        self, instance: Instance, model: LoadedModel, rows: int, inputs: Mapping[str, Value]
    ) -> Outcome:
        tensors = cast(Tensors, inputs)  # what comes from a client is on the host
        batcher = instance.batcher or self._make_batcher(instance, model)
        answer: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
        request = Waiting(rows, tensors, self._now_ns(), answer, _key(model.info, tensors))
        batcher.submit(request)
        try:
            got = await answer
        except asyncio.CancelledError:
            batcher.give_up(request)
            raise
        queued = got.begun_ns - got.submitted_ns
        infer = got.ended_ns - got.begun_ns
        execution = Execution(rows, got.submitted_ns, queued, infer, got.batch_rows, got.leads)
        return got.outputs, execution

    def _make_batcher(self, instance: Instance, model: LoadedModel) -> Batcher:
        queue = BatchQueue(
            instance.model,
            policy_of(instance.config, self._policy.max_queued),
            lambda: model.batch_limit,
        )
        runner = InstanceRunner(
            instance, model, self._workers, self._policy.inline_seconds, self._now_ns
        )
        clock = LoopClock(asyncio.get_running_loop(), self._now_ns)
        instance.batcher = Batcher(queue, runner, clock)
        return instance.batcher


def rows_of(info: ModelInfo, inputs: Mapping[str, Value]) -> int:
    """Return how many rows the inputs of a request have; 1 without a batch dimension."""
    if not info.max_batch_size or not inputs:
        return 1
    first = next(iter(inputs.values()))
    return int(first.shape[0]) if isinstance(first, np.ndarray) else first.rows


def _key(info: ModelInfo, tensors: Tensors) -> ShapeKey:
    if not info.is_ragged:
        return ()
    return tuple(tensors[spec.name].shape[1:] for spec in info.inputs)


def policy_of(config: ModelConfig, max_queued: int) -> BatchPolicy:
    """Read how a model wants its requests gathered (ModelDynamicBatching)."""
    wanted = config.dynamic_batching
    return BatchPolicy(
        max_requests=wanted.max_queue_size or max_queued,
        setting="max_queue_size" if wanted.max_queue_size else "max_requests_per_model",
        preferred_rows=wanted.preferred_batch_size,
        delay_ns=wanted.max_queue_delay_microseconds * _MICROSECOND_NS,
        timeout_ns=wanted.default_timeout_microseconds * _MICROSECOND_NS,
    )


def _timed(
    now_ns: Callable[[], int], call: Callable[[], Mapping[str, Value]]
) -> tuple[Mapping[str, Value], int, int]:
    begun = now_ns()
    return call(), begun, now_ns()


def _in_thread(
    workers: Workers,
    instance: Instance,
    call: Callable[[], T],
    ended: Callable[["Future[T]"], None],
) -> "Future[T]":
    """Run a call that uses an instance in a thread; `ended` is called on the event loop.

    The thread is a user of its own: it may outlive requests that were cancelled.
    """
    instance.acquire()
    running = workers.execute(call)
    loop = asyncio.get_running_loop()

    def finish() -> None:
        instance.release()
        ended(running)

    running.add_done_callback(lambda _: loop.call_soon_threadsafe(finish))
    return running


class InstanceRunner:
    """Runs the batches of one instance, one for each replica of its model at a time."""

    def __init__(
        self,
        instance: Instance,
        model: LoadedModel,
        workers: Workers,
        inline_seconds: float,
        now_ns: Callable[[], int],
    ) -> None:
        self._instance = instance
        self._model = model
        self._workers = workers
        self._inline_seconds = inline_seconds
        self._now_ns = now_ns
        self.lanes = model.replicas

    def run(
        self,
        requests: Sequence[Waiting],
        lane: int,
        ended: Callable[[Executed | BaseException], None],
    ) -> None:
        """Start a batch; `ended` is called on the event loop, perhaps before this returns."""
        rows = sum(request.rows for request in requests)
        call = partial(self._execute, requests, rows, lane)
        if self._model.expected_seconds(rows) <= self._inline_seconds:
            ended(call())
            return

        def finish(running: "Future[Executed | BaseException]") -> None:
            ended(asyncio.CancelledError() if running.cancelled() else running.result())

        _in_thread(self._workers, self._instance, call, finish)

    def _execute(
        self, requests: Sequence[Waiting], rows: int, lane: int
    ) -> Executed | BaseException:
        begun = self._now_ns()
        try:
            inputs = pack(requests, self._model.padded_rows(rows))
            outputs = self._model.execute(inputs, replica=lane)
        except Exception as error:
            return error
        # Nothing stays on the device that was not asked to.
        return Executed(cast(Tensors, outputs), begun, self._now_ns())


class LoopClock:
    """The time of the engine, and what happens later in the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, now_ns: Callable[[], int]) -> None:
        self._loop = loop
        self._now_ns = now_ns

    def now_ns(self) -> int:
        """Return the time of the engine."""
        return self._now_ns()

    def soon(self, call: Callable[[], None]) -> None:
        """Call after everything that is ready now has had its turn."""
        self._loop.call_soon(call)

    def at(self, time_ns: int, call: Callable[[], None]) -> Callable[[], None]:
        """Call at a time; returns what calls it off."""
        return self._loop.call_later((time_ns - self._now_ns()) / 1e9, call).cancel
