"""Exported stepped models: an answer per step, the state on the device.

The artifact is one function of the inputs of the request, whether it is the first step, and the
state; it returns the outputs, whether it is done, and the next state.
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
"""Configuration parameter: maximum of answers per request."""

_DIGITS = 18


def max_steps(steps: Steps, config: ModelConfig) -> int:
    """Return the limit of answers per request; a configuration may lower the manifest's.

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
    """A stepped model as clients see it, wrapped around the model of one step.

    That one takes and gives what is behind the tensors of clients too.
    """

    batch_limit = 0
    """Not batched like requests of one answer."""
    on_demand = None
    dispatching = None
    """Its answers are asked for in threads."""

    def __init__(self, name: str, model: LoadedModel, steps: Steps, max_steps: int) -> None:
        self._name = name
        self._inner = model
        self._max_steps = max_steps
        self._inputs = steps.known(model.info.inputs)
        self._outputs = steps.known(model.info.outputs)
        self._info: tuple[ModelInfo, ModelInfo] | None = None
        """Description of the step, with additions."""

    @property
    def info(self) -> ModelInfo:
        """Describe the model, as its clients know it."""
        of_step = self._inner.info
        if self._info is None or self._info[0] is not of_step:
            self._info = of_step, self._known(of_step)
        return self._info[1]

    def _known(self, info: ModelInfo) -> ModelInfo:
        """Return the description for clients."""
        raise NotImplementedError

    @property
    def replicas(self) -> int:
        """Return the number of replicas."""
        return self._inner.replicas

    def padded_rows(self, rows: int) -> int:
        """Return the rows as they are."""
        return rows


class SteppedModel(AroundSteps):
    """A stepped model in memory: it gives one answer for each step, until it is done."""

    def __init__(self, name: str, model: LoadedModel, steps: Steps, max_steps: int) -> None:
        super().__init__(name, model, steps, max_steps)
        self._state = steps.state_names
        # Zeros where there is no state yet: the artifact does not look at them.
        specs = {spec.name: spec for spec in model.info.inputs}
        self._nothing: Mapping[str, Value] = {
            name: np.zeros(specs[name].shape, specs[name].datatype.dtype) for name in self._state
        }

    def generate(
        self, inputs: Mapping[str, Value], parameters: Mapping[str, Parameter], *, replica: int = 0
    ) -> Iterator[Answer]:
        """Return the outputs of each step; raises TooManyAnswers beyond the limit."""
        state, is_first = self._nothing, True
        for _ in range(self._max_steps):
            tensors = {**inputs, FIRST: np.array(is_first), **state}
            found = self._inner.execute(tensors, resident=True, replica=replica)
            is_last = bool(_fetched(found[DONE]))
            outputs = {spec.name: _fetched(found[spec.name]) for spec in self._outputs}
            state, is_first = {name: found[name] for name in self._state}, False
            # Nothing of this step may stay on the device beside the state of the next.
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
