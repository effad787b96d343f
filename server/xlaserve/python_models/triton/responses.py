"""`pb_utils.InferenceResponse`, and the responses of called models."""

import json
from collections.abc import Iterator, Mapping, Sequence

from xlaserve import errors
from xlaserve.errors import XlaserveError
from xlaserve.errors import code as code_errors
from xlaserve.python_models.triton.errors import TritonError, TritonModelException
from xlaserve.python_models.triton.tensor import Tensor
from xlaserve.runtime.calls import Answered, Arrays, Replies
from xlaserve.tensors import Parameter


class InferenceResponse:
    """A response: tensors or an error."""

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> None:
        for tensor in output_tensors:
            if not isinstance(tensor, Tensor):
                got = type(tensor).__name__
                raise TritonModelException(f"output_tensors: expected pb_utils.Tensor, got {got}")
        self._tensors = list(output_tensors)
        self._error = error
        self.given_parameters: Mapping[str, Parameter] = dict(parameters or {})
        """The parameters that the code gave."""

    def output_tensors(self) -> list[Tensor]:
        """Return the output tensors."""
        return self._tensors

    def has_error(self) -> bool:
        """Tell whether the response has an error."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """Return the error, or None if there is none."""
        return self._error

    def parameters(self) -> str:
        """Return the parameters as JSON."""
        return json.dumps(self.given_parameters)


class ResponseIterator:
    """Iterates over the responses of a decoupled model."""

    def __init__(self, replies: Replies) -> None:
        self._replies = replies
        self._is_over = False

    def __iter__(self) -> Iterator[InferenceResponse]:
        return self

    def __next__(self) -> InferenceResponse:
        if self._is_over:
            raise StopIteration
        try:
            return response_of(next(self._replies))
        except StopIteration:
            self._is_over = True
            if not self._replies.is_end_empty:
                raise
            # A final flag without outputs yields an empty response: Triton's examples expect it.
            return InferenceResponse()
        except XlaserveError as error:
            self._is_over = True
            return failed_response(error)

    def cancel(self) -> None:
        """Cancel the call."""
        self._replies.cancel()


def response_of(outputs: Arrays) -> InferenceResponse:
    """Return the outputs of another model as a response."""
    parameters = outputs.parameters if isinstance(outputs, Answered) else None
    tensors = [Tensor(name, array) for name, array in outputs.items()]
    return InferenceResponse(tensors, parameters=parameters)


_CODES: tuple[tuple[type[XlaserveError], int], ...] = (
    (errors.ModelNotFound, TritonError.NOT_FOUND),
    (code_errors.NotFoundByModel, TritonError.NOT_FOUND),
    (errors.InvalidRequest, TritonError.INVALID_ARG),
    (code_errors.RefusedByModel, TritonError.INVALID_ARG),
    (errors.ModelNotReady, TritonError.UNAVAILABLE),
    (errors.Overloaded, TritonError.UNAVAILABLE),
    (code_errors.UnavailableToModel, TritonError.UNAVAILABLE),
    (errors.Unsupported, TritonError.UNSUPPORTED),
    (code_errors.UnsupportedByModel, TritonError.UNSUPPORTED),
    (code_errors.ExistsForModel, TritonError.ALREADY_EXISTS),
    (code_errors.CancelledByModel, TritonError.CANCELLED),
)


def failed_response(error: XlaserveError) -> InferenceResponse:
    """Return an error of the server as a response."""
    codes = (code for kind, code in _CODES if isinstance(error, kind))
    return InferenceResponse(error=TritonError(str(error), next(codes, TritonError.INTERNAL)))
