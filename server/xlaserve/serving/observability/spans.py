"""Spans of calls: the data that a tracer needs of a finished call."""

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
"""Nested calls with spans per call: a model's code may make any number."""

TRACEPARENT = "traceparent"
"""The header that names the span of a client (W3C Trace Context, 3.2)."""

SAID = frozenset({"max_tokens", "temperature", "top_p", "top_k", "seed"})
"""Parameters of requests to generators that spans tell."""
_MAX_TEXT = 256
_MAX_STATE = 512
"""Forwarded characters of a tracestate (W3C Trace Context, 3.3.1.5)."""
_TRACEPARENT = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?",
    re.ASCII,
)
_SAMPLED = 1


class Telling(NamedTuple):
    """Status codes that clients get, by listener."""

    status_of: Callable[[BaseException | None, str, int], str]
    """Names the status for an error, if any, a listener, and the HTTP status of an answer."""
    scheme: str
    """The scheme of its URLs over HTTP."""


class TraceParent(NamedTuple):
    """The span of a client that a call is part of."""

    trace_id: int
    span_id: int
    sampled: bool
    state: str = ""
    """Its `tracestate`, passed on."""


def _not_counted() -> Tokens:
    return NOT_COUNTED


def _untold(_record: CallRecord) -> str:
    return ""


class CallSpan(NamedTuple):
    """Times of a call, by the clock of the engine; unknown ones are 0."""

    name: str
    """Its model."""
    version: str
    id: str
    operation: str
    peer: Peer
    record: CallRecord
    """Knows when it began, and when its answer was written."""
    submitted: int
    execute_begun: int
    execute_ended: int
    ended: int
    rows: int
    error: str | None
    parent: TraceParent | None
    parts: "Sequence[CallSpan]"
    """Nested calls: steps of an ensemble, and calls of a model's code."""
    trace_id: int = 0
    """Its trace; 0 for a nested call, which shares its parent's."""
    method: str = ""
    """The method or route, as `Call.method`."""
    asked: str = ""
    """The model that the client named."""
    told: Callable[[CallRecord], str] = _untold
    """Names the client's status, after the answer was written."""
    host: str = ""
    """The authority that its client asked."""
    user_agent: str = ""
    scheme: str = ""
    """Of its listener; a proxy's is that of its peer."""
    generates: bool = False
    """Whether its model generates texts."""
    said: Mapping[str, Parameter] = MappingProxyType({})
    """Parameters of a request to a model that generates texts."""
    count_tokens: Callable[[], Tokens] = _not_counted
    """Counts tokens of prompt and answer, after the answer was written."""

    @property
    def status(self) -> str:
        """Return the client's status, by name or number."""
        return self.told(self.record)


def trace_parent(headers: Headers) -> TraceParent | None:
    """Return the span that headers name, None where they name none (W3C Trace Context, 3.2).

    One that is malformed is none, and so are two.
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
    told_by: Telling | None = None,
) -> CallSpan:
    """Return the span of an ended call; `told_by` is for calls of clients."""
    executed = outcome if type(outcome) is Executed else None
    inference = call if isinstance(call, InferCall) else None
    found = inference.found if inference is not None and inference.is_found else None
    parts = cast("Sequence[CallSpan]", record.trace or ())
    submitted = rows = 0
    if inference is not None:
        # Of a call that another process executed, only that one knows when it was submitted.
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
    return span if told_by is None else _asked(span, call, outcome, told_by)


def _asked(span: CallSpan, call: Call, outcome: Outcome, told_by: Telling) -> CallSpan:
    """Add what is known of a client's request."""
    # gRPC-Web comes to a listener of HTTP, and its clients are told the status of gRPC.
    listener = "" if call.method.startswith("/") else call.peer.listener
    headers = call.headers
    status = ""
    if isinstance(outcome, BaseException):
        status = told_by.status_of(outcome, listener, 0)
    told = partial(_told, status, told_by, listener)
    said: Mapping[str, Parameter] | None = None
    if isinstance(call, InferCall) and call.is_found and call.instance.info.generation is not None:
        said = {name: call.parameters[name] for name in SAID & call.parameters.keys()}
    return span._replace(
        method=call.method,
        asked=call.model[:_MAX_TEXT] or span.name,
        told=told,
        host=(headers.get("host") or headers.get(":authority") or "")[:_MAX_TEXT],
        user_agent=(headers.get("user-agent") or "")[:_MAX_TEXT],
        scheme=told_by.scheme,
        generates=said is not None,
        said=said or {},
        count_tokens=call.tokens or _not_counted,
    )


def _told(status: str, told_by: Telling, listener: str, record: CallRecord) -> str:
    return status or told_by.status_of(None, listener, record.status)


def add_part(whole: Call, part: CallSpan) -> None:
    """Add the span of a nested call to its parent, which ends later."""
    record = whole.record
    if record is not None and record.trace is not None and len(record.trace) < MAX_PARTS:
        record.trace.append(part)


def _text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_MAX_TEXT]
