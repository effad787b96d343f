"""Ends of sequences that no request tells their model: they have expired."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import structlog

from xlaserve.core.serving.sequence_table import Seat
from xlaserve.core.serving.stations.outbox import Outbox
from xlaserve.core.serving.stations.station import Served
from xlaserve.models.handling import NO_TENSOR_PARAMETERS, AnswerParameters
from xlaserve.models.loaded import Value
from xlaserve.models.sequence_batching import ControlKind
from xlaserve.models.sequential import SequenceId, SequentialModel, Step
from xlaserve.tensors import BYTES, Parameter, Tensor, TensorSpec

_WANTED = frozenset({ControlKind.END, ControlKind.CORRID})
"""The controls of a model that wants to know which sequence has ended."""


class Endings:
    """Tells the code of a model of sequences that have expired, by a request of the server."""

    def __init__(self, instance: Served, model: SequentialModel, outbox: Outbox) -> None:
        self._instance = instance
        self._model = model
        self._outbox = outbox
        controls = {control.kind for control in model.batching.controls}
        self._wants = model.handling is not None and controls >= _WANTED

    def tell(self, sequence: SequenceId, seat: Seat) -> None:
        """Hand over a request with END, whose READY is false; does nothing for other models."""
        model, info = self._model, self._model.info
        if not self._wants or model.handling is None:
            return
        step = Step(seat.slot, is_end=True, id=sequence, is_expired=True)
        inputs = {spec.name: _zeros(spec) for spec in info.inputs if spec.name not in info.optional}
        request = Ending(
            self._instance.model,
            {**inputs, **model.controls([step])},
            [spec.name for spec in info.outputs],
            sequence,
        )
        self._instance.acquire()
        freed = partial(self._outbox.post, self._instance.release)
        model.handling.handle(seat.replica, [request], freed)


class Ending:
    """A request that nobody sent, and whose answer is for nobody (a ModelRequest)."""

    id = ""
    rows = 1
    is_cancelled = False
    is_writable = True
    tensor_parameters = NO_TENSOR_PARAMETERS

    def __init__(
        self,
        model: str,
        inputs: Mapping[str, Value],
        outputs: Sequence[str],
        sequence: SequenceId,
    ) -> None:
        self._model = model
        self._sequence = sequence
        self.inputs = inputs
        self.outputs = outputs
        self.parameters: Mapping[str, Parameter] = {"sequence_id": sequence, "sequence_end": True}

    def begin(self) -> None:
        """Do nothing: nobody asks for the time."""

    def answer(
        self,
        outputs: Mapping[str, Tensor],
        *,
        last: bool = True,
        parameters: AnswerParameters | None = None,
    ) -> None:
        """Drop an answer."""

    def again(self) -> None:
        """Do nothing: the sequence has ended."""

    def end(self) -> None:
        """Do nothing: nobody waits."""

    def fail(self, error: BaseException) -> None:
        """Log that the model could not be told."""
        structlog.get_logger("sequences").warning(
            "a model failed as it was told of a sequence that expired",
            model=self._model,
            sequence=self._sequence,
            error=str(error)[:200],
        )

    def when_writable(self, resume: Callable[[], None]) -> None:
        """Call at once."""
        resume()


def _zeros(spec: TensorSpec) -> Tensor:
    """Return one row of an input, with one element in each open dimension."""
    shape = [1 if size == -1 else size for size in spec.shape]
    if spec.datatype is BYTES:
        return np.full(shape, b"", object)
    return np.zeros(shape, spec.datatype.dtype)
