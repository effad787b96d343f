"""Per-call record for observers: created at admission, completed by the transport.

Calls have no record unless an observer asks for one, so transports usually have nothing to note.
"""

import time

import msgspec

UNKNOWN = -1


# Only `trace` is a container, and it never refers to the call: no reference cycle is possible.
class CallRecord(msgspec.Struct, gc=False):
    """Times and sizes of a call that only its transport knows."""

    begun_ns: int
    """Arrival of the headers, by the engine's clock."""
    received_ns: int = 0
    """Arrival of the last message or body; 0 until then."""
    bytes_in: int = 0
    """Bytes of the request's messages or body, after decompression."""
    bytes_out: int = UNKNOWN
    """Bytes of the answers, before compression; UNKNOWN until one is written."""
    written_ns: int = 0
    """Time at which the last answer was handed to the connection; 0 until then."""
    status: int = 0
    """HTTP status of an answer sent without an exception; 0 if there is none."""
    trace: list[object] | None = None
    """Spans of nested calls, kept by the tracer; None if it is not traced."""
    is_picked: bool = False
    """Whether the tracer sampled the call when it began."""

    def received(self, count: int) -> None:
        """Count the bytes of a received message or body."""
        self.bytes_in += count
        self.received_ns = time.perf_counter_ns()

    def sent(self, count: int) -> None:
        """Count the bytes of an answer as it is written."""
        self.bytes_out = count if self.bytes_out < 0 else self.bytes_out + count
        self.written_ns = time.perf_counter_ns()


def attach(record: CallRecord | None, error: BaseException) -> None:
    """Attach a call's record to its error, so that the bytes of the error response are counted."""
    if record is not None:
        error.call_record = record  # type: ignore[attr-defined]


def count_answer(error: BaseException, count: int) -> None:
    """Count the bytes of an error response in the record attached to the error."""
    record = getattr(error, "call_record", None)
    if record is not None:
        del error.call_record  # type: ignore[attr-defined]
        record.sent(count)
