"""Spans of calls: what a tracer needs to know of one that has ended, and of the calls within it."""

import re
from collections.abc import Sequence
from typing import NamedTuple, cast

from xlaserve.core.serving.call import Call, Headers, Outcome
from xlaserve.core.serving.call_record import CallRecord
from xlaserve.core.serving.infer_call import Executed, InferCall

MAX_PARTS = 256
"""Parts of one call that have spans: the code of a model may ask others without end."""

TRACEPARENT = "traceparent"
"""The header that names the span of a client (W3C Trace Context, 3.2)."""

_MAX_TEXT = 256
_MAX_STATE = 512
"""Characters of a tracestate that are passed on (W3C Trace Context, 3.3.1.5)."""
_TRACEPARENT = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?",
    re.ASCII,
)
_SAMPLED = 1


class TraceParent(NamedTuple):
    """The span of a client that a call is part of."""

    trace_id: int
    span_id: int
    sampled: bool
    state: str = ""
    """Its `tracestate`, which is passed on."""


class CallSpan(NamedTuple):
    """Times of a call, by the clock of the engine; those that are not known are 0."""

    name: str
    """Its model."""
    version: str
    id: str
    operation: str
    listener: str
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
    """Calls within it: steps of an ensemble, and what the code of a model asked."""
    trace_id: int = 0
    """Trace that it is in; 0 for one that its whole is in."""


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
    call: InferCall,
    record: CallRecord,
    outcome: Outcome,
    ended: int,
    parent: TraceParent | None = None,
    *,
    trace_id: int = 0,
) -> CallSpan:
    """Return what is known of a call that has ended."""
    executed = outcome if type(outcome) is Executed else None
    found = call.found if call.is_found else None
    parts = cast("Sequence[CallSpan]", record.trace or ())
    return CallSpan(
        (call.model if found is None else found.model)[:_MAX_TEXT],
        (call.version if found is None else found.number)[:_MAX_TEXT],
        call.id[:_MAX_TEXT],
        call.operation.value,
        call.peer.listener,
        record,
        call.submitted_ns,
        0 if executed is None else executed.begun_ns,
        0 if executed is None else executed.ended_ns,
        ended,
        call.rows if executed is None else executed.rows or call.rows,
        _text_of(outcome) if isinstance(outcome, BaseException) else None,
        parent,
        parts,
        trace_id,
    )


def add_part(whole: Call, part: CallSpan) -> None:
    """Keep the span of a part with the call that it is part of, which ends after it."""
    record = whole.record
    if record is not None and record.trace is not None and len(record.trace) < MAX_PARTS:
        record.trace.append(part)


def _text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_MAX_TEXT]
