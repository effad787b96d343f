"""A traced call in Triton's file format."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from xlaserve.serving.call import Outcome
from xlaserve.serving.call_record import CallRecord
from xlaserve.serving.infer_call import Executed, InferCall
from xlaserve.serving.observability.trace_file import Trace


class _Stamps(NamedTuple):
    """Triton's names of a transport's timestamps."""

    receive_start: str
    receive_end: str
    send_start: str
    send_end: str


_STAMPS: Mapping[str, _Stamps] = MappingProxyType(
    {
        "grpc_endpoint": _Stamps(
            *("GRPC_WAITREAD_START", "GRPC_WAITREAD_END", "GRPC_SEND_START", "GRPC_SEND_END")
        ),
        "http_endpoint": _Stamps(
            *("HTTP_RECV_START", "HTTP_RECV_END", "HTTP_SEND_START", "HTTP_SEND_END")
        ),
    }
)
"""Timestamp names by listener."""


class TracedCall(NamedTuple):
    """A traced call; its record is completed when the answer has been written."""

    head: dict[str, Any]
    times: list[tuple[str, int]]
    record: CallRecord | None
    stamps: _Stamps | None
    ended_ns: int

    def whole(self) -> Trace:
        """Return the trace in Triton's format, with timestamps in order."""
        times, record, stamps = self.times, self.record, self.stamps
        if record is not None and stamps is not None:
            received = [(stamps.receive_start, record.begun_ns)]
            if record.received_ns:
                received.append((stamps.receive_end, record.received_ns))
            times = [*received, *times]
            if record.written_ns:
                sent = max(record.written_ns, self.ended_ns)
                times += [(stamps.send_start, self.ended_ns), (stamps.send_end, sent)]
        shown = [{"name": name, "ns": ns} for name, ns in times]
        return self.head, {"id": self.head["id"], "timestamps": shown}


def traced(call: InferCall, outcome: Outcome, now_ns: int, number: int) -> TracedCall:
    """Create the trace of an ended call; `number` is the trace id."""
    found = call.found
    head: dict[str, Any] = {"id": number, "model_name": found.model}
    head["model_version"] = int(found.number) if found.number.isdigit() else found.number
    if call.id:
        head["request_id"] = call.id
    times = [("REQUEST_START", call.started_ns)]
    if isinstance(outcome, Executed):
        times += [
            ("QUEUE_START", call.submitted_ns or call.started_ns),
            ("COMPUTE_START", outcome.begun_ns),
            ("COMPUTE_INPUT_END", outcome.begun_ns),
            ("COMPUTE_OUTPUT_START", outcome.ended_ns),
            ("COMPUTE_END", outcome.ended_ns),
        ]
    times.append(("REQUEST_END", now_ns))
    # Nested calls have no connection.
    listener = call.peer.listener if call.parent is None else ""
    return TracedCall(head, times, call.record, _STAMPS.get(listener), now_ns)
