"""Output forms that a request may ask for: shared memory, or classes."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from xlaserve.errors import InvalidTensor
from xlaserve.runtime.loaded import ModelInfo
from xlaserve.serving.call import Call
from xlaserve.serving.inference import InferOutput, RequestedOutput
from xlaserve.serving.inputs.classification import check_classes, classified
from xlaserve.serving.inputs.shared_memory import Regions, SharedRegion
from xlaserve.serving.inputs.shared_tensors import REGION, OutputPlaces
from xlaserve.serving.made_arrays import ELEMENT_BYTES, SHORT_BYTES, octets_of, reserve_made

CLASSES = "classification"
"""Output parameter: return this many best classes instead of scores."""

Labels: TypeAlias = Callable[[str], Sequence[bytes]]
"""Returns the class labels of an output, by index; empty if it has none."""


def asks_for_form(outputs: Sequence[RequestedOutput]) -> bool:
    """Tell whether any output must be converted."""
    for output in outputs:
        parameters = output.parameters
        if parameters and (REGION in parameters or parameters.get(CLASSES)):
            return True
    return False


class OutputForms:
    """Converts the outputs of one request to the requested forms."""

    def __init__(
        self,
        model: str,
        info: ModelInfo,
        outputs: Sequence[RequestedOutput],
        labels: Labels,
        *,
        regions: Regions,
        call: Call,
    ) -> None:
        """Raises an InvalidRequest if an output cannot have the requested form.

        Names and parameters of the outputs must have been validated.
        """
        self._model = model
        self._is_batched = bool(info.max_batch_size)
        self._classes: dict[str, int] = {}
        self._labels: dict[str, Sequence[bytes]] = {}
        specs = {spec.name: spec for spec in info.outputs}
        for output in outputs:
            count = int(output.parameters.get(CLASSES, 0))
            if not count:
                continue
            if REGION in output.parameters:
                expected = f"{CLASSES} or {REGION}, not both"
                raise InvalidTensor(model, "output", output.name, expected, "both")
            check_classes(model, specs[output.name])
            self._classes[output.name] = count
            self._labels[output.name] = labels(output.name)
        self._places = OutputPlaces(model, outputs, regions, call)
        self._charged_bytes = 0
        """Charged for classes until the call ends: the most of any of its answers."""

    @property
    def are_places(self) -> bool:
        """Tell whether outputs are only placed in shared memory, the same way for every request."""
        return not self._classes

    @property
    def regions(self) -> list[SharedRegion]:
        """Return the shared memory regions of the outputs."""
        return self._places.regions

    def __call__(self, call: Call, outputs: Sequence[InferOutput]) -> tuple[InferOutput, ...]:
        """Convert a call's outputs.

        The call is an argument, not an attribute, because it refers to its forms: in a reference
        cycle, its memory and its regions would stay until the garbage collector runs.

        Raises an InvalidRequest if one exceeds its shared memory, and BudgetExhausted.
        """
        if self._classes:
            outputs = [self._classified(call, output) for output in outputs]
        return self._places.write(outputs)

    def _classified(self, call: Call, output: InferOutput) -> InferOutput:
        count = self._classes.get(output.name)
        if count is None:
            return output
        labels = self._labels[output.name]
        found = classified(self._model, output, count, labels, batched=self._is_batched)
        size = found.data.size * ELEMENT_BYTES + octets_of(found.data)
        if size > max(SHORT_BYTES, self._charged_bytes):
            reserve_made(call, size - self._charged_bytes, "the classes")
            self._charged_bytes = size
        return found
