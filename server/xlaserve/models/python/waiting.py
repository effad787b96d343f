"""A request of the server itself, whose one answer a thread waits for."""

import threading
from collections.abc import Callable, Mapping, Sequence

from xlaserve.code_errors import ModelFailed
from xlaserve.models.handling import NO_TENSOR_PARAMETERS, AnswerParameters
from xlaserve.models.loaded import ModelInfo, Value
from xlaserve.tensors import Parameter, Tensor


class WaitedRequest:
    """A request for all outputs (a ModelRequest)."""

    id = ""
    is_cancelled = False
    is_writable = True
    tensor_parameters = NO_TENSOR_PARAMETERS

    def __init__(self, model: str, info: ModelInfo, inputs: Mapping[str, Value]) -> None:
        self.inputs = inputs
        self.outputs: Sequence[str] = [spec.name for spec in info.outputs]
        self.parameters: Mapping[str, Parameter] = {}
        first = next(iter(inputs.values()), None)
        self.rows = int(first.shape[0]) if first is not None and info.max_batch_size else 1
        self._model = model
        self._over = threading.Event()
        self._found: Mapping[str, Tensor] | BaseException | None = None

    def begin(self) -> None:
        """Do nothing: nobody asks how long it waited."""

    def answer(
        self,
        outputs: Mapping[str, Tensor],
        *,
        last: bool = True,
        parameters: AnswerParameters | None = None,
    ) -> None:
        """Take the answer."""
        self._found = outputs

    def again(self) -> None:
        """Do nothing: once has to be enough."""

    def end(self) -> None:
        """Do nothing: the answer is there, or never comes."""

    def fail(self, error: BaseException) -> None:
        """Take the error."""
        self._found = error

    def when_writable(self, resume: Callable[[], None]) -> None:
        """Go on at once."""
        resume()

    def freed(self) -> None:
        """Take note that the model is done with it."""
        self._over.set()

    def result(self) -> Mapping[str, Tensor]:
        """Return the outputs once they are there, or raise why they are not. Blocks."""
        self._over.wait()
        if isinstance(self._found, BaseException):
            raise self._found
        if self._found is None:
            raise ModelFailed(self._model, "its code gave no answer")
        return self._found
