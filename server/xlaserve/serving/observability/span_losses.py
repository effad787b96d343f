"""Accounting of spans lost before they reach a collector."""

import threading
from collections.abc import Callable, Sequence
from typing import Any


class Losses:
    """Counts lost spans: the queue was full, the collector refused them, or the server ended.

    The SDK's queue silently drops its oldest span when it is full; so spans that would not fit are
    dropped and counted here.
    """

    def __init__(self, max_queued: int) -> None:
        """`max_queued` is the size of the SDK's queue."""
        self._max_queued = max_queued
        self._lock = threading.Lock()
        self._queued = 0
        """Spans in the SDK's queue."""
        self._sending = 0
        self._is_over = False
        self.count = 0
        """Number of spans lost so far."""

    def add(self, count: int) -> None:
        """Count spans lost before they were created."""
        with self._lock:
            self.count += count

    def give_up(self) -> None:
        """Count as lost all spans that have not been sent."""
        with self._lock:
            if not self._is_over:
                self._is_over = True
                self.count += self._queued + self._sending

    def watching(self, processor: Callable[[Any], Any], exporter: Any) -> Any:
        """Return the SDK's span processor, wrapped so that its losses are counted."""
        inner = processor(_Exporter(self, exporter))
        queue = inner.on_end

        def on_end(span: Any) -> None:
            # The SDK ignores spans that are not sampled.
            if not span.context.trace_flags.sampled or self._queues():
                queue(span)

        inner.on_end = on_end
        return inner

    def _queues(self) -> bool:
        with self._lock:
            if self._is_over or self._queued >= self._max_queued:
                self.count += 1
                return False
            self._queued += 1
            return True

    def begin(self, count: int) -> None:
        """Record that spans left the queue for the exporter."""
        with self._lock:
            self._queued -= count
            self._sending += count

    def end(self, count: int, *, is_sent: bool) -> None:
        """Record the result of an export."""
        with self._lock:
            self._sending -= count
            if not is_sent and not self._is_over:
                self.count += count


class _Exporter:
    """Wraps an exporter to count its failures."""

    def __init__(self, losses: Losses, exporter: Any) -> None:
        self._losses = losses
        self._exporter = exporter

    def export(self, spans: Sequence[Any]) -> Any:
        """Export spans; return the SDK's result, whose value is 0 for success."""
        self._losses.begin(len(spans))
        result = None
        try:
            result = self._exporter.export(spans)
            return result
        finally:
            is_sent = result is not None and result.value == 0
            self._losses.end(len(spans), is_sent=is_sent)

    def shutdown(self) -> None:
        """Shut down; later exports fail."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Flush the exporter; return whether everything was sent."""
        return bool(self._exporter.force_flush(timeout_millis))
