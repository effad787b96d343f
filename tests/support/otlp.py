"""An OpenTelemetry collector on the loopback: OTLP over HTTP, as protobuf."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from typing import Any

from support.tools import missing

_MESSAGES = "opentelemetry.proto.collector.trace.v1.trace_service_pb2"

ExportTraceServiceRequest: Any = None
with suppress(ImportError):
    ExportTraceServiceRequest = import_module(_MESSAGES).ExportTraceServiceRequest


def needs_sdk() -> None:
    """Skip the test, or fail it in CI, if the OpenTelemetry SDK is missing."""
    if ExportTraceServiceRequest is None:
        missing("opentelemetry-sdk and its exporter over HTTP are not installed")


class Collector:
    """Collects spans from all export requests."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Any] = []
        self._resources: list[dict[str, str]] = []
        self.url = ""

    def take(self, body: bytes) -> None:
        """Decode an export request."""
        request = ExportTraceServiceRequest.FromString(body)
        with self._lock:
            for resource in request.resource_spans:
                named = {a.key: a.value.string_value for a in resource.resource.attributes}
                self._resources.append(named)
                for scope in resource.scope_spans:
                    self._spans += scope.spans

    @property
    def spans(self) -> list[Any]:
        """Return the spans received so far."""
        with self._lock:
            return list(self._spans)

    @property
    def resources(self) -> list[dict[str, str]]:
        """Return the resource attributes of each request."""
        with self._lock:
            return list(self._resources)


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector for the duration of a block."""
    needs_sdk()
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                raise AssertionError("nobody asked for gzip")
            collector.take(body)
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Do not log requests."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
