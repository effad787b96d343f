"""Inference API for Python code inside the server, such as custom services."""

from collections.abc import Mapping, Sequence

from xlaserve.errors import InvalidTensor, ModelNotFound, ModelNotReady
from xlaserve.runtime.loaded import ModelInfo
from xlaserve.serving.engine import Engine
from xlaserve.serving.inference import InferInput, InferRequest, RequestedOutput
from xlaserve.tensors import DATATYPES, Tensor, datatype_of


class Models:
    """Inference by model name, with the same checks, limits and errors as for remote clients.

    Let its exceptions propagate: the server converts them to the right status.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, Tensor],
        *,
        version: str = "",
        outputs: Sequence[str] = (),
    ) -> dict[str, Tensor]:
        """Run a model on arrays by input name; return arrays by output name.

        `outputs` selects outputs. Raises ModelNotFound, ModelNotReady, an InvalidRequest that names
        the tensor, Overloaded or OutOfMemory.
        """
        request = InferRequest(
            model,
            version,
            inputs=tuple(input_of(model, name, array) for name, array in inputs.items()),
            outputs=tuple(map(RequestedOutput, outputs)),
        )
        response = await self._engine.infer(request)
        return {output.name: output.data for output in response.outputs}

    def describe(self, model: str, version: str = "") -> ModelInfo:
        """Return the description of a model; raises ModelNotFound or ModelNotReady."""
        return self._engine.info(model, version)

    def ready(self, model: str, version: str = "") -> bool:
        """Tell whether an inference would be served now."""
        try:
            self._engine.info(model, version)
        except (ModelNotFound, ModelNotReady):
            return False
        return True


def input_of(model: str, name: str, array: Tensor) -> InferInput:
    """Convert an array to an input of a request; raises InvalidTensor for an unsupported dtype."""
    datatype = datatype_of(array.dtype)
    if datatype is None:
        known = f"a dtype of {', '.join(DATATYPES)}"
        raise InvalidTensor(model, "input", name, known, str(array.dtype))
    return InferInput(name, datatype, array)
