"""Identity models, which return their inputs: no files, no JAX, all datatypes."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from xlaserve.artifact.signature import from_config
from xlaserve.errors import InvalidModel
from xlaserve.model_config.config import ModelConfig
from xlaserve.model_config.fields import EXECUTE_DELAY
from xlaserve.runtime.devices import placement
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.loaded import ModelInfo, Value
from xlaserve.runtime.uncompiled import UncompiledModel
from xlaserve.runtime.wrappers import optional_inputs
from xlaserve.tensors import describe

PLATFORM = "identity"

MOST_DELAY_MS = 600_000
"""Maximum of the configured execution time, in milliseconds."""


class IdentityModel(UncompiledModel):
    """Returns its inputs as outputs, to test a client or to measure the server without a model.

    `execute_delay_ms` makes each execution take that long, as with a real model.
    """

    def __init__(
        self,
        info: ModelInfo,
        replicas: int = 1,
        delay_seconds: float = 0.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.info = info
        self.replicas = replicas
        self.batch_limit = info.max_batch_size if delay_seconds else 0
        """The batch limit; 1 without a delay, where batching saves nothing."""
        self._delay = delay_seconds
        self._sleep = sleep
        self._pairs = tuple(
            (output.name, source.name)
            for output, source in zip(info.outputs, info.inputs, strict=True)
        )

    def execute(
        self, inputs: Mapping[str, Value], *, resident: bool = False, replica: int = 0
    ) -> Mapping[str, Value]:
        """Return the inputs as outputs; absent optional inputs have no output."""
        if self._delay:
            self._sleep(self._delay)
        return {
            output: inputs[source] if resident else _on_host(inputs[source])
            for output, source in self._pairs
            if source in inputs
        }

    def expected_seconds(self, rows: int) -> float:
        """Return the configured delay."""
        return self._delay

    def close(self) -> None:
        """Do nothing: the model holds no resources."""


def load(directory: Path, context: LoadContext) -> IdentityModel:
    """Load a model whose configuration has `backend: "identity"`."""
    signature = from_config(context.config)
    inputs, outputs = signature.inputs, signature.outputs
    if len(inputs) != len(outputs):
        raise InvalidModel(
            f"an identity model has as many outputs as inputs, got {len(inputs)} inputs and "
            f"{len(outputs)} outputs"
        )
    for source, output in zip(inputs, outputs, strict=True):
        if (source.datatype, source.shape) != (output.datatype, output.shape):
            raise InvalidModel(
                f"output '{output.name}': expected {source} like its input '{source.name}', got"
                f" {describe(output.datatype, output.shape)}"
            )
    optional = optional_inputs.with_defaults(context.config)
    pairs = zip(outputs, inputs, strict=True)
    info = ModelInfo(
        PLATFORM,
        inputs,
        outputs,
        signature.max_batch_size,
        optional=optional,
        echoes={output.name: source.name for output, source in pairs} if optional else {},
    )
    groups = placement.read(context.config, context.device).groups
    replicas = sum(group.count * len(group.devices or (0,)) for group in groups)
    return IdentityModel(info, replicas, _delay_seconds(context.config))


def _delay_seconds(config: ModelConfig) -> float:
    text = config.parameters.get(EXECUTE_DELAY, "0").strip()
    if not text.isdecimal() or len(text) > len(str(MOST_DELAY_MS)) or int(text) > MOST_DELAY_MS:
        raise InvalidModel(
            f"parameter '{EXECUTE_DELAY}': expected 0 to {MOST_DELAY_MS} milliseconds, got "
            f"'{text[:64]}'"
        )
    return int(text) / 1000


def _on_host(value: Value) -> Value:
    return value if isinstance(value, np.ndarray) else value.numpy()
