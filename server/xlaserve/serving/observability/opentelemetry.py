"""OpenTelemetry spans, created and exported in the background (`xlaserve[otel]`)."""

import importlib
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from xlaserve.concurrency.batches import BatchThread
from xlaserve.errors import InvalidSettings
from xlaserve.serving.observability import span_attributes
from xlaserve.serving.observability.span_attributes import (
    SCHEMA_URL,
    Of,
    attributes,
    of_request,
    operation,
)
from xlaserve.serving.observability.span_losses import Losses
from xlaserve.serving.observability.spans import CallSpan

_SETTING = "trace_mode"
_MODE = "opentelemetry"
_HTTP = "http/protobuf"
_EXPORTERS: Mapping[str, str] = {
    _HTTP: "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
}
"""Exporter modules by the value of OTEL_EXPORTER_OTLP_PROTOCOL."""
_PROTOCOL = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_NAME = "xlaserve"
_MOST_QUEUED = "OTEL_BSP_MAX_QUEUE_SIZE"
_SDK_QUEUED = 2048
"""The SDK's default for OTEL_BSP_MAX_QUEUE_SIZE."""


class OpenTelemetry:
    """Creates spans of calls on a background thread, and exports them with the SDK.

    Endpoint, headers, batching and resource come from the OTEL_* variables, which the SDK reads.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        max_pending: int,
        *,
        exporter: object | None = None,
        version: str = "",
        clock: Callable[[], int] = time.perf_counter_ns,
        now: Callable[[], int] = time.time_ns,
    ) -> None:
        """Raises InvalidSettings if the SDK or the requested exporter is not installed.

        `max_pending` limits the calls waiting for their spans to be created.
        """
        sdk = _imported("opentelemetry.sdk.trace")
        processors = _imported("opentelemetry.sdk.trace.export")
        resources = _imported("opentelemetry.sdk.resources")
        self._api = _imported("opentelemetry.trace")
        self._clock, self._now = clock, now
        self._ids = _ids(_imported("opentelemetry.sdk.trace.id_generator"))
        given = {"service.version": version}
        if not _names_service(environment):
            given["service.name"] = _NAME
        # At exit the SDK would wait for the collector; `close` does that with a time limit.
        self._provider = sdk.TracerProvider(
            resource=resources.Resource.create(given),
            id_generator=self._ids,
            shutdown_on_exit=False,
        )
        if exporter is None:
            exporter = _exporter(environment)
        self._exporter: Any = exporter
        most = environment.get(_MOST_QUEUED, "")
        # Like the SDK, use the default if the value is not a number.
        self._losses = Losses(int(most) if most.isdecimal() else _SDK_QUEUED)
        processor = self._losses.watching(processors.BatchSpanProcessor, exporter)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer(_NAME, version, schema_url=SCHEMA_URL)
        self._thread = BatchThread[CallSpan]("spans", self._make_all, max_pending)

    @property
    def dropped(self) -> int:
        """Return the number of spans lost so far, at any stage."""
        return self._losses.count

    def keep(self, spans: Sequence[CallSpan]) -> None:
        """Queue spans for export. Never blocks; call it on the event loop."""
        free = max(0, self._thread.free)
        self.drop(spans[free:])
        if free:
            self._thread.put(spans[:free])

    def drop(self, calls: Sequence[CallSpan]) -> None:
        """Count the spans of calls as lost, nested ones included."""
        self._losses.add(sum(map(_spans_of, calls)))

    def close(self, seconds: float) -> bool:
        """Export pending spans within a time limit; return whether all were exported. Blocks."""
        self._thread.call(self._provider.shutdown)
        if self._thread.close(seconds):
            return True
        self._losses.give_up()
        # Otherwise an SDK thread would retry for up to OTEL_EXPORTER_OTLP_TIMEOUT.
        self._exporter.shutdown()
        return False

    # --- on the thread ---

    def _make_all(self, spans: Sequence[CallSpan]) -> None:
        # Computed for each batch, because the wall clock may be adjusted.
        offset = self._now() - self._clock()
        for span in spans:
            self._make(span, offset, None)

    def _make(self, call: CallSpan, offset: int, whole: Any) -> None:
        """Create the span of a call and its child spans."""
        api, is_step = self._api, whole is not None
        context = whole if is_step else self._context_of(call)
        self._ids.next_trace_id = call.trace_id
        begun = call.record.begun_ns
        ended = max(call.ended, call.record.written_ns)
        span = self._tracer.start_span(
            span_attributes.name(call, is_step=is_step),
            context,
            kind=api.SpanKind.INTERNAL if is_step else api.SpanKind.SERVER,
            attributes=attributes(call, of_request(call)),
            start_time=begun + offset,
        )
        within = api.set_span_in_context(span)
        failed = api.Status(api.StatusCode.ERROR, call.error)
        for name, start, end in _phases(call, begun, ended):
            part = self._tracer.start_span(name, within, start_time=start + offset)
            part.end(max(start, end) + offset)
        if made := operation(call):
            part = self._tracer.start_span(
                f"{made} {call.name}",
                within,
                start_time=(call.submitted or begun) + offset,
                attributes=attributes(call, (Of.GENERATED,)),
            )
            if call.error is not None:
                part.set_status(failed)
            part.end(max(begun, ended) + offset)
        for inner in call.parts:
            self._make(inner, offset, within)
        if span_attributes.is_error(call, is_step=is_step):
            span.set_status(failed)
        span.end(max(begun, ended) + offset)

    def _context_of(self, call: CallSpan) -> Any:
        parent = call.parent
        api = self._api
        if parent is None:
            return api.set_span_in_context(api.INVALID_SPAN)
        state = api.TraceState.from_header([parent.state]) if parent.state else None
        flags = api.TraceFlags(api.TraceFlags.SAMPLED if parent.sampled else 0)
        context = api.SpanContext(parent.trace_id, parent.span_id, True, flags, state)
        return api.set_span_in_context(api.NonRecordingSpan(context))


def _spans_of(call: CallSpan) -> int:
    phases = _phases(call, 0, 0)
    return 1 + len(phases) + bool(operation(call)) + sum(map(_spans_of, call.parts))


def _phases(call: CallSpan, begun: int, ended: int) -> Sequence[tuple[str, int, int]]:
    """Return the phases of a call with begin and end: receive, queue, execute, encode."""
    if not call.submitted:
        return [("receive", begun, call.record.received_ns or ended)]
    received = ("receive", begun, call.submitted)
    if not call.execute_begun:
        return [received, ("queue", call.submitted, ended)]
    return [
        received,
        ("queue", call.submitted, call.execute_begun),
        ("execute", call.execute_begun, call.execute_ended),
        ("encode", call.execute_ended, ended),
    ]


def _ids(module: Any) -> Any:
    """Return an id generator whose next trace id can be set."""

    class Ids(module.RandomIdGenerator):  # type: ignore[misc]
        next_trace_id = 0

        def generate_trace_id(self) -> int:
            """Return the id that was set, or a random one."""
            chosen, self.next_trace_id = self.next_trace_id, 0
            return chosen or int(super().generate_trace_id())

    return Ids()


def new_trace_id() -> int:
    """Return the id of a new trace (W3C Trace Context, 3.2.2.3)."""
    return random.getrandbits(128) or 1


def _names_service(environment: Mapping[str, str]) -> bool:
    return bool(environment.get("OTEL_SERVICE_NAME")) or "service.name=" in environment.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )


def _exporter(environment: Mapping[str, str]) -> Any:
    protocol = next((environment[name] for name in _PROTOCOL if environment.get(name)), _HTTP)
    module = _EXPORTERS.get(protocol)
    if module is None:
        raise InvalidSettings(_PROTOCOL[1], " or ".join(_EXPORTERS), protocol)
    return _imported(module).OTLPSpanExporter()


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = "opentelemetry-exporter-otlp-proto-grpc" if ".grpc." in name else "xlaserve[otel]"
        expected = f"{name} to be installed: pip install '{package}'"
        raise InvalidSettings(_SETTING, expected, _MODE) from error
