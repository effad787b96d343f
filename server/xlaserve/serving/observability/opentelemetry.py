"""OpenTelemetry spans, made and exported in the background (`xlaserve[otel]`)."""

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
"""Value of OTEL_EXPORTER_OTLP_PROTOCOL -> the module of its exporter."""
_PROTOCOL = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_NAME = "xlaserve"
_MOST_QUEUED = "OTEL_BSP_MAX_QUEUE_SIZE"
_SDK_QUEUED = 2048
"""The SDK's own default of that variable."""


class OpenTelemetry:
    """Makes spans of calls in a thread of its own, and has the SDK export them.

    Address, headers, batches and resource are those of the variables OTEL_*, as the SDK reads them.
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
        """Raises InvalidSettings where the SDK, or the exporter that is asked for, is missing.

        At most `max_pending` calls may wait until their spans are made.
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
        # It would wait for its collector at the end of the interpreter; `close` does, for a time.
        self._provider = sdk.TracerProvider(
            resource=resources.Resource.create(given),
            id_generator=self._ids,
            shutdown_on_exit=False,
        )
        if exporter is None:
            exporter = _exporter(environment)
        self._exporter: Any = exporter
        most = environment.get(_MOST_QUEUED, "")
        # The SDK has its default in place of what is no number, too.
        self._losses = Losses(int(most) if most.isdecimal() else _SDK_QUEUED)
        processor = self._losses.watching(processors.BatchSpanProcessor, exporter)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer(_NAME, version, schema_url=SCHEMA_URL)
        self._thread = BatchThread[CallSpan]("spans", self._make_all, max_pending)

    @property
    def dropped(self) -> int:
        """Return how many spans were lost by now, wherever."""
        return self._losses.count

    def keep(self, spans: Sequence[CallSpan]) -> None:
        """Have spans made and exported; never waits. On the event loop."""
        free = max(0, self._thread.free)
        self.drop(spans[free:])
        if free:
            self._thread.put(spans[:free])

    def drop(self, calls: Sequence[CallSpan]) -> None:
        """Count the spans that calls would have had."""
        self._losses.add(sum(map(_spans_of, calls)))

    def close(self, seconds: float) -> bool:
        """Export pending spans, within a time limit; return whether all were. Blocks."""
        self._thread.call(self._provider.shutdown)
        if self._thread.close(seconds):
            return True
        self._losses.give_up()
        # A thread of the SDK would go on to try, for up to OTEL_EXPORTER_OTLP_TIMEOUT.
        self._exporter.shutdown()
        return False

    # --- in the thread ---

    def _make_all(self, spans: Sequence[CallSpan]) -> None:
        # Looked at anew for each batch: the clock of the wall is set now and then.
        offset = self._now() - self._clock()
        for span in spans:
            self._make(span, offset, None)

    def _make(self, call: CallSpan, offset: int, whole: Any) -> None:
        """Make the span of a call, and those within it."""
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
    """Return the parts of a call in time: receive, queue, execute, encode."""
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
    """Return a generator of ids that gives a trace the id which was chosen for it."""

    class Ids(module.RandomIdGenerator):  # type: ignore[misc]
        next_trace_id = 0

        def generate_trace_id(self) -> int:
            """Return the chosen id, or another one."""
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
