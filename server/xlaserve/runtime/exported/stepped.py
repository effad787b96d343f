"""Stepped models: one answer per step, with the state kept on the device.

The artifact is a function of the request's inputs, a flag for the first step, and the state. It
returns the outputs, whether the request is complete, and the next state.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from xlaserve.artifact.steps import DONE, FIRST, Steps
from xlaserve.errors import InvalidModel, TooManyAnswers
from xlaserve.model_config.config import ModelConfig
from xlaserve.runtime.loaded import Answer, LoadedModel, ModelInfo, Value
from xlaserve.runtime.wrappers.around import AroundModel
from xlaserve.tensors import Parameter, Tensor

MAX_STEPS = "max_steps"
"""Configuration parameter: maximum number of answers per request."""

_DIGITS = 18


def max_steps(steps: Steps, config: ModelConfig) -> int:
    """Return the maximum number of answers; a configuration may lower the manifest's limit.

    Raises InvalidModel.
    """
    written = config.parameters.get(MAX_STEPS, str(steps.max_steps)).strip()
    most = int(written) if written.isdecimal() and len(written) <= _DIGITS else 0
    if not 1 <= most <= steps.max_steps:
        raise InvalidModel(
            f"parameter '{MAX_STEPS}': expected 1 to {steps.max_steps} (the model's exported"
            f" maximum), got '{written[:64]}'"
        )
    return most


class AroundSteps(AroundModel):
    """The client-facing side of a stepped model, wrapped around the model of one step.

    The wrapped model has further tensors, for the state, which clients do not see.
    """

    batch_limit = 0
    """Requests to a stepped model are not batched by the batcher."""
    on_demand = None
    dispatching = None
    """Answers are computed on worker threads, not dispatched."""

    def __init__(self, name: str, model: LoadedModel, steps: Steps, max_steps: int) -> None:
        self._name = name
        self._inner = model
        self._max_steps = max_steps
        self._inputs = steps.known(model.info.inputs)
        self._outputs = steps.known(model.info.outputs)
        self._info: tuple[ModelInfo, ModelInfo] | None = None
        """The step model's description, and the client-facing description derived from it."""

    @property
    def info(self) -> ModelInfo:
        """Return the description that clients see."""
        of_step = self._inner.info
        if self._info is None or self._info[0] is not of_step:
            self._info = of_step, self._known(of_step)
        return self._info[1]

    def _known(self, info: ModelInfo) -> ModelInfo:
        """Derive the client-facing description from that of the step."""
        raise NotImplementedError

    @property
    def replicas(self) -> int:
        """Return the number of replicas."""
        return self._inner.replicas

    def padded_rows(self, rows: int) -> int:
        """Return the rows unchanged."""
        return rows


class SteppedModel(AroundSteps):
    """A loaded stepped model: generates one answer per step until it is complete."""

    def __init__(self, name: str, model: LoadedModel, steps: Steps, max_steps: int) -> None:
        super().__init__(name, model, steps, max_steps)
        self._state = steps.state_names
        # Zeros as the initial state: the artifact ignores the state in the first step.
        specs = {spec.name: spec for spec in model.info.inputs}
        self._nothing: Mapping[str, Value] = {
            name: np.zeros(specs[name].shape, specs[name].datatype.dtype) for name in self._state
        }

    def generate(
        self, inputs: Mapping[str, Value], parameters: Mapping[str, Parameter], *, replica: int = 0
    ) -> Iterator[Answer]:
        """Yield the outputs of each step; raises TooManyAnswers beyond the limit."""
        state, is_first = self._nothing, True
        for _ in range(self._max_steps):
            tensors = {**inputs, FIRST: np.array(is_first), **state}
            found = self._inner.execute(tensors, resident=True, replica=replica)
            is_last = bool(_fetched(found[DONE]))
            outputs = {spec.name: _fetched(found[spec.name]) for spec in self._outputs}
            state, is_first = {name: found[name] for name in self._state}, False
            # Free this step's device memory before the next step; only the state remains.
            del tensors, found
            yield Answer(outputs, is_last)
            if is_last:
                return
        raise TooManyAnswers(self._name, self._max_steps, MAX_STEPS)

    def execute(
        self, inputs: Mapping[str, Value], *, resident: bool = False, replica: int = 0
    ) -> Mapping[str, Value]:
        """Return the outputs of the first step."""
        answer = next(self.generate(inputs, {}, replica=replica))
        return answer.outputs

    def _known(self, info: ModelInfo) -> ModelInfo:
        return replace(
            info,
            inputs=self._inputs,
            outputs=self._outputs,
            is_decoupled=True,
            state_bytes=sum(_fetched(zeros).nbytes for zeros in self._nothing.values()),
        )

    def expected_seconds(self, rows: int) -> float:
        """Return the warm-up's measurement of a step."""
        return self._inner.expected_seconds(rows)


def _fetched(value: Value) -> Tensor:
    return value if isinstance(value, np.ndarray) else value.numpy()
