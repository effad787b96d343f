"""The station of ensembles, which runs each step as a nested call."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias, TypeVar, cast

import numpy as np

from xlaserve.concurrency.host import HostThreads
from xlaserve.errors import (
    Decoupled,
    InvalidModel,
    InvalidTensor,
    ModelNotReady,
    XlaserveError,
)
from xlaserve.errors.code import ModelFailed
from xlaserve.errors.panics import ENDS
from xlaserve.runtime.handling import AnswerParameters
from xlaserve.runtime.loaded import ModelInfo, Value
from xlaserve.serving.access.sight import without_hidden
from xlaserve.serving.answers import answer_last, deliver, respond
from xlaserve.serving.checks import check_inputs
from xlaserve.serving.ensemble import EnsemblePlan, Lead, PlannedStep
from xlaserve.serving.infer_call import AwaitedInfer, Executed, InferCall, ServedVersion, Tensors
from xlaserve.serving.inference import InferInput, InferRequest, InferResponse
from xlaserve.serving.stations.station import Served, Working
from xlaserve.serving.stations.step_answers import StepAnswers
from xlaserve.serving.stations.step_flow import Flow
from xlaserve.serving.stations.unending import Unending
from xlaserve.serving.uses import note, use_of
from xlaserve.tensors import Datatype, Tensor, datatype_of, describe, specs_of

_CPU = "cpu"
_Part = TypeVar("_Part", bound=InferCall)
_ResolvedModel: TypeAlias = tuple[ServedVersion, Served]


class Steps(Protocol):
    """The part of the engine that executes ensemble steps."""

    def resolve(self, name: str, number: str) -> _ResolvedModel:
        """Return the version that answers; raises ModelNotFound or ModelNotReady."""
        ...

    def begin_step(
        self, call: InferCall, version: ServedVersion, instance: Served, inputs: Tensors
    ) -> None:
        """Start a step; the plan has validated its inputs and set its parameters."""
        ...


class _Done(NamedTuple):
    """The outcome of all steps; for a decoupled ensemble, of the last answer."""

    executed: Executed
    parameters: AnswerParameters | None


class Ensemble:
    """Runs the steps of a plan for each call (a Station)."""

    def __init__(
        self,
        plan: EnsemblePlan,
        steps: Steps,
        threads: HostThreads,
        now_ns: Callable[[], int],
        instance: Served,
    ) -> None:
        self._plan = plan
        self._planned_for: Sequence[object] = ()
        """The `quick` checks of the loaded models that the plan fits; they change with
        every load.
        """
        self._steps = steps
        self._threads = threads
        self._now_ns = now_ns
        self._unending = Unending(instance) if plan.info.is_decoupled else None

    def pending_since(self) -> Iterator[int]:
        """Yield nothing: steps are queued at their own models."""
        return iter(())

    def begin(self, call: InferCall) -> None:
        """Start a task that runs the steps."""
        call.submitted_ns = self._now_ns()
        if self._unending is not None:
            if not call.takes_many:
                raise Decoupled(call.instance.model)
            self._unending.add(call)
        running = asyncio.ensure_future(self._run(call))
        call.wait_at(Working(running))
        running.add_done_callback(partial(self._end, call))

    def retire(self) -> Sequence[InferCall]:
        """Return nothing: no calls are queued here."""
        return ()

    async def _run(self, call: InferCall) -> _Done:
        requested = _requested_outputs(call)
        found: dict[tuple[str, str], _ResolvedModel] = {}
        wanted: Mapping[str, Value] = {}
        parameters = None
        with ExitStack() as leases:
            for name, number in self._plan.models():
                _, instance = found[name, number] = self._steps.resolve(name, number)
                instance.acquire()
                leases.callback(instance.release)
            note(call, [use_of(*key, instance) for key, (_, instance) in found.items()])
            run = _Run(self._plan_for(call, found), found, self._steps, self._threads, call)
            async with aclosing(run.answers()) as answers:
                async for flow in answers:
                    wanted = await run.wanted(flow)
                    parameters = flow.answer_parameters(requested)
                    if self._plan.info.is_decoupled:
                        call.answer(_respond(call, requested, wanted, parameters), last=False)
                        await call.writable()
        # Steps queue and compute alternately; reported as if all queueing came first.
        begun = call.submitted_ns + run.queue_ns
        return _Done(Executed(cast(Tensors, wanted), begun, begun + run.infer_ns), parameters)

    def _plan_for(
        self, call: InferCall, found: Mapping[tuple[str, str], _ResolvedModel]
    ) -> EnsemblePlan:
        """Return a plan that fits the models as currently loaded."""
        loads = [instance.quick for _, instance in found.values()]
        if loads != self._planned_for:
            models = {key: instance.info for key, (_, instance) in found.items()}
            try:
                self._plan = self._plan.fitted(models)
            except InvalidModel as error:
                reason = f"a step was reloaded with different tensors: {error}"
                state = "UNAVAILABLE"
                raise ModelNotReady(call.model, call.version, state, reason) from error
            self._planned_for = loads
        return self._plan

    def _end(self, call: InferCall, running: "asyncio.Task[_Done]") -> None:
        if running.cancelled():
            deliver([call], asyncio.CancelledError())
        elif error := running.exception():
            names = [name for name, _ in self._plan.models()]
            names += error.steps if isinstance(error, XlaserveError) else ()
            deliver([call], without_hidden(call, error, names))
        else:
            self._deliver(call, *running.result())

    def _deliver(
        self, call: InferCall, executed: Executed, parameters: AnswerParameters | None
    ) -> None:
        if self._plan.info.is_decoupled:
            answer_last(call, executed)
        elif self._plan.info.is_lenient or parameters is not None:
            self._answer(call, executed, parameters)
        else:
            deliver([call], executed)

    def _answer(
        self, call: InferCall, executed: Executed, parameters: AnswerParameters | None
    ) -> None:
        """Answer with the outputs that exist: steps may omit or replace some."""
        try:
            response = _respond(call, _requested_outputs(call), executed.outputs, parameters)
        except ENDS:
            raise
        except BaseException as error:
            deliver([call], error)
        else:
            answer_last(call, executed, response)


class _Run:
    """One execution of all steps, for one call."""

    def __init__(
        self,
        plan: EnsemblePlan,
        found: Mapping[tuple[str, str], _ResolvedModel],
        steps: Steps,
        threads: HostThreads,
        call: InferCall,
    ) -> None:
        self.found = found
        """Version and instance of each step's model."""
        self.queue_ns = self.infer_ns = 0
        """Total queueing and computing time of the steps."""
        self._plan = plan
        self._steps = steps
        self._threads = threads
        self._call = call
        self._parts: set[InferCall] = set()
        call.nested = self._parts

    async def answers(self) -> "AsyncGenerator[Flow, None]":
        """Yield the tensors of each answer; there is only one unless a step is decoupled."""
        tensors: dict[str, Value] = dict(self._call.inputs)
        for name, shape in self._plan.inputs.items():
            if name in tensors:
                tensors[name] = shape(tensors[name])
        async with aclosing(self._from(0, Flow(tensors))) as found:
            async for one in found:
                yield one

    async def _from(self, start: int, flow: Flow) -> "AsyncGenerator[Flow, None]":
        """Run the steps from index `start`, and yield the resulting tensors."""
        for at, planned in enumerate(self._plan.steps[start:], start):
            if planned.is_decoupled:
                async with aclosing(self._many(planned, flow)) as answers:
                    async for made in answers:
                        async with aclosing(self._from(at + 1, made)) as found:
                            async for one in found:
                                yield one
                return
            flow = await self._one(planned, flow)
        yield flow

    async def _one(self, planned: PlannedStep, flow: Flow) -> Flow:
        """Execute a step, and return the tensors with its outputs added."""
        one = self._part(AwaitedInfer.within(self._call))
        await self._begin(one, planned, flow)
        response = await one.answered()
        self._parts.discard(one)
        queued, computed = _times(one)
        self.queue_ns += queued
        self.infer_ns += computed
        return flow.with_answer(planned.step, response, one.parameters)

    async def _many(self, planned: PlannedStep, flow: Flow) -> "AsyncGenerator[Flow, None]":
        """Execute a decoupled step; for each answer, yield the tensors with its outputs added."""
        one = self._part(StepAnswers.within(self._call))
        await self._begin(one, planned, flow)
        async with aclosing(one.answers()) as answers:
            async for response in answers:
                # Meanwhile the call waits for the later steps, not for this one.
                self._parts.discard(one)
                yield flow.with_answer(planned.step, response, one.parameters)
                self._parts.add(one)
        self._parts.discard(one)

    def _part(self, one: _Part) -> _Part:
        self._parts.add(one)
        return one

    async def _begin(self, one: AwaitedInfer, planned: PlannedStep, flow: Flow) -> None:
        step, tensors = planned.step, flow.tensors
        version, instance = self.found[step.model_name, step.model_version]
        one.id = self._call.id
        taken = step.input_map.values()
        one.parameters = flow.parameters(step.model_name, taken, self._call.parameters)
        # An absent optional input is absent in the step as well.
        given = {
            name: tensors[tensor] for name, tensor in step.input_map.items() if tensor in tensors
        }
        for name, lead in planned.leads.items():
            if name in given:
                subject = (version.model, "input", name)
                given[name] = _led(lead, await self._on_host(given[name]), *subject)
        if planned.is_checked:
            _check(version.model, instance.info, given)
        # Keep its outputs on the device, where the next step may use them.
        one.resident = instance.platform != _CPU and not planned.is_decoupled
        self._steps.begin_step(one, version, instance, cast(Tensors, given))

    async def _on_host(self, value: Value) -> Tensor:
        if isinstance(value, np.ndarray):
            return value
        return await self._threads.run(value.numpy)

    async def wanted(self, flow: Flow) -> Mapping[str, Value]:
        """Return the outputs of the ensemble, in the shapes that clients expect."""
        plan, call, tensors = self._plan, self._call, flow.tensors
        found = {s.name: tensors[s.name] for s in plan.info.outputs if s.name in tensors}
        info = plan.info
        is_changed = bool(plan.leads or plan.outputs) or info.is_lenient or info.is_decoupled
        # An answer with sequence parameters is built here and needs host arrays.
        is_changed |= bool(flow.sequences)
        on_host = all(isinstance(value, np.ndarray) for value in found.values())
        if not on_host and (is_changed or not call.resident):
            found = cast("dict[str, Value]", await self._threads.run(partial(_fetch, found)))
        for name, lead in plan.leads.items():
            if name in found:
                subject = (call.instance.model, "output", name)
                found[name] = _led(lead, cast(Tensor, found[name]), *subject, rows=call.rows)
        for name, shape in plan.outputs.items():
            if name in found:
                found[name] = shape(found[name])
        if info.is_lenient and not call.instance.info.is_lenient:
            _check_promised(call, found)
        return found


