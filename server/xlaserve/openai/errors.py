"""Errors of OpenAI's endpoints: `{"error": {"message", "type", "param", "code"}}`."""

from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType

import msgspec

from xlaserve.errors import InvalidParameter, InvalidRequest, ModelNotFound

CONTEXT_LENGTH = "context_length_exceeded"
UNSUPPORTED = "unsupported_parameter"
UNKNOWN = "unknown_parameter"

PREFIXES = ("/v1/", "/openai/v1/")
"""Prefixes of the paths whose errors have this format."""
_SHOWN = 64


class InvalidField(InvalidRequest):
    """An invalid field in a request to OpenAI's endpoints."""

    def __init__(self, field: str, expected: str, got: str, *, code: str | None = None) -> None:
        self.field = field
        """Name or path of the field, such as `messages[0].content`; empty for the whole body."""
        self.code = code
        shown = got if len(got) <= _SHOWN else got[:_SHOWN] + "..."
        start = f"'{field}': " if field else ""
        super().__init__(f"{start}expected {expected}, got {shown}")


class ErrorDetail(msgspec.Struct):
    """The content of an error."""

    message: str
    type: str
    param: str | None = None
    """The invalid field, if the error is about one."""
    code: str | None = None


class ErrorBody(msgspec.Struct):
    """The body of an error response."""

    error: ErrorDetail


_INVALID = "invalid_request_error"

_KINDS: Mapping[int, tuple[str, str | None]] = MappingProxyType(
    {
        HTTPStatus.UNAUTHORIZED: (_INVALID, "invalid_api_key"),
        HTTPStatus.FORBIDDEN: ("permission_error", None),
        HTTPStatus.TOO_MANY_REQUESTS: ("requests", "rate_limit_exceeded"),
        HTTPStatus.INTERNAL_SERVER_ERROR: ("server_error", None),
    }
)
"""Type and code by status; the default is a client error below 500, otherwise a server error."""


def name_field(error: BaseException, fields: Mapping[str, str]) -> None:
    """Make the error of a generation parameter name the request field that set the parameter."""
    parameter: str | None = getattr(error, "parameter", None)
    if isinstance(error, InvalidParameter) and parameter is not None:
        error.parameter = fields.get(parameter, parameter)


def error_body(text: str, status: HTTPStatus, error: BaseException | None) -> ErrorBody:
    """Return the body of an error response; `error` is the exception, if there is one."""
    kind, code = _KINDS.get(status, (_INVALID if status < 500 else "server_error", None))
    param = None
    if isinstance(error, ModelNotFound):
        param, code = "model", "model_not_found"
    elif isinstance(error, InvalidField):
        param, code = error.field or None, error.code
    elif isinstance(error, InvalidParameter):
        # Errors that come from a model's process lack this attribute.
        param = getattr(error, "parameter", None)
    return ErrorBody(ErrorDetail(text, kind, param, code))
