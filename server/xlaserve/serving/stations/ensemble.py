"""Ensembles: each step is a call to the model of the step."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Protocol, cast

import numpy as np

from xlaserve.concurrency.host import HostThreads
from xlaserve.errors import XlaserveError
from xlaserve.runtime.loaded import Value
from xlaserve.serving.access.sight import without_hidden
from xlaserve.serving.answers import deliver
from xlaserve.serving.ensemble import EnsemblePlan
from xlaserve.serving.infer_call import AwaitedInfer, Executed, InferCall, ServedVersion, Tensors
from xlaserve.serving.stations.station import Served, Working
from xlaserve.tensors import Tensor

_CPU = "cpu"


class Steps(Protocol):
    """Executes the steps of ensembles: the engine."""

    def resolve(self, name: str, number: str) -> tuple[ServedVersion, Served]:
        """Return the version that answers; raises ModelNotFound or ModelNotReady."""
        ...

    def begin_step(
        self, call: InferCall, version: ServedVersion, instance: Served, inputs: Tensors
    ) -> None:
        """Answer a step, now or later; what its model is given was checked with the plan."""
        ...


class Ensemble:
    """Runs the steps of a plan one after the other, for each call by itself (a Station)."""

    def __init__(
        self, plan: EnsemblePlan, steps: Steps, threads: HostThreads, now_ns: Callable[[], int]
    ) -> None:
        self._plan = plan
        self._steps = steps
        self._threads = threads
        self._now_ns = now_ns

    def pending_since(self) -> Iterator[int]:
        """Yield nothing: the steps wait where their models are."""
        return iter(())

    def begin(self, call: InferCall) -> None:
        """Start a task that runs the steps."""
        call.submitted_ns = self._now_ns()
        running = asyncio.ensure_future(self._run(call))
        call.wait_at(Working(running))
        running.add_done_callback(partial(self._end, call))

    def retire(self) -> Sequence[InferCall]:
        """Return nothing: no call waits."""
        return ()

    async def _run(self, call: InferCall) -> Executed:
        queue_ns = infer_ns = 0
        with ExitStack() as leases:
            found = {}
            for name, number in self._plan.models():
                version, instance = found[name, number] = self._steps.resolve(name, number)
                instance.acquire()
                leases.callback(instance.release)
            tensors: dict[str, Value] = dict(call.inputs)
            for step in self._plan.steps:
                version, instance = found[step.model_name, step.model_version]
                # An optional input of the ensemble may be absent; then it is in its steps.
                given = {
                    name: tensors[tensor]
                    for name, tensor in step.input_map.items()
                    if tensor in tensors
                }
                one = AwaitedInfer.within(call)
                # Its outputs are left where the next step may want them.
                one.resident = instance.platform != _CPU
                self._steps.begin_step(one, version, instance, cast(Tensors, given))
                outputs = {o.name: o.data for o in (await one.answered()).outputs}
                tensors |= {tensor: outputs[name] for name, tensor in step.output_map.items()}
                queued, computed = _times(one)
                queue_ns += queued
                infer_ns += computed
            wanted = {spec.name: tensors[spec.name] for spec in self._plan.info.outputs}
            if not call.resident and not all(isinstance(v, np.ndarray) for v in wanted.values()):
                wanted = await self._threads.run(partial(_fetch, wanted))
        # The steps of an ensemble wait and compute in turns: as if they had waited first.
        begun = call.submitted_ns + queue_ns
        return Executed(cast(Tensors, wanted), begun, begun + infer_ns)

    def _end(self, call: InferCall, running: "asyncio.Task[Executed]") -> None:
        if running.cancelled():
            deliver([call], asyncio.CancelledError())
        elif error := running.exception():
            names = [name for name, _ in self._plan.models()]
            names += error.steps if isinstance(error, XlaserveError) else ()
            deliver([call], without_hidden(call, error, names))
        else:
            deliver([call], running.result())


def _times(step: InferCall) -> tuple[int, int]:
    """Return how long a step waited and computed, in nanoseconds; neither is negative.

    With a response cache it may have waited nowhere, or share an execution that began before it.
    """
    executed = step.executed
    assert executed is not None
    submitted = step.submitted_ns or executed.begun_ns
    begun = max(executed.begun_ns, submitted)
    return begun - submitted, max(0, executed.ended_ns - begun)


def _fetch(outputs: Mapping[str, Value]) -> dict[str, Value]:
    return {name: _on_host(value) for name, value in outputs.items()}


def _on_host(value: Value) -> Tensor:
    return value if isinstance(value, np.ndarray) else value.numpy()
