"""The requested forms of outputs: shared memory, or classes."""

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
"""Parameter of an output: number of best classes wanted instead of scores."""

Labels: TypeAlias = Callable[[str], Sequence[bytes]]
"""Returns the class names of an output, by index; empty without labels."""


def asks_for_form(outputs: Sequence[RequestedOutput]) -> bool:
    """Tell whether an output is wanted otherwise than as it is computed."""
    for output in outputs:
        parameters = output.parameters
        if parameters and (REGION in parameters or parameters.get(CLASSES)):
            return True
    return False


class OutputForms:
    """Puts the outputs of one request into their forms."""

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
        """Raises an InvalidRequest for a form that an output cannot have.

        The parameters of the outputs, and their names, were checked before.
        """
        self._model = model
        self._call = call
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

    @property
    def are_places(self) -> bool:
        """Tell whether places in shared memory are all that they are, which do not vary."""
        return not self._classes

    @property
    def regions(self) -> list[SharedRegion]:
        """Return the regions that outputs are written to."""
        return self._places.regions

    def __call__(self, outputs: Sequence[InferOutput]) -> tuple[InferOutput, ...]:
        """Return outputs in their forms.

        Raises an InvalidRequest for one that has no room, and BudgetExhausted.
        """
        if self._classes:
            outputs = [self._classified(output) for output in outputs]
        return self._places.write(outputs)

    def _classified(self, output: InferOutput) -> InferOutput:
        count = self._classes.get(output.name)
        if count is None:
            return output
        labels = self._labels[output.name]
        found = classified(self._model, output, count, labels, batched=self._is_batched)
        size = found.data.size * ELEMENT_BYTES + octets_of(found.data)
        if size > SHORT_BYTES:
            reserve_made(self._call, size, "the classes")
        return found
