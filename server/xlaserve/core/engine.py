"""Infer: resolve the model, check the request, execute, answer."""

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import TypeAlias

import numpy as np

from xlaserve.core.checks import check_inputs, check_outputs
from xlaserve.core.ensemble import EnsemblePlan
from xlaserve.core.execution import (
    DEFAULT_MAX_QUEUED,
    ExecutionPolicy,
    Executor,
    rows_of,
)
from xlaserve.core.image_files import DEFAULT_LIMITS, ImageLimits
from xlaserve.core.images import EncodedImages, find_images
from xlaserve.core.inference import InferOutput, InferRequest, InferResponse
from xlaserve.core.monitor import VersionReport, report
from xlaserve.core.registry import Instance, Registry, Version
from xlaserve.core.statistics import Execution
from xlaserve.core.workers import Workers
from xlaserve.errors import ShuttingDown
from xlaserve.models.config import EnsembleStep
from xlaserve.models.config_served import ServedConfig
from xlaserve.models.loaded import ModelInfo, Value
from xlaserve.tensors import Tensor, TensorSpec

_Executed: TypeAlias = tuple[Mapping[str, Value], Execution]
"""The outputs of a model, and what they took."""


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
        clock: Callable[[], int] = time.perf_counter_ns,
        now: Callable[[], int] = time.time_ns,
        image_limits: ImageLimits = DEFAULT_LIMITS,
    ) -> None:
        self._registry = registry
        self._workers = workers
        self._executor = Executor(
            workers,
            ExecutionPolicy(inline_execution_seconds, max_queued, batching=batching),
            clock,
        )
        self._clock = clock
        self._now = now
        self._image_limits = image_limits
        self._stopping = False

    async def infer(self, request: InferRequest) -> InferResponse:
        """Answer one request (V2 protocol, Inference).

        Raises ModelNotFound, ModelNotReady, an InvalidRequest that names the tensor, Overloaded,
        OutOfMemory, or ShuttingDown.
        """
        if self._stopping:
            raise ShuttingDown
        name = request.model_name
        started = self._clock()
        version, instance = self._registry.resolve(name, request.model_version)
        try:
            inputs, chosen = instance.quick.inputs(request), instance.info.outputs
            images = None
            if inputs is None:
                inputs, chosen, images = self._check(instance, request)
            admitted = self._registry.enter(name)
            instance.acquire()
            try:
                if images is not None:
                    inputs |= await asyncio.wrap_future(self._workers.execute(images.decode))
                done = self._executor.at_once(instance, inputs)
                outputs, execution = done or await self._run(instance, inputs)
            finally:
                instance.release()
                admitted.requests -= 1
            answers = [
                InferOutput(spec.name, spec.datatype, _on_host(outputs[spec.name]))
                for spec in chosen
            ]
        except BaseException as error:
            version.statistics.failed(error, self._clock() - started)
            raise
        version.statistics.succeeded(execution, started, self._clock(), self._now())
        return InferResponse(name, version.number, request.id, tuple(answers))

    def _check(
        self, instance: Instance, request: InferRequest
    ) -> tuple[dict[str, Value], tuple[TensorSpec, ...], EncodedImages | None]:
        name, info = request.model_name, instance.info
        images = find_images(request, info, instance.config, self._image_limits)
        check_inputs(name, info, images.promised() if images else request)
        chosen = check_outputs(name, info, request.outputs)
        return {tensor.name: tensor.data for tensor in request.inputs}, chosen, images

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

    async def _run(
        self, instance: Instance, inputs: Mapping[str, Value], *, resident: bool = False
    ) -> _Executed:
        if isinstance(instance.runner, EnsemblePlan):
            return await self._run_steps(instance.runner, inputs)
        return await self._executor.execute(instance, instance.runner, inputs, resident=resident)

    async def _run_steps(self, plan: EnsemblePlan, inputs: Mapping[str, Value]) -> _Executed:
        total = Execution(rows_of(plan.info, inputs), self._clock(), 0, 0)
        with ExitStack() as leases:
            found = {}
            for name, number in plan.models():
                version, instance = self._registry.resolve(name, number)
                leases.enter_context(self._registry.admit(name))
                leases.enter_context(instance.lease())
                found[name, number] = version, instance
            tensors = dict(inputs)
            for step in plan.steps:
                version, instance = found[step.model_name, step.model_version]
                outputs, execution = await self._run_step(step, version, instance, tensors)
                tensors |= outputs
                total.queue_ns += execution.queue_ns
                total.infer_ns += execution.infer_ns
            return await self._fetch({s.name: tensors[s.name] for s in plan.info.outputs}), total

    async def _run_step(
        self,
        step: EnsembleStep,
        version: Version,
        instance: Instance,
        tensors: Mapping[str, Value],
    ) -> _Executed:
        inputs = {name: tensors[tensor] for name, tensor in step.input_map.items()}
        started = self._clock()
        try:
            outputs, execution = await self._run(instance, inputs, resident=True)
        except BaseException as error:
            version.statistics.failed(error, self._clock() - started)
            raise
        version.statistics.succeeded(execution, started, self._clock(), self._now())
        return {tensor: outputs[name] for name, tensor in step.output_map.items()}, execution

    async def _fetch(self, outputs: Mapping[str, Value]) -> Mapping[str, Value]:
        if all(isinstance(value, np.ndarray) for value in outputs.values()):
            return outputs
        fetch = partial(_fetch_all, outputs)
        return await asyncio.wrap_future(self._workers.execute(fetch))


def _fetch_all(outputs: Mapping[str, Value]) -> dict[str, Value]:
    return {name: _on_host(value) for name, value in outputs.items()}


def _on_host(value: Value) -> Tensor:
    return value if isinstance(value, np.ndarray) else value.numpy()
