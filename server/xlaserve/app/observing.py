"""Creates the observers of calls: metrics, access log, traces."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from xlaserve import build
from xlaserve.concurrency.control_plane import ControlPlane
from xlaserve.concurrency.workers import Workers
from xlaserve.http.metrics.observing_families import ObservingReading
from xlaserve.net.status import reported_status
from xlaserve.process.log import lost_records
from xlaserve.serving.gates import Gates
from xlaserve.serving.observability.access_file import AccessFile
from xlaserve.serving.observability.access_log import AccessLog, Sampling
from xlaserve.serving.observability.failures import Failures
from xlaserve.serving.observability.gpus import Gpus
from xlaserve.serving.observability.loop_lag import LoopLag
from xlaserve.serving.observability.opentelemetry import OpenTelemetry
from xlaserve.serving.observability.spans import StatusReporting
from xlaserve.serving.observability.tracing import TraceSetting, Tracing
from xlaserve.settings import Settings
from xlaserve.settings.choices import Device, TlsEndpoint, TraceLevel, TraceMode


@dataclass(frozen=True, slots=True)
class Observing:
    """The observers that the settings enable."""

    failures: Failures
    access_log: AccessLog | None
    gpus: Gpus
    lag: LoopLag = field(default_factory=LoopLag)

    def reading(self, tracing: Tracing) -> ObservingReading:
        """Return the metrics about the observers themselves."""
        log = self.access_log
        return ObservingReading(
            self.failures,
            self.lag,
            None if log is None else lambda: log.dropped,
            tracing.dropped if tracing.exports_spans else None,
            lambda: self.gpus.readings,
            lost_records,
        )

    async def watch(self) -> None:
        """Monitor the event loop's lag and the GPUs until cancelled."""
        with self.gpus.polling():
            await self.lag.watch()

    def reopen(self) -> None:
        """Reopen the access log, after log rotation or SIGHUP; does not block."""
        if self.access_log is not None:
            self.access_log.reopen()

    async def close(self, workers: Workers) -> None:
        """Write the pending records of the access log, within a time limit."""
        if self.access_log is not None:
            await self.access_log.close(workers.wait)


def observe(settings: Settings, gates: Gates, failures: Failures) -> Observing:
    """Create the observers from the settings, and register them with the gates.

    Raises InvalidSettings if the access log cannot be opened.
    """
    access_log = _access_log(settings)
    if access_log is not None:
        gates.observe(access_log, needs_records=True)
    return Observing(failures, access_log, _gpus(settings))


def _gpus(settings: Settings) -> Gpus:
    if settings.device not in (Device.AUTO, Device.CUDA):
        return Gpus(0)
    return Gpus(settings.gpu_metrics_seconds, is_expected=settings.device is Device.CUDA)


def _access_log(settings: Settings) -> AccessLog | None:
    if not settings.access_log:
        return None
    sampling = Sampling(settings.access_log_rate, round(settings.access_log_slow_ms * 1_000_000))
    file = AccessFile(settings.access_log)
    return AccessLog(file, reported_status, sampling, settings.max_access_records)


def tracing(settings: Settings, gates: Gates, workers: Workers, plane: ControlPlane) -> Tracing:
    """Create the tracer from the settings; raise InvalidSettings if its library is missing."""
    spans = None
    if settings.trace_mode is TraceMode.OPENTELEMETRY:
        # The SDK reads its variables itself; here only their presence is checked.
        spans = OpenTelemetry(os.environ, _MAX_SPANS, version=build.version())
    encrypted = bool(settings.tls_certificate) and TlsEndpoint.HTTP in settings.tls_endpoints
    level = settings.trace_level
    if level is TraceLevel.AUTO:
        level = TraceLevel.OFF if spans is None else TraceLevel.TIMESTAMPS
    start = TraceSetting(
        level.value, settings.trace_rate, settings.trace_count, settings.trace_log_frequency
    )
    return Tracing(
        gates,
        Path(settings.trace_file) if settings.trace_file else None,
        settings.max_trace_bytes,
        workers.wait,
        start=start,
        spans=spans,
        reporting=StatusReporting(reported_status, "https" if encrypted else "http"),
        plane=plane,
    )


_MAX_SPANS = 4096
"""Maximum number of calls queued for export as spans; further ones are dropped and counted."""
