"""A request by the server itself, with one answer that a thread waits for."""

import threading
from collections.abc import Mapping

from xlaserve.errors.code import ModelFailed
from xlaserve.runtime.handling import UnsentRequest
from xlaserve.runtime.loaded import ModelInfo, Value
from xlaserve.tensors import Tensor


class Waiting:
    """A request for all outputs, and its answer."""

    def __init__(self, model: str, info: ModelInfo, inputs: Mapping[str, Value]) -> None:
        first = next(iter(inputs.values()), None)
        self.request = UnsentRequest(
            inputs,
            [spec.name for spec in info.outputs],
            rows=int(first.shape[0]) if first is not None and info.max_batch_size else 1,
            answered=self._take,
            failed=self._take,
        )
        self._model = model
        self._over = threading.Event()
        self._found: Mapping[str, Tensor] | BaseException | None = None

    def freed(self) -> None:
        """Record that the execution has ended, unless the answer arrives later."""
        if self._found is not None or not self.request.is_late:
            self._over.set()

    def result(self) -> Mapping[str, Tensor]:
        """Wait for the outputs, or raise the request's error. Blocks."""
        self._over.wait()
        if isinstance(self._found, BaseException):
            raise self._found
        if self._found is None:
            raise ModelFailed(self._model, "its code returned no answer")
        return self._found

    def _take(self, found: Mapping[str, Tensor] | BaseException) -> None:
        self._found = found
        if self.request.is_late:
            self._over.set()
