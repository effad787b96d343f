"""Models that give back what they get: no file, no JAX, every datatype."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from xlaserve.errors import InvalidModel
from xlaserve.models import optional_inputs
from xlaserve.models.loaded import LoadContext, ModelInfo, Value
from xlaserve.models.signature import from_config
from xlaserve.models.uncompiled import UncompiledModel
from xlaserve.tensors import describe

PLATFORM = "identity"


class IdentityModel(UncompiledModel):
    """Output i is input i. For testing a wire, and for measuring a server without a model."""

    replicas = 1
    batch_limit = 0
    """There is no time per row to lower."""

    def __init__(self, info: ModelInfo) -> None:
        self.info = info
        self._pairs = tuple(
            (output.name, source.name)
            for output, source in zip(info.outputs, info.inputs, strict=True)
        )

    def execute(
        self, inputs: Mapping[str, Value], *, resident: bool = False, replica: int = 0
    ) -> Mapping[str, Value]:
        """Return the inputs under the names of the outputs."""
        return {
            output: inputs[source] if resident else _on_host(inputs[source])
            for output, source in self._pairs
        }

    def expected_seconds(self, rows: int) -> float:
        """Return 0: there is nothing to compute."""
        return 0.0

    def close(self) -> None:
        """Do nothing: there is nothing to drop."""


def load(directory: Path, context: LoadContext) -> IdentityModel:
    """Make the model that a configuration with `backend: "identity"` describes."""
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
                f"output '{output.name}': expected {source} as its input '{source.name}' has it, "
                f"got {describe(output.datatype, output.shape)}"
            )
    optional = optional_inputs.of_computation(context.config)
    return IdentityModel(
        ModelInfo(PLATFORM, inputs, outputs, signature.max_batch_size, optional=optional)
    )


def _on_host(value: Value) -> Value:
    return value if isinstance(value, np.ndarray) else value.numpy()
