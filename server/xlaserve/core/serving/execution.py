"""Where requests are executed: on the event loop when they are quick, else in threads.

By themselves, or in a batch with others of their model. What computes on an accelerator goes to the
threads of that device however quick it is: it may have to wait there for what other models do.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TypeAlias

import numpy as np

from xlaserve.core.residence.registry import Instance
from xlaserve.core.serving.batching import (
    Answering,
    Batcher,
    BatchPolicy,
    BatchQueue,
    Ended,
    Executed,
    Runner,
    ShapeKey,
    Tensors,
    Waiting,
)
from xlaserve.core.serving.dispatch import DeviceRunner, Dispatcher
from xlaserve.core.serving.ensemble import EnsemblePlan
from xlaserve.core.serving.host_runner import HostRunner, Inline, executed, in_thread
from xlaserve.core.serving.on_demand import Missing, ShapeCompiler, look
from xlaserve.core.serving.overruns import Overruns
from xlaserve.core.serving.statistics import Execution
from xlaserve.core.threads.completion import Cancellable, settle, settled
from xlaserve.core.threads.workers import Workers
from xlaserve.models.config import ModelConfig
from xlaserve.models.loaded import Dispatching, Executable, LoadedModel, ModelInfo, Value

_WORTH_SECONDS = 4e-6
"""What it costs to queue a request: a model that is quicker than this is not worth it."""

_PACK_SECONDS_PER_BYTE = 1e-10
"""What it costs to copy a row into a batch: large rows are read in place where they came."""

DEFAULT_MAX_QUEUED = 1024
DEFAULT_COMPILE_SECONDS = 600.0
_MICROSECOND_NS = 1000
_SECOND_NS = 1e9

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
    compile_seconds: float = DEFAULT_COMPILE_SECONDS
    """How long it may take to compile what a request asks for."""


class Executor:
    """Executes requests that are checked, admitted, and use their instance."""

    def __init__(
        self,
        workers: Workers,
        policy: ExecutionPolicy,
        now_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._workers = workers
        self._shapes = ShapeCompiler(workers, policy.compile_seconds)
        self._policy = policy
        self._now_ns = now_ns
        self._overruns = Overruns(workers.host, now_ns)

    def at_once(
        self,
        instance: Instance,
        inputs: Mapping[str, Value],
        rows: int,
        *,
        is_alone: bool = False,
    ) -> Outcome | None:
        """Run a model that is quick enough here and now; None where it is not.

        Nor where it gathers, unless the request is alone.
        """
        model = instance.runner
        if isinstance(model, EnsemblePlan) or (not is_alone and self.gathers(instance, model)):
            return None
        return self._inline(instance, model, rows, inputs)

    def _inline(
        self,
        instance: Instance,
        model: LoadedModel,
        rows: int,
        inputs: Mapping[str, Value],
        *,
        resident: bool = False,
    ) -> Outcome | None:
        # What a shape on demand takes, and whether it is there at all, is not known in advance.
        if model.on_demand is not None or not instance.is_inline:
            return None
        limit = self._policy.inline_seconds
        if model.expected_seconds(rows) > limit:
            return None
        begun = self._now_ns()
        outputs = model.execute(inputs, resident=resident)
        took = self._now_ns() - begun
        if took > limit * _SECOND_NS:
            self._overruns.overran(instance, model, inputs, took / _SECOND_NS, limit)
        return outputs, Execution(rows, begun, 0, took)

    async def resident(
        self, instance: Instance, model: LoadedModel, inputs: Mapping[str, Value]
    ) -> Outcome:
        """Run a model by itself; its outputs may stay on the device."""
        rows = rows_of(model.info, inputs)
        if model.dispatching is None:
            done = self._inline(instance, model, rows, inputs, resident=True)
            if done is not None:
                return done
        submitted = self._now_ns()
        found = look(model, inputs)
        if isinstance(found, Missing):
            found = await self._shapes.compiled(instance, found)
        over: asyncio.Future[Executed] = asyncio.get_running_loop().create_future()
        work = self._by_itself(instance, found, inputs, partial(settle, over), resident=True)
        ran = await settled(over, work)
        begun = ran.begun_ns
        return ran.outputs, Execution(rows, submitted, begun - submitted, ran.ended_ns - begun)

    def in_thread(
        self, instance: Instance, model: LoadedModel, request: Waiting, answers: Answering
    ) -> None:
        """Run a model for one request, in threads; compile it for its shape first if need be.

        Raises InvalidTensor for sizes that contradict one another.
        """
        found = look(model, request.inputs)
        if isinstance(found, Missing):
            self._compile_first(instance, found, request, answers)
        else:
            self._run_in_thread(instance, found, request, answers)

    def _compile_first(
        self, instance: Instance, missing: Missing, request: Waiting, answers: Answering
    ) -> None:
        compiling = asyncio.ensure_future(self._shapes.compiled(instance, missing))
        # A user of its own: when its request is cancelled it may just be about to begin.
        instance.acquire()

        def ended(compiling: "asyncio.Task[Executable]") -> None:
            request.place = None
            try:
                executable = compiling.result()
                if request.done is not None:
                    self._run_in_thread(instance, executable, request, answers)
            except (Exception, asyncio.CancelledError) as error:
                answers.deliver([request], error)
            finally:
                instance.release()

        request.place = Running(compiling, answers)
        compiling.add_done_callback(ended)

    def _run_in_thread(
        self, instance: Instance, executable: Executable, request: Waiting, answers: Answering
    ) -> None:
        def ended(result: Executed | BaseException) -> None:
            request.place = None  # else they hold one another, and the outputs, until garbage is
            answers.deliver([request], result)

        work = self._by_itself(instance, executable, request.inputs, ended)
        request.place = Running(work, answers)

    def _by_itself(
        self,
        instance: Instance,
        executable: Executable,
        inputs: Mapping[str, Value],
        ended: Ended,
        *,
        resident: bool = False,
    ) -> Cancellable:
        """Execute once, on the replica with the least to do."""
        dispatching = executable.dispatching
        if dispatching is not None:
            return self._dispatcher(instance, dispatching).submit(
                lambda replica: dispatching.dispatch(inputs, resident=resident, replica=replica),
                ended,
            )

        def run(replica: int) -> Executed | BaseException:
            execute = partial(executable.execute, inputs, resident=resident, replica=replica)
            return executed(self._now_ns, execute)

        def over(result: Executed | BaseException) -> None:
            instance.queued.discard(job)
            ended(result)

        job = in_thread(self._workers.host, instance, run, over)
        instance.queued.add(job)
        return job

    def _dispatcher(self, instance: Instance, dispatching: Dispatching) -> Dispatcher:
        if instance.dispatcher is None:
            devices = [self._workers.device(queue) for queue in dispatching.queues]
            instance.dispatcher = Dispatcher(instance, devices, self._now_ns)
        return instance.dispatcher

    # --- in batches ---

    def gathers(self, instance: Instance, model: LoadedModel) -> bool:
        """Tell whether requests wait in a queue: putting them together saves more than that costs.

        For a device they wait there in any case, but for those of shapes on demand.
        """
        if instance.batches is None:
            if model.dispatching is not None:
                instance.batches = model.on_demand is None
                return instance.batches
            instance.batches = self._policy.batching and self._gains(instance, model)
        return instance.batches

    def _gains(self, instance: Instance, model: LoadedModel) -> bool:
        """Tell whether a row takes longer by itself than its part of the largest batch.

        Not asked of a model that is configured to wait for others, nor of one that is too slow for
        the event loop: there a thread costs more than all of it.
        """
        most = model.batch_limit
        if model.on_demand is not None or most < 2:
            return False
        wanted, alone = instance.config.dynamic_batching, model.expected_seconds(1)
        waits = wanted.max_queue_delay_microseconds or wanted.preferred_batch_size
        if waits or not instance.is_inline or alone > self._policy.inline_seconds:
            return True
        packed = _WORTH_SECONDS + _row_bytes(model.info) * _PACK_SECONDS_PER_BYTE
        return alone > packed + model.expected_seconds(most) / most

    def make_batcher(self, instance: Instance, model: LoadedModel, answers: Answering) -> Batcher:
        """Give an instance the queue in which its requests are gathered."""
        queue = BatchQueue(
            instance.model,
            policy_of(instance.config, self._policy.max_queued),
            (lambda: model.batch_limit) if self._policy.batching else (lambda: 1),
        )
        runner = self._runner(instance, model)
        clock = LoopClock(asyncio.get_running_loop(), self._now_ns)
        instance.batcher = Batcher(queue, runner, clock, answers)
        return instance.batcher

    def _runner(self, instance: Instance, model: LoadedModel) -> Runner:
        dispatching = model.dispatching
        if dispatching is not None:
            return DeviceRunner(self._dispatcher(instance, dispatching), model, dispatching)
        return HostRunner(
            instance,
            model,
            self._workers.host,
            Inline(self._policy.inline_seconds, self._overruns.overran),
            self._now_ns,
        )


@dataclass(frozen=True, slots=True)
class Running:
    """The place of a request that is worked on by itself."""

    work: Cancellable
    answers: Answering

    def give_up(self, request: Waiting) -> None:
        """Forget the request; its work ends early where it can."""
        self.work.cancel()
        self.answers.forget(request)


def rows_of(info: ModelInfo, inputs: Mapping[str, Value]) -> int:
    """Return how many rows the inputs of a request have; 1 without a batch dimension."""
    if not info.max_batch_size or not inputs:
        return 1
    first = next(iter(inputs.values()))
    return int(first.shape[0]) if isinstance(first, np.ndarray) else first.rows


def _row_bytes(info: ModelInfo) -> int:
    """Return the bytes of one row of the inputs, as far as their shapes are fixed."""
    return sum(
        spec.datatype.itemsize * prod(size for size in spec.shape[1:] if size > 0)
        for spec in info.inputs
    )


def key_of(info: ModelInfo, tensors: Tensors) -> ShapeKey:
    """Return what requests must have in common with this one to be put together with it."""
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
