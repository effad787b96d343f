"""Notes on one call, which observers make when it begins and transports complete.

A call has none while nobody observes calls in such detail: then a transport has nothing to note.
"""

import time

import msgspec

UNKNOWN = -1


# It holds no container but what a tracer puts there, which refers to nothing of the call.
class CallRecord(msgspec.Struct, gc=False):
    """The times and sizes of a call that only its transport knows."""

    begun_ns: int
    """Arrival of its headers, by the clock of the engine."""
    received_ns: int = 0
    """Arrival of its last message or body; 0 until then."""
    bytes_in: int = 0
    """Bytes of its messages or its body, after decompression."""
    bytes_out: int = UNKNOWN
    """Bytes of its answers, before compression; UNKNOWN until one is written."""
    written_ns: int = 0
    """Time its last answer was handed to its connection; 0 until then."""
    status: int = 0
    """The HTTP status of an answer that no error was raised for; 0 for none."""
    trace: list[object] | None = None
    """Spans of nested calls, kept by the tracer; None if it is not traced."""
    is_picked: bool = False
    """Whether the tracer sampled it at its start."""

    def received(self, count: int) -> None:
        """Count the bytes of a message, or of a body."""
        self.bytes_in += count
        self.received_ns = time.perf_counter_ns()

    def sent(self, count: int) -> None:
        """Count the bytes of an answer being written."""
        self.bytes_out = count if self.bytes_out < 0 else self.bytes_out + count
        self.written_ns = time.perf_counter_ns()


def attach(record: CallRecord | None, error: BaseException) -> None:
    """Let an observed call count the bytes of its error's answer."""
    if record is not None:
        error.call_record = record  # type: ignore[attr-defined]


def count_answer(error: BaseException, count: int) -> None:
    """Count the bytes of an error's answer for the call that it ended."""
    record = getattr(error, "call_record", None)
    if record is not None:
        del error.call_record  # type: ignore[attr-defined]
        record.sent(count)
