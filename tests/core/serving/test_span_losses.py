"""Every span that reaches no collector is counted, whichever component dropped it."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from support.otlp import needs_sdk

from xlaserve.serving.call import Peer
from xlaserve.serving.call_record import CallRecord
from xlaserve.serving.observability.opentelemetry import OpenTelemetry
from xlaserve.serving.observability.spans import CallSpan

SECONDS = 60
CALL = CallSpan(
    name="m",
    version="1",
    id="",
    operation="infer",
    peer=Peer("grpc_endpoint"),
    record=CallRecord(1),
    submitted=2,
    execute_begun=3,
    execute_ended=4,
    ended=5,
    rows=1,
    error=None,
    parent=None,
    parts=(),
    trace_id=7,
)
EACH = 5
"""Spans per call: its own and four phases."""


@pytest.fixture(autouse=True)
def _with_the_sdk() -> None:
    needs_sdk()


class Exporter:
    """An exporter that waits for the test, then behaves as its `outcome` says."""

    def __init__(self, outcome: str, *, may: bool = True) -> None:
        self._outcome = outcome
        self.may = threading.Event()
        if may:
            self.may.set()
        self.sent = 0

    def export(self, spans: Sequence[Any]) -> Any:
        from opentelemetry.sdk.trace.export import SpanExportResult

        assert self.may.wait(SECONDS)
        if self._outcome == "raises":
            raise OSError("no collector")
        if self._outcome == "fails":
            return SpanExportResult.FAILURE
        self.sent += len(spans)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None: ...

    def force_flush(self, timeout_millis: int = 0) -> bool:
        return True


@pytest.mark.parametrize(("outcome", "lost"), [("sends", 0), ("fails", 15), ("raises", 15)])
def test_what_the_collector_does_not_take_is_lost(outcome: str, lost: int) -> None:
    exporter = Exporter(outcome)
    spans = OpenTelemetry({}, 10, exporter=exporter)
    spans.keep([CALL] * 3)

    assert spans.close(SECONDS)
    assert (lost, 3 * EACH - lost) == (spans.dropped, exporter.sent)


def test_what_our_own_queue_has_no_room_for_is_lost() -> None:
    exporter = Exporter("sends")
    spans = OpenTelemetry({}, 2, exporter=exporter)
    spans.keep([CALL] * 3)

    assert spans.close(SECONDS)
    assert (EACH, 2 * EACH) == (spans.dropped, exporter.sent)


def test_what_the_queue_of_the_sdk_has_no_room_for_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise the SDK would silently drop the oldest spans."""
    sizes = {"OTEL_BSP_MAX_QUEUE_SIZE": "2", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "2"}
    for name, value in sizes.items():
        monkeypatch.setenv(name, value)
    exporter, are_made = Exporter("sends", may=False), threading.Event()
    spans = OpenTelemetry(sizes, 10, exporter=exporter)
    spans.keep([CALL] * 3)
    spans._thread.call(are_made.set)
    assert are_made.wait(SECONDS)
    exporter.may.set()

    assert spans.close(SECONDS)
    assert 3 * EACH == spans.dropped + exporter.sent
    # At most two spans are being sent, and two are queued.
    assert spans.dropped >= 3 * EACH - 4


def test_what_is_not_sent_at_the_end_is_lost() -> None:
    exporter = Exporter("sends", may=False)
    spans = OpenTelemetry({}, 10, exporter=exporter)
    spans.keep([CALL] * 3)
    are_made = threading.Event()
    spans._thread.call(are_made.set)
    assert are_made.wait(SECONDS)

    assert not spans.close(0.05)
    assert 3 * EACH == spans.dropped
    exporter.may.set()
    assert spans.close(SECONDS)
    assert 3 * EACH == spans.dropped
