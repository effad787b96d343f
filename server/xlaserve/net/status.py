"""Maps the server's errors to gRPC and HTTP statuses."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from types import MappingProxyType

from grpclib import GRPCError
from grpclib.const import Status

from xlaserve import errors
from xlaserve.errors import XlaserveError
from xlaserve.errors import access as access_errors
from xlaserve.errors import code as code_errors
from xlaserve.errors import language as language_errors
from xlaserve.errors import sequence as sequence_errors
from xlaserve.errors.message import MalformedMessage, TooManyFields


@dataclass(frozen=True, slots=True)
class WireStatus:
    """The gRPC and HTTP statuses of an error class."""

    grpc: Status
    http: HTTPStatus


STATUSES: Mapping[type[XlaserveError], WireStatus] = MappingProxyType(
    {
        errors.ModelNotFound: WireStatus(Status.NOT_FOUND, HTTPStatus.NOT_FOUND),
        errors.ModelNotReady: WireStatus(Status.UNAVAILABLE, HTTPStatus.SERVICE_UNAVAILABLE),
        errors.StillStarting: WireStatus(Status.UNAVAILABLE, HTTPStatus.SERVICE_UNAVAILABLE),
        errors.LoadFailed: WireStatus(Status.FAILED_PRECONDITION, HTTPStatus.BAD_REQUEST),
        errors.StoreUnavailable: WireStatus(Status.UNAVAILABLE, HTTPStatus.SERVICE_UNAVAILABLE),
        # Triton's status; its example simple_grpc_model_control checks for it.
        errors.FileNameTooLong: WireStatus(Status.INTERNAL, HTTPStatus.BAD_REQUEST),
        errors.TooManyAbandoned: WireStatus(Status.UNAVAILABLE, HTTPStatus.SERVICE_UNAVAILABLE),
        errors.CompilationTimedOut: WireStatus(
            Status.DEADLINE_EXCEEDED, HTTPStatus.GATEWAY_TIMEOUT
        ),
        errors.ModelAlreadyLoaded: WireStatus(Status.ALREADY_EXISTS, HTTPStatus.CONFLICT),
        errors.InvalidModel: WireStatus(Status.FAILED_PRECONDITION, HTTPStatus.BAD_REQUEST),
        errors.LoadCancelled: WireStatus(Status.CANCELLED, HTTPStatus.SERVICE_UNAVAILABLE),
        errors.ModelControlForbidden: WireStatus(
            Status.UNAVAILABLE, HTTPStatus.SERVICE_UNAVAILABLE
        ),
        errors.OutOfMemory: WireStatus(Status.RESOURCE_EXHAUSTED, HTTPStatus.INSUFFICIENT_STORAGE),
        errors.OutOfSpace: WireStatus(Status.RESOURCE_EXHAUSTED, HTTPStatus.INSUFFICIENT_STORAGE),
        errors.OutOfFiles: WireStatus(Status.UNAVAILABLE, HTTPStatus.SERVICE_UNAVAILABLE),
        errors.InvalidRequest: WireStatus(Status.INVALID_ARGUMENT, HTTPStatus.BAD_REQUEST),
        errors.UnsupportedMediaType: WireStatus(
            Status.INVALID_ARGUMENT, HTTPStatus.UNSUPPORTED_MEDIA_TYPE
        ),
        errors.NotAcceptable: WireStatus(Status.INVALID_ARGUMENT, HTTPStatus.NOT_ACCEPTABLE),
        errors.OutputNotInForm: WireStatus(Status.OUT_OF_RANGE, HTTPStatus.NOT_ACCEPTABLE),
        access_errors.Unauthenticated: WireStatus(Status.UNAUTHENTICATED, HTTPStatus.UNAUTHORIZED),
        access_errors.NotPermitted: WireStatus(Status.PERMISSION_DENIED, HTTPStatus.FORBIDDEN),
        # The same statuses as Triton's.
        access_errors.Restricted: WireStatus(Status.UNAVAILABLE, HTTPStatus.FORBIDDEN),
        access_errors.QuotaExceeded: WireStatus(
            Status.RESOURCE_EXHAUSTED, HTTPStatus.TOO_MANY_REQUESTS
        ),
        access_errors.TooManyRequests: WireStatus(
            Status.RESOURCE_EXHAUSTED, HTTPStatus.TOO_MANY_REQUESTS
        ),
        access_errors.WrongHost: WireStatus(
            Status.PERMISSION_DENIED, HTTPStatus.MISDIRECTED_REQUEST
        ),
        access_errors.WrongOrigin: WireStatus(Status.PERMISSION_DENIED, HTTPStatus.FORBIDDEN),
        errors.CrossSiteRequest: WireStatus(Status.PERMISSION_DENIED, HTTPStatus.FORBIDDEN),
        errors.BodyTimeout: WireStatus(Status.DEADLINE_EXCEEDED, HTTPStatus.REQUEST_TIMEOUT),
        errors.RegionNotFound: WireStatus(Status.NOT_FOUND, HTTPStatus.NOT_FOUND),
        errors.RegionExists: WireStatus(Status.ALREADY_EXISTS, HTTPStatus.CONFLICT),
        errors.TooManyRegions: WireStatus(
            Status.RESOURCE_EXHAUSTED, HTTPStatus.SERVICE_UNAVAILABLE
        ),
        errors.NotLocal: WireStatus(Status.PERMISSION_DENIED, HTTPStatus.FORBIDDEN),
        errors.SwitchedOff: WireStatus(Status.UNIMPLEMENTED, HTTPStatus.NOT_IMPLEMENTED),
        errors.Unsupported: WireStatus(Status.UNIMPLEMENTED, HTTPStatus.NOT_IMPLEMENTED),
        errors.NotOneAnswer: WireStatus(Status.INTERNAL, HTTPStatus.INTERNAL_SERVER_ERROR),
        errors.TooManyAnswers: WireStatus(Status.OUT_OF_RANGE, HTTPStatus.INTERNAL_SERVER_ERROR),
        errors.Overloaded: WireStatus(Status.RESOURCE_EXHAUSTED, HTTPStatus.SERVICE_UNAVAILABLE),
        errors.TooManyChanges: WireStatus(
            Status.RESOURCE_EXHAUSTED, HTTPStatus.SERVICE_UNAVAILABLE
        ),
        errors.BudgetExhausted: WireStatus(
            Status.RESOURCE_EXHAUSTED, HTTPStatus.SERVICE_UNAVAILABLE
        ),
        errors.QueueTimeout: WireStatus(Status.UNAVAILABLE, HTTPStatus.SERVICE_UNAVAILABLE),
        sequence_errors.SequenceInterrupted: WireStatus(Status.ABORTED, HTTPStatus.CONFLICT),
        errors.ExecutionStalled: WireStatus(Status.INTERNAL, HTTPStatus.INTERNAL_SERVER_ERROR),
        sequence_errors.StatesLost: WireStatus(Status.INTERNAL, HTTPStatus.INTERNAL_SERVER_ERROR),
        errors.DeadlineExceeded: WireStatus(Status.DEADLINE_EXCEEDED, HTTPStatus.GATEWAY_TIMEOUT),
        errors.TooLarge: WireStatus(Status.RESOURCE_EXHAUSTED, HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
        errors.ShuttingDown: WireStatus(Status.UNAVAILABLE, HTTPStatus.SERVICE_UNAVAILABLE),
        errors.WorkersSilent: WireStatus(Status.UNAVAILABLE, HTTPStatus.SERVICE_UNAVAILABLE),
        errors.ProcessSilent: WireStatus(Status.UNAVAILABLE, HTTPStatus.SERVICE_UNAVAILABLE),
        errors.EngineGone: WireStatus(Status.UNAVAILABLE, HTTPStatus.SERVICE_UNAVAILABLE),
        errors.EngineLost: WireStatus(Status.INTERNAL, HTTPStatus.INTERNAL_SERVER_ERROR),
        code_errors.ModelFailed: WireStatus(Status.INTERNAL, HTTPStatus.INTERNAL_SERVER_ERROR),
        # Not retryable: the request may have crashed the process, and could crash the next one.
        code_errors.ProcessLost: WireStatus(Status.INTERNAL, HTTPStatus.INTERNAL_SERVER_ERROR),
        code_errors.ProcessAbsent: WireStatus(Status.UNAVAILABLE, HTTPStatus.SERVICE_UNAVAILABLE),
        code_errors.RefusedByModel: WireStatus(Status.INVALID_ARGUMENT, HTTPStatus.BAD_REQUEST),
        # Not NOT_FOUND, after which ModelMesh would load the model again.
        code_errors.NotFoundByModel: WireStatus(Status.FAILED_PRECONDITION, HTTPStatus.NOT_FOUND),
        code_errors.ExistsForModel: WireStatus(Status.ALREADY_EXISTS, HTTPStatus.CONFLICT),
        code_errors.UnavailableToModel: WireStatus(
            Status.UNAVAILABLE, HTTPStatus.SERVICE_UNAVAILABLE
        ),
        code_errors.UnsupportedByModel: WireStatus(
            Status.UNIMPLEMENTED, HTTPStatus.NOT_IMPLEMENTED
        ),
        code_errors.CancelledByModel: WireStatus(Status.CANCELLED, HTTPStatus.SERVICE_UNAVAILABLE),
        code_errors.UnknownToModel: WireStatus(Status.UNKNOWN, HTTPStatus.INTERNAL_SERVER_ERROR),
        # Neither the client's fault nor worth a retry.
        language_errors.TemplateFailed: WireStatus(
            Status.INTERNAL, HTTPStatus.INTERNAL_SERVER_ERROR
        ),
        language_errors.TextProcessLost: WireStatus(
            Status.UNAVAILABLE, HTTPStatus.SERVICE_UNAVAILABLE
        ),
        language_errors.TooManyTexts: WireStatus(
            Status.RESOURCE_EXHAUSTED, HTTPStatus.SERVICE_UNAVAILABLE
        ),
        errors.InvalidSettings: WireStatus(
            Status.FAILED_PRECONDITION, HTTPStatus.INTERNAL_SERVER_ERROR
        ),
        errors.StartFailed: WireStatus(
            Status.FAILED_PRECONDITION, HTTPStatus.INTERNAL_SERVER_ERROR
        ),
        errors.WorkerDied: WireStatus(Status.INTERNAL, HTTPStatus.INTERNAL_SERVER_ERROR),
        errors.RepositoryUnreadable: WireStatus(Status.UNAVAILABLE, HTTPStatus.SERVICE_UNAVAILABLE),
        errors.InvalidReference: WireStatus(
            Status.FAILED_PRECONDITION, HTTPStatus.INTERNAL_SERVER_ERROR
        ),
        errors.DeviceUnavailable: WireStatus(Status.UNAVAILABLE, HTTPStatus.SERVICE_UNAVAILABLE),
    }
)
"""Error class -> statuses; a subclass without a row inherits those of its base class."""


@dataclass(frozen=True, slots=True)
class Reaction:
    """How ModelMesh, clients and proxies react to a gRPC status."""

    tells: str
    """The meaning of the status for the request."""
    mesh: str
    """How ModelMesh reacts."""
    clients: str
    """How retrying clients and proxies react."""
    is_repeated: bool
    """Whether any client or proxy retries the request automatically."""


REACTIONS: Mapping[Status, Reaction] = MappingProxyType(
    {
        Status.UNAVAILABLE: Reaction(
            "the request did not start or finish, for a transient reason; no process ended",
            "asks another copy of the model, or loads it elsewhere, up to eight times",
            "send it again: `retries` of this client, retry policies of gRPC, proxies behind 503",
            is_repeated=True,
        ),
        Status.RESOURCE_EXHAUSTED: Reaction(
            "a limit of a queue, of memory or of a quota was reached",
            "asks another copy once",
            "send it again after a pause: `retries` of this client, `Retry-After` over HTTP",
            is_repeated=True,
        ),
        Status.NOT_FOUND: Reaction(
            "the model or the version is not on this server",
            "drops its record of the model on this server, and loads it again here or elsewhere",
            "do not send it again",
            is_repeated=True,
        ),
        Status.INTERNAL: Reaction(
            "the execution of the request failed, and may have ended its process",
            "returns the error to its client",
            "do not send it again: it may end the next process too",
            is_repeated=False,
        ),
        Status.ABORTED: Reaction(
            "the request was not executed, since an earlier one of its sequence was not",
            "returns the error to its client",
            "do not resend it alone: resume the sequence at the earlier request",
            is_repeated=False,
        ),
        Status.DEADLINE_EXCEEDED: Reaction(
            "the deadline of the request expired",
            "returns the error to its client",
            "do not send it again: the client has given up",
            is_repeated=False,
        ),
    }
)
"""gRPC status -> reaction; other statuses are passed to the client without a retry."""


def wire_status(error: XlaserveError) -> WireStatus:
    """Return the statuses of an error's class, or of its nearest base class with a row."""
    return next(STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES)


