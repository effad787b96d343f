"""Infer: resolve the model, check the request, execute, answer."""

import asyncio
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial

import numpy as np

from xlaserve.core.checks import check_inputs, check_outputs
from xlaserve.core.ensemble import EnsemblePlan
from xlaserve.core.inference import InferOutput, InferRequest, InferResponse
from xlaserve.core.registry import Instance, Registry
from xlaserve.core.workers import Workers
from xlaserve.errors import ShuttingDown
from xlaserve.models.config import EnsembleStep
from xlaserve.models.loaded import LoadedModel, ModelInfo, Value
from xlaserve.tensors import Tensor


class Engine:
    """Answers inference requests from the models of the registry."""

    def __init__(
        self, registry: Registry, workers: Workers, *, inline_execution_seconds: float
    ) -> None:
        self._registry = registry
        self._workers = workers
        self._inline_seconds = inline_execution_seconds
        self._stopping = False

    async def infer(self, request: InferRequest) -> InferResponse:
        """Answer one request (V2 protocol, Inference).

        Raises ModelNotFound, ModelNotReady, an InvalidRequest that names the tensor, Overloaded,
        OutOfMemory, or ShuttingDown.
        """
        if self._stopping:
            raise ShuttingDown
        name = request.model_name
        version, instance = self._registry.resolve(name, request.model_version)
        check_inputs(name, instance.info, request)
        chosen = check_outputs(name, instance.info, request.outputs)
        inputs: dict[str, Value] = {tensor.name: tensor.data for tensor in request.inputs}
        with self._registry.admit(name), instance.lease():
            outputs = await self._run(instance, inputs)
        return InferResponse(
            model_name=name,
            model_version=version.number,
            id=request.id,
            outputs=tuple(
                InferOutput(spec.name, spec.datatype, _on_host(outputs[spec.name]))
                for spec in chosen
            ),
        )

    def require(self, name: str, version: str = "") -> None:
        """Raise what `infer` would raise for a model that cannot answer.

        For a transport to call before it reads tensors: that there is no such model matters more
        than what is wrong with them.
        """
        self._registry.resolve(name, version)

    def describe(self, name: str, version: str = "") -> tuple[ModelInfo, list[str]]:
        """Return what a model is and the versions that answer; errors as for `infer`."""
        _, instance = self._registry.resolve(name, version)
        model = self._registry.find(name)
        assert model is not None
        answering = (v for v in model.versions.values() if v.state.answers)
        return instance.info, sorted((v.number for v in answering), key=int)

    def stop(self) -> None:
        """Take no new requests; those in progress go on."""
        self._stopping = True

    async def _run(
        self, instance: Instance, inputs: Mapping[str, Value], *, resident: bool = False
    ) -> Mapping[str, Value]:
        if isinstance(instance.runner, EnsemblePlan):
            return await self._run_steps(instance.runner, inputs)
        return await self._execute(instance, instance.runner, inputs, resident=resident)

    async def _execute(
        self,
        instance: Instance,
        model: LoadedModel,
        inputs: Mapping[str, Value],
        *,
        resident: bool,
    ) -> Mapping[str, Value]:
        if model.expected_seconds(_rows(model.info, inputs)) <= self._inline_seconds:
            return model.execute(inputs, resident=resident)
        # The thread is a user of its own: it may outlive a request that was cancelled.
        instance.acquire()
        running = self._workers.execute(partial(model.execute, inputs, resident=resident))
        loop = asyncio.get_running_loop()
        running.add_done_callback(lambda _: loop.call_soon_threadsafe(instance.release))
        return await asyncio.wrap_future(running)

    async def _run_steps(
        self, plan: EnsemblePlan, inputs: Mapping[str, Value]
    ) -> Mapping[str, Value]:
        with ExitStack() as leases:
            instances = {}
            for name, number in plan.models():
                _, instance = self._registry.resolve(name, number)
                leases.enter_context(self._registry.admit(name))
                leases.enter_context(instance.lease())
                instances[name, number] = instance
            tensors = dict(inputs)
            for step in plan.steps:
                instance = instances[step.model_name, step.model_version]
                tensors |= await self._run_step(step, instance, tensors)
            return await self._fetch({s.name: tensors[s.name] for s in plan.info.outputs})

    async def _run_step(
        self, step: EnsembleStep, instance: Instance, tensors: Mapping[str, Value]
    ) -> dict[str, Value]:
        inputs = {name: tensors[tensor] for name, tensor in step.input_map.items()}
        outputs = await self._run(instance, inputs, resident=True)
        return {tensor: outputs[name] for name, tensor in step.output_map.items()}

    async def _fetch(self, outputs: Mapping[str, Value]) -> Mapping[str, Value]:
        if all(isinstance(value, np.ndarray) for value in outputs.values()):
            return outputs
        fetch = partial(_fetch_all, outputs)
        return await asyncio.wrap_future(self._workers.execute(fetch))


def _rows(info: ModelInfo, inputs: Mapping[str, Value]) -> int:
    if not info.max_batch_size or not inputs:
        return 1
    first = next(iter(inputs.values()))
    return int(first.shape[0]) if isinstance(first, np.ndarray) else first.rows


def _fetch_all(outputs: Mapping[str, Value]) -> dict[str, Value]:
    return {name: _on_host(value) for name, value in outputs.items()}


def _on_host(value: Value) -> Tensor:
    return value if isinstance(value, np.ndarray) else value.numpy()
