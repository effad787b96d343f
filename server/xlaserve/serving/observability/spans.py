"""Span data of calls, collected when they end."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import NamedTuple, cast

from xlaserve.serving.call import NOT_COUNTED, Call, Headers, Outcome, Peer, Tokens
from xlaserve.serving.call_record import CallRecord
from xlaserve.serving.infer_call import Executed, InferCall
from xlaserve.tensors import Parameter

MAX_PARTS = 256
"""Maximum number of nested spans per call, because a model's code may make any number of calls."""

TRACEPARENT = "traceparent"
"""Request header with the client's span (W3C Trace Context, 3.2)."""

_GENERATION_PARAMETERS = frozenset({"max_tokens", "temperature", "top_p", "top_k", "seed"})
"""Generation parameters recorded in spans."""
_MAX_TEXT = 256
_MAX_STATE = 512
"""Maximum length of a forwarded tracestate (W3C Trace Context, 3.3.1.5)."""
_TRACEPARENT = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?",
    re.ASCII,
)
_SAMPLED = 1


class StatusReporting(NamedTuple):
    """How the status sent to a client is determined."""

    status_of: Callable[[BaseException | None, str, int], str]
    """Returns the status from the error (or None), the listener, and the HTTP status of an
    answer.
    """
    scheme: str
    """Scheme of the HTTP listener's URLs."""


class TraceParent(NamedTuple):
    """The client's span that a call belongs to."""

    trace_id: int
    span_id: int
    sampled: bool
    state: str = ""
    """The `tracestate` header, which is forwarded."""


def _not_counted() -> Tokens:
    return NOT_COUNTED


def _no_status(_record: CallRecord) -> str:
    return ""


class CallSpan(NamedTuple):
    """Data of one span; times are by the engine's clock, 0 if unknown."""

    name: str
    """Name of the model."""
    version: str
    id: str
    operation: str
    peer: Peer
    record: CallRecord
    """The call's record, with its begin and write times."""
    submitted: int
    execute_begun: int
    execute_ended: int
    ended: int
    rows: int
    error: str | None
    parent: TraceParent | None
    parts: "Sequence[CallSpan]"
    """Spans of nested calls: ensemble steps, and calls made by a model's code."""
    trace_id: int = 0
    """Trace id; 0 for a nested call, which is in its parent's trace."""
    method: str = ""
    """Method or route, as in `Call.method`."""
    requested_model: str = ""
    """The model name that the client sent."""
    final_status: Callable[[CallRecord], str] = _no_status
    """Returns the status sent to the client, once the answer has been written."""
    host: str = ""
    """Authority (host) of the request."""
    user_agent: str = ""
    scheme: str = ""
    """Scheme of the listener; `peer` has the scheme that a proxy reports."""
    generates: bool = False
    """Whether the call's model generates text."""
    parameters: Mapping[str, Parameter] = MappingProxyType({})
    """Generation parameters of the request."""
    count_tokens: Callable[[], Tokens] = _not_counted
    """Returns the token counts, once the answer has been written."""

    @property
    def status(self) -> str:
        """Return the status sent to the client, as a name or number."""
        return self.final_status(self.record)


def trace_parent(headers: Headers) -> TraceParent | None:
    """Return the client's span from the request headers, or None (W3C Trace Context, 3.2).

    Malformed and duplicate headers are ignored.
    """
    text = headers.get(TRACEPARENT)
    found = None if text is None else _TRACEPARENT.fullmatch(text)
    if found is None:
        return None
    version, trace, span, flags, more = found.groups()
    if version == "00" and more is not None:
        return None
    state = headers.get("tracestate") or ""
    return TraceParent(
        int(trace, 16),
        int(span, 16),
        bool(int(flags, 16) & _SAMPLED),
        state if len(state) <= _MAX_STATE else "",
    )


def span_of(
    call: Call,
    record: CallRecord,
    outcome: Outcome,
    ended: int,
    parent: TraceParent | None = None,
    *,
    trace_id: int = 0,
    reporting: StatusReporting | None = None,
) -> CallSpan:
    """Return the span of an ended call; `reporting` is given for client calls."""
    executed = outcome if type(outcome) is Executed else None
    inference = call if isinstance(call, InferCall) else None
    found = inference.found if inference is not None and inference.is_found else None
    parts = cast("Sequence[CallSpan]", record.trace or ())
    submitted = rows = 0
    if inference is not None:
        # If another process executed the call, only that process knows the submission time.
        submitted = inference.submitted_ns or (0 if executed is None else inference.started_ns)
        rows = inference.rows if executed is None else executed.rows or inference.rows
    span = CallSpan(
        (call.model if found is None else found.model)[:_MAX_TEXT],
        (call.version if found is None else found.number)[:_MAX_TEXT],
        "" if inference is None else inference.id[:_MAX_TEXT],
        call.operation.value,
        call.peer,
        record,
        submitted,
        0 if executed is None else executed.begun_ns,
        0 if executed is None else executed.ended_ns,
        ended,
        rows,
        _text_of(outcome) if isinstance(outcome, BaseException) else None,
        parent,
        parts,
        trace_id,
    )
    return span if reporting is None else _client_span(span, call, outcome, reporting)


def _client_span(
    span: CallSpan, call: Call, outcome: Outcome, reporting: StatusReporting
) -> CallSpan:
    """Add the attributes of a client request."""
    # gRPC-Web arrives at an HTTP listener, but its clients get gRPC statuses.
    listener = "" if call.method.startswith("/") else call.peer.listener
    headers = call.headers
    status = ""
    if isinstance(outcome, BaseException):
        status = reporting.status_of(outcome, listener, 0)
    final_status = partial(_final_status, status, reporting, listener)
    parameters: Mapping[str, Parameter] | None = None
    if isinstance(call, InferCall) and call.is_found and call.instance.info.generation is not None:
        parameters = {
            name: call.parameters[name] for name in _GENERATION_PARAMETERS & call.parameters.keys()
        }
    return span._replace(
        method=call.method,
        requested_model=call.model[:_MAX_TEXT] or span.name,
        final_status=final_status,
        host=(headers.get("host") or headers.get(":authority") or "")[:_MAX_TEXT],
        user_agent=(headers.get("user-agent") or "")[:_MAX_TEXT],
        scheme=reporting.scheme,
        generates=parameters is not None,
        parameters=parameters or {},
        count_tokens=call.tokens or _not_counted,
    )


def _final_status(
    status: str, reporting: StatusReporting, listener: str, record: CallRecord
) -> str:
    return status or reporting.status_of(None, listener, record.status)


def add_part(whole: Call, part: CallSpan) -> None:
    """Add the span of a nested call to its parent."""
    record = whole.record
    if record is not None and record.trace is not None and len(record.trace) < MAX_PARTS:
        record.trace.append(part)


def _text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_MAX_TEXT]