def _led(lead: Lead, value: Tensor, model: str, kind: str, name: str, *, rows: int = 1) -> Tensor:
    """Add or drop a batch dimension of one row; raises InvalidTensor for more rows."""
    have = rows if lead is Lead.ADDED else value.shape[0]
    if have != 1:
        expected = "a batch of 1 row, since models with and without batches are combined"
        raise InvalidTensor(model, kind, name, expected, f"{have} rows")
    return value[np.newaxis] if lead is Lead.ADDED else value[0]


def _check(model: str, info: ModelInfo, given: Mapping[str, Value]) -> None:
    """Raise an InvalidRequest if tensors do not match the inputs of the next model."""
    specs = {spec.name: spec.datatype for spec in info.inputs}
    inputs = [
        InferInput(name, _datatype(value) or specs[name], cast(Tensor, value))
        for name, value in given.items()
    ]
    check_inputs(model, info, InferRequest(model, inputs=tuple(inputs)))


def _check_promised(call: InferCall, found: Mapping[str, Value]) -> None:
    """Raise ModelFailed if requested outputs differ from the ensemble's metadata.

    A step's model may have been replaced by one with other outputs since the ensemble was loaded;
    clients rely on the metadata.
    """
    for name in _requested_outputs(call):
        (spec,) = (spec for spec in call.instance.info.outputs if spec.name == name)
        value = found.get(name)
        got = "none" if value is None else _described(cast(Tensor, value))
        if value is None or _datatype(value) is not spec.datatype or not spec.accepts(value.shape):
            raise ModelFailed(
                call.found.model,
                f"output '{name}': expected {spec} as before a step was reloaded, got {got};"
                " reload the ensemble",
            )


def _described(value: Tensor) -> str:
    return describe(_datatype(value) or str(value.dtype), value.shape)


def _datatype(value: Value) -> Datatype | None:
    return datatype_of(value.dtype) if isinstance(value, np.ndarray) else None


def _requested_outputs(call: InferCall) -> list[str]:
    """Return the names of the requested outputs."""
    specs = call.instance.info.outputs if call.chosen is None else call.chosen
    return [spec.name for spec in specs]


def _respond(
    call: InferCall,
    requested: Sequence[str],
    outputs: Mapping[str, Value],
    parameters: AnswerParameters | None,
) -> InferResponse:
    """Build a response with the requested outputs, except those without a value."""
    found = cast(Tensors, outputs)
    call.chosen = specs_of({name: found[name] for name in requested if name in found})
    return respond(call, found, parameters)


def _times(step: InferCall) -> tuple[int, int]:
    """Return queueing and computing time of a step in nanoseconds; neither is negative.

    A cached step may not have been queued at all, or may share an execution that began earlier.
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