_CLIENT_LEFT = 499
"""The non-standard status that proxies log if the client disconnected before the response."""


def reported_status(error: BaseException | None, listener: str, http_status: int = 0) -> str:
    """Return the HTTP status code or gRPC status name with which a call was answered.

    `listener` is the setting of the call's endpoint. `http_status` is the status of an HTTP
    response if there was no error, or 0.
    """
    if is_of_http(listener):
        return str(int(_http_status(error, http_status)))
    return _grpc_status(error).name


_HTTP_LISTENERS = frozenset({"http_endpoint", "metrics_endpoint"})


def is_of_http(listener: str) -> bool:
    """Tell whether `listener` is the setting of an endpoint that speaks HTTP/1.1."""
    return listener in _HTTP_LISTENERS


def _http_status(error: BaseException | None, given: int) -> int:
    if error is None:
        return given or HTTPStatus.OK
    if isinstance(error, XlaserveError):
        return wire_status(error).http
    if isinstance(error, asyncio.CancelledError | ConnectionError):
        return _CLIENT_LEFT
    return HTTPStatus.INTERNAL_SERVER_ERROR


def _grpc_status(error: BaseException | None) -> Status:
    if error is None:
        return Status.OK
    if isinstance(error, XlaserveError):
        return wire_status(error).grpc
    if isinstance(error, asyncio.CancelledError):
        return Status.CANCELLED
    return rpc_status(error) or Status.INTERNAL


def rpc_status(error: BaseException) -> Status | None:
    """Return the gRPC status of an error that is not an XlaserveError; None if it has none."""
    if isinstance(error, GRPCError):
        return error.status
    if isinstance(error, TooManyFields):
        return Status.RESOURCE_EXHAUSTED
    return Status.INTERNAL if isinstance(error, MalformedMessage) else None
