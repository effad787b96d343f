"""Exported models that are stepped: one answer for each step, the state between on the device.

The artifact is one function of the inputs of the request, whether it is the first step, and the
state; it returns the outputs, whether it is done, and the next state.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from xlaserve.errors import InvalidModel, TooManyAnswers
from xlaserve.models.config import ModelConfig
from xlaserve.models.loaded import Answer, LoadedModel, ModelInfo, Stage, Value
from xlaserve.models.steps import DONE, FIRST, Steps
from xlaserve.tensors import Parameter, Tensor

MAX_STEPS = "max_steps"
"""The parameter of a configuration that says how many answers a request may have."""

_DIGITS = 18


def max_steps(steps: Steps, config: ModelConfig) -> int:
    """Return how many answers a request may have: a configuration may say less than the manifest.

    Raises InvalidModel.
    """
    written = config.parameters.get(MAX_STEPS, str(steps.max_steps)).strip()
    most = int(written) if written.isdecimal() and len(written) <= _DIGITS else 0
    if not 1 <= most <= steps.max_steps:
        raise InvalidModel(
            f"parameter '{MAX_STEPS}': expected 1 to {steps.max_steps}, which is what the model "
            f"was exported with, got '{written[:64]}'"
        )
    return most


class SteppedModel:
    """A stepped model in memory: it gives one answer for each step, until it is done."""

    batch_limit = 0
    """Requests are not put together."""
    on_demand = None
    dispatching = None
    """Its answers are asked for one by one, in threads."""

    def __init__(self, name: str, model: LoadedModel, steps: Steps, max_steps: int) -> None:
        """`model` executes a step: it takes and gives what is behind the tensors of clients too."""
        self._name = name
        self._model = model
        self._max_steps = max_steps
        self._state = steps.state_names
        self._inputs = steps.known(model.info.inputs)
        self._outputs = steps.known(model.info.outputs)
        # Zeros where there is no state yet: the artifact does not look at them.
        specs = {spec.name: spec for spec in model.info.inputs}
        self._nothing: Mapping[str, Value] = {
            name: np.zeros(specs[name].shape, specs[name].datatype.dtype) for name in self._state
        }
        self._info = model.info, self._known(model.info)

    @property
    def info(self) -> ModelInfo:
        """Describe the model, as its clients know it."""
        of_step, known = self._info
        if of_step is not self._model.info:
            of_step = self._model.info
            known = self._known(of_step)
            self._info = of_step, known
        return known

    @property
    def replicas(self) -> int:
        """Return how many copies can generate side by side."""
        return self._model.replicas

    def generate(
        self, inputs: Mapping[str, Value], parameters: Mapping[str, Parameter], *, replica: int = 0
    ) -> Iterator[Answer]:
        """Return the outputs of each step; raises TooManyAnswers where it is not done in time."""
        state, is_first = self._nothing, True
        for _ in range(self._max_steps):
            tensors = {**inputs, FIRST: np.array(is_first), **state}
            found = self._model.execute(tensors, resident=True, replica=replica)
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
        """Return the outputs of the first step; for who has no use for more."""
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
        """Return what the warm-up measured for a step."""
        return self._model.expected_seconds(rows)

    def padded_rows(self, rows: int) -> int:
        """Return the rows as they are."""
        return rows

    @property
    def next_bucket_bytes(self) -> Mapping[str, int]:
        """Return what the next step of `compile_rest` may add."""
        return self._model.next_bucket_bytes

    def compile_rest(
        self,
        check_cancelled: Callable[[], None] = lambda: None,
        on_stage: Callable[[Stage], None] = lambda stage: None,
    ) -> None:
        """Compile what the load left out."""
        self._model.compile_rest(check_cancelled, on_stage)

    def stop(self) -> None:
        """Compile nothing more."""
        self._model.stop()

    def close(self) -> None:
        """Drop every buffer and executable."""
        self._model.close()


def _fetched(value: Value) -> Tensor:
    return value if isinstance(value, np.ndarray) else value.numpy()
