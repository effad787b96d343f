"""Infer: resolve the model, check the request, execute, answer."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import cast

import numpy as np

from xlaserve.core.residence.monitor import VersionReport, report
from xlaserve.core.residence.registry import Instance, Model, Registry, Version
from xlaserve.core.serving.answers import Answers
from xlaserve.core.serving.batching import NO_KEY, Answering, Executed, Tensors, Waiting
from xlaserve.core.serving.checks import check_inputs, check_outputs
from xlaserve.core.serving.ensemble import EnsemblePlan
from xlaserve.core.serving.execution import (
    DEFAULT_COMPILE_SECONDS,
    DEFAULT_MAX_QUEUED,
    ExecutionPolicy,
    Executor,
    Outcome,
    Running,
    key_of,
    rows_of,
)
from xlaserve.core.serving.image_files import DEFAULT_LIMITS, ImageLimits
from xlaserve.core.serving.images import EncodedImages, find_images
from xlaserve.core.serving.inference import Done, InferOutput, InferRequest, InferResponse, Pending
from xlaserve.core.serving.statistics import Execution
from xlaserve.core.threads.completion import settle, settled
from xlaserve.core.threads.workers import Workers
from xlaserve.errors import ShuttingDown
from xlaserve.models.config_served import ServedConfig
from xlaserve.models.loaded import ModelInfo, Value
from xlaserve.tensors import Tensor, TensorSpec

_CPU = "cpu"


class Engine:
    """Answers inference requests from the models of the registry."""

    def __init__(
        self,
        registry: Registry,
        workers: Workers,
        *,
        inline_execution_seconds: float,
        batching: bool = True,
        max_queued: int = DEFAULT_MAX_QUEUED,
        compile_seconds: float = DEFAULT_COMPILE_SECONDS,
        clock: Callable[[], int] = time.perf_counter_ns,
        now: Callable[[], int] = time.time_ns,
        image_limits: ImageLimits = DEFAULT_LIMITS,
    ) -> None:
        self._registry = registry
        self._workers = workers
        self._executor = Executor(
            workers,
            ExecutionPolicy(
                inline_execution_seconds,
                max_queued,
                batching=batching,
                compile_seconds=compile_seconds,
            ),
            clock,
        )
        self._clock = clock
        self._now = now
        self._image_limits = image_limits
        self._stopping = False

    async def infer(self, request: InferRequest) -> InferResponse:
        """Answer one request (V2 protocol, Inference).

        Raises ModelNotFound, ModelNotReady, an InvalidRequest that names the tensor, Overloaded,
        QueueTimeout, OutOfMemory, or ShuttingDown.
        """
        answer: asyncio.Future[InferResponse] = asyncio.get_running_loop().create_future()
        begun = self.begin(request, partial(settle, answer))
        return begun if isinstance(begun, InferResponse) else await settled(answer, begun)

    def begin(self, request: InferRequest, done: Done) -> InferResponse | Pending:
        """Answer at once, or call `done` later with what `infer` would return or raise.

        Raises what is known at once. `done` is called for a Pending only, and not within this call.
        """
        if self._stopping:
            raise ShuttingDown
        started = self._clock()
        version, instance = self._registry.resolve(request.model_name, request.model_version)
        chosen, images, key = None, None, NO_KEY
        try:
            ordinary = instance.quick.inputs(request)
            if ordinary is not None:
                inputs, rows = ordinary
            else:
                inputs, chosen, images = self._check(instance, request)
                rows, key = rows_of(instance.info, inputs), key_of(instance.info, inputs)
            model = self._registry.admitting(request.model_name)
            batcher = instance.batcher
            alone = batcher if batcher is not None and batcher.is_alone(started) else None
            if images is None and (alone is not None or not instance.batches):
                # Nothing else has a turn before its answer: it need not be counted in and out.
                outcome = self._executor.at_once(instance, inputs, rows, is_alone=alone is not None)
                if outcome is not None:
                    ended = self._clock()
                    version.statistics.succeeded(outcome[1], started, ended, self._now())
                    if alone is not None:
                        alone.passed(ended)
                    outputs = _shown(chosen or instance.info.outputs, outcome[0])
                    return InferResponse(request.model_name, version.number, request.id, outputs)
            waiting = Waiting(done, rows, inputs, started, self._clock(), request.id, chosen, key)
            self._run_later(model, version, instance, waiting, images)
        except BaseException as error:
            version.statistics.failed(error, self._clock() - started)
            raise
        return waiting

    def _run_later(
        self,
        model: Model,
        version: Version,
        instance: Instance,
        waiting: Waiting,
        images: EncodedImages | None = None,
    ) -> None:
        """Have a request executed, and count it until it is answered; raises Overloaded."""
        if images is None:
            self._start(model, version, instance, waiting)
        else:
            self._decode(images, model, version, instance, waiting)
        model.requests += 1
        instance.acquire()

    def _check(
        self, instance: Instance, request: InferRequest
    ) -> tuple[dict[str, Tensor], tuple[TensorSpec, ...] | None, EncodedImages | None]:
        name, info = request.model_name, instance.info
        images = find_images(request, info, instance.config, self._image_limits)
        check_inputs(name, info, images.promised() if images else request)
        chosen = check_outputs(name, info, request.outputs) if request.outputs else None
        instance.quick.parameters.note(request)
        return {tensor.name: tensor.data for tensor in request.inputs}, chosen, images

    def _start(self, model: Model, version: Version, instance: Instance, waiting: Waiting) -> None:
        """Have a request executed later; raises Overloaded."""
        batcher = instance.batcher
        if batcher is not None and instance.batches:
            waiting.place = batcher
            batcher.submit(waiting)
            return
        answers, runner = self._answers(model, version, instance), instance.runner
        if isinstance(runner, EnsemblePlan):
            steps = asyncio.ensure_future(self._run_steps(runner, waiting.inputs))
            waiting.place = Running(steps, answers)
            steps.add_done_callback(partial(_end_steps, answers, waiting))
        elif self._executor.gathers(instance, runner):
            self._executor.make_batcher(instance, runner, answers)
            self._start(model, version, instance, waiting)
        else:
            self._executor.in_thread(instance, runner, waiting, answers)

    def _answers(self, model: Model, version: Version, instance: Instance) -> Answering:
        if instance.answers is None:
            instance.answers = Answers(model, version, instance, self._clock, self._now)
        return instance.answers

    def _decode(
        self,
        images: EncodedImages,
        model: Model,
        version: Version,
        instance: Instance,
        waiting: Waiting,
    ) -> None:
        """Decode the images of a request in a thread, then start it."""
        answers = self._answers(model, version, instance)

        def decoded(found: dict[str, Tensor] | BaseException) -> None:
            if waiting.done is None:
                return
            if isinstance(found, BaseException):
                answers.deliver([waiting], found)
                return
            try:
                waiting.inputs = dict(waiting.inputs) | found
                waiting.rows = rows_of(instance.info, waiting.inputs)
                waiting.key = key_of(instance.info, waiting.inputs)
                waiting.submitted_ns = self._clock()
                outcome = self._executor.at_once(instance, waiting.inputs, waiting.rows)
                if outcome is None:
                    self._start(model, version, instance, waiting)
                else:
                    answers.deliver([waiting], _as_executed(outcome, waiting))
            except Exception as error:
                answers.deliver([waiting], error)

        waiting.place = Running(self._workers.host.start(images.decode, decoded), answers)

    def require(self, name: str, version: str = "") -> AbstractContextManager[None]:
        """Raise what `infer` would raise for a model that cannot answer.

        For a transport to call before it reads tensors: that there is no such model matters more
        than what is wrong with them. As a context it counts what is wrong with them as a failed
        request of the model.
        """
        found, _ = self._registry.resolve(name, version)
        return found.statistics

    def info(self, name: str, version: str = "") -> ModelInfo:
        """Return what a model is; errors as for `infer`."""
        return self._registry.resolve(name, version)[1].info

    def describe(self, name: str, version: str = "") -> tuple[ModelInfo, list[str]]:
        """Return what a model is and the versions that answer; errors as for `infer`."""
        info = self.info(name, version)
        model = self._registry.find(name)
        assert model is not None
        answering = (v for v in model.versions.values() if v.state.answers)
        return info, sorted((v.number for v in answering), key=int)

    def config(self, name: str, version: str = "") -> ServedConfig:
        """Return the configuration of a loaded model; errors as for `infer`."""
        _, instance = self._registry.resolve(name, version)
        return ServedConfig(name, instance.config, instance.info)

    def statistics(self, name: str = "", version: str = "") -> list[VersionReport]:
        """Report on the versions that answer; see `report`."""
        return report(self._registry, name, version)

    def stop(self) -> None:
        """Take no new requests; those in progress go on."""
        self._stopping = True

    # --- ensembles ---

    async def _run_steps(self, plan: EnsemblePlan, inputs: Mapping[str, Value]) -> Outcome:
        total = Execution(rows_of(plan.info, inputs), self._clock(), 0, 0)
        with ExitStack() as leases:
            found = {}
            for name, number in plan.models():
                version, instance = self._registry.resolve(name, number)
                leases.enter_context(instance.lease())
                found[name, number] = version, instance
            tensors = dict(inputs)
            for step in plan.steps:
                version, instance = found[step.model_name, step.model_version]
                given = {name: tensors[tensor] for name, tensor in step.input_map.items()}
                run = self._step_on_host if instance.platform == _CPU else self._step_on_device
                outputs, execution = await run(version, instance, given)
                tensors |= {tensor: outputs[name] for name, tensor in step.output_map.items()}
                total.queue_ns += execution.queue_ns
                total.infer_ns += execution.infer_ns
            return await self._fetch({s.name: tensors[s.name] for s in plan.info.outputs}), total

    async def _step_on_host(
        self, version: Version, instance: Instance, inputs: Mapping[str, Value]
    ) -> Outcome:
        """Run a step as a request to its model: with others, where those are gathered."""
        started = self._clock()
        tensors = cast(Tensors, inputs)  # no model on the CPU leaves its outputs anywhere else
        answer: asyncio.Future[InferResponse] = asyncio.get_running_loop().create_future()
        rows, key = rows_of(instance.info, tensors), key_of(instance.info, tensors)
        try:
            model = self._registry.admitting(version.model)
            outcome = self._executor.at_once(instance, tensors, rows)
            if outcome is not None:
                version.statistics.succeeded(outcome[1], started, self._clock(), self._now())
                return outcome
            done = partial(settle, answer)
            waiting = Waiting(done, rows, tensors, started, self._clock(), key=key)
            self._run_later(model, version, instance, waiting)
        except BaseException as error:
            version.statistics.failed(error, self._clock() - started)
            raise
        response = await settled(answer, waiting)
        ran = waiting.outcome
        assert isinstance(ran, Executed)
        queued, infer = ran.begun_ns - waiting.submitted_ns, ran.ended_ns - ran.begun_ns
        outputs = {output.name: output.data for output in response.outputs}
        return outputs, Execution(rows, waiting.submitted_ns, queued, infer)

    async def _step_on_device(
        self, version: Version, instance: Instance, inputs: Mapping[str, Value]
    ) -> Outcome:
        """Run a step by itself, and leave its outputs where the next one may want them."""
        started = self._clock()
        try:
            with self._registry.admit(version.model):
                if isinstance(instance.runner, EnsemblePlan):
                    outcome = await self._run_steps(instance.runner, inputs)
                else:
                    outcome = await self._executor.resident(instance, instance.runner, inputs)
        except BaseException as error:
            version.statistics.failed(error, self._clock() - started)
            raise
        version.statistics.succeeded(outcome[1], started, self._clock(), self._now())
        return outcome

    async def _fetch(self, outputs: Mapping[str, Value]) -> Mapping[str, Value]:
        if all(isinstance(value, np.ndarray) for value in outputs.values()):
            return outputs
        fetch = partial(_fetch_all, outputs)
        return await self._workers.host.run(fetch)


def _end_steps(answers: Answering, waiting: Waiting, steps: "asyncio.Task[Outcome]") -> None:
    if steps.cancelled():
        answers.deliver([waiting], asyncio.CancelledError())
    elif (error := steps.exception()) is not None:
        answers.deliver([waiting], error)
    else:
        answers.deliver([waiting], _as_executed(steps.result(), waiting))


def _as_executed(outcome: Outcome, waiting: Waiting) -> Executed:
    outputs, execution = outcome
    # The steps of an ensemble wait and compute in turns: as if they had waited first.
    begun = waiting.submitted_ns + execution.queue_ns
    return Executed(cast(Tensors, outputs), begun, begun + execution.infer_ns)


def _fetch_all(outputs: Mapping[str, Value]) -> dict[str, Value]:
    return {name: _on_host(value) for name, value in outputs.items()}


def _shown(specs: Sequence[TensorSpec], outputs: Mapping[str, Value]) -> tuple[InferOutput, ...]:
    return tuple(
        # A list is made in half the time of a generator.
        [InferOutput(spec.name, spec.datatype, _on_host(outputs[spec.name])) for spec in specs]
    )


def _on_host(value: Value) -> Tensor:
    return value if isinstance(value, np.ndarray) else value.numpy()
