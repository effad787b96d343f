"""Counts spans that are lost before they reach a collector."""

import threading
from collections.abc import Callable, Sequence
from typing import Any


class Losses:
    """Spans that were lost: for a full queue, a collector that takes none, or the end.

    The SDK's own queue drops the oldest span without a word. So that it never has to, a span that
    would not fit there is dropped here.
    """

    def __init__(self, max_queued: int) -> None:
        """The SDK queues at most `max_queued` spans."""
        self._max_queued = max_queued
        self._lock = threading.Lock()
        self._queued = 0
        """Spans that the SDK has, and has not given to the exporter."""
        self._sending = 0
        self._is_over = False
        self.count = 0
        """Lost spans so far."""

    def add(self, count: int) -> None:
        """Count unmade spans."""
        with self._lock:
            self.count += count

    def give_up(self) -> None:
        """Count queued and unsent spans as lost."""
        with self._lock:
            if not self._is_over:
                self._is_over = True
                self.count += self._queued + self._sending

    def watching(self, processor: Callable[[Any], Any], exporter: Any) -> Any:
        """Return the SDK's span processor, counting its and its exporter's losses."""
        inner = processor(_Exporter(self, exporter))
        queue = inner.on_end

        def on_end(span: Any) -> None:
            # The SDK passes over what is recorded and not sampled.
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
        """Note that spans have left the queue for the collector."""
        with self._lock:
            self._queued -= count
            self._sending += count

    def end(self, count: int, *, is_sent: bool) -> None:
        """Note how that went."""
        with self._lock:
            self._sending -= count
            if not is_sent and not self._is_over:
                self.count += count


class _Exporter:
    """An exporter of the SDK whose failures are counted."""

    def __init__(self, losses: Losses, exporter: Any) -> None:
        self._losses = losses
        self._exporter = exporter

    def export(self, spans: Sequence[Any]) -> Any:
        """Send spans; return the SDK's result, whose value is 0 for success."""
        self._losses.begin(len(spans))
        result = None
        try:
            result = self._exporter.export(spans)
            return result
        finally:
            is_sent = result is not None and result.value == 0
            self._losses.end(len(spans), is_sent=is_sent)

    def shutdown(self) -> None:
        """End it: later requests fail."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Return whether nothing waits in it."""
        return bool(self._exporter.force_flush(timeout_millis))
