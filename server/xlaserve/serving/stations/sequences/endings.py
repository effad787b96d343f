"""Notification of models about expired sequences."""

from functools import partial

import numpy as np
import structlog

from xlaserve.model_config.sequence_batching import ControlKind
from xlaserve.runtime.handling import UnsentRequest
from xlaserve.runtime.sequential import SequenceId, SequentialModel, Step
from xlaserve.serving.stations.outbox import Outbox
from xlaserve.serving.stations.sequences.table import Seat
from xlaserve.serving.stations.station import Served
from xlaserve.tensors import BYTES, Tensor, TensorSpec

_WANTED = frozenset({ControlKind.END, ControlKind.CORRID})
"""Controls of models that want to know which sequence has ended."""


class Endings:
    """Notifies a Python model of expired sequences by sending it a request."""

    def __init__(self, instance: Served, model: SequentialModel, outbox: Outbox) -> None:
        self._instance = instance
        self._model = model
        self._outbox = outbox
        controls = {control.kind for control in model.batching.controls}
        self._wants = model.handling is not None and controls >= _WANTED

    def tell(self, sequence: SequenceId, seat: Seat) -> None:
        """Send a request with END true and READY false, if the model wants it."""
        model, info = self._model, self._model.info
        if not self._wants or model.handling is None:
            return
        step = Step(seat.slot, is_end=True, id=sequence, is_expired=True)
        inputs = {spec.name: _zeros(spec) for spec in info.inputs if spec.name not in info.optional}
        request = UnsentRequest(
            {**inputs, **model.controls([step])},
            [spec.name for spec in info.outputs],
            parameters={"sequence_id": sequence, "sequence_end": True},
            failed=partial(_log_failure, self._instance.model, sequence),
        )
        self._instance.acquire()
        freed = partial(self._outbox.post, self._instance.release)
        model.handling.handle(seat.replica, [request], freed)


def _log_failure(model: str, sequence: SequenceId, error: BaseException) -> None:
    """Log a failed notification."""
    structlog.get_logger("sequences").warning(
        "sequence end notification failed",
        model=model,
        sequence=sequence,
        error=str(error)[:200],
    )


def _zeros(spec: TensorSpec) -> Tensor:
    """Return one row of zeros for an input, with size 1 for dynamic dimensions."""
    shape = [1 if size == -1 else size for size in spec.shape]
    if spec.datatype is BYTES:
        return np.full(shape, b"", object)
    return np.zeros(shape, spec.datatype.dtype)
