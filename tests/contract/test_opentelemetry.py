"""OpenTelemetry traces: clients' W3C context, and spans at our own collector."""

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.openmetrics import parser
from support import identity_models
from support.http import connect, message
from support.otlp import Collector, collecting
from support.server import Serve
from support.stock import KINDS, Stock, stock_client

from xlaserve.errors import InvalidSettings

read_openmetrics: Any = parser.text_string_to_metric_families
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = f"00-{TRACE}-{SPAN}-01"
PHASES = ["receive", "queue", "execute", "encode"]
MODE: dict[str, Any] = {"trace_mode": "opentelemetry", "load_model": ("*",)}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name in ("echo", "other"):
        identity_models.write(root, name, "FP32")
    tensor = {"data_type": "TYPE_FP32", "dims": [-1]}
    steps = [
        {"model_name": "echo", "input_map": {"x": "x"}, "output_map": {"y": "half"}},
        {"model_name": "other", "input_map": {"x": "half"}, "output_map": {"y": "y"}},
    ]
    config = {
        "platform": "ensemble",
        "input": [{"name": "x", **tensor}],
        "output": [{"name": "y", **tensor}],
        "ensemble_scheduling": {"step": [{**step, "model_version": -1} for step in steps]},
    }
    (root / "both" / "1").mkdir(parents=True)
    (root / "both" / "config.json").write_text(json.dumps(config))
    return root


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collecting() as running:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running.url)
        yield running


async def infer(client: Stock, model: str, **headers: str) -> None:
    tensor = client.input("x", [1], "FP32")
    tensor.set_data_from_numpy(np.zeros(1, np.float32))
    await client.ask("infer", model, [tensor], headers=headers)


def roots(spans: list[Any]) -> list[Any]:
    inner = {span.span_id for span in spans}
    return [span for span in spans if span.parent_span_id not in inner]


def attributes(span: Any) -> dict[str, str]:
    return {one.key: one.value.string_value for one in span.attributes}


def within(spans: list[Any], whole: Any) -> list[str]:
    inner = [span for span in spans if span.parent_span_id == whole.span_id]
    inner.sort(key=lambda span: (span.start_time_unix_nano, span.end_time_unix_nano))
    assert all(whole.start_time_unix_nano <= span.start_time_unix_nano for span in inner)
    assert all(span.end_time_unix_nano <= whole.end_time_unix_nano for span in inner)
    return [span.name for span in inner]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_request_is_part_of_the_trace_of_its_client(
    serve: Serve, models: Path, collector: Collector, kind: str
) -> None:
    async with (
        serve(models, http_endpoint="port:0", **MODE) as server,
        stock_client(kind, server) as client,
    ):
        await infer(client, "echo", traceparent=SAMPLED, tracestate="vendor=value")
        await infer(client, "echo", traceparent=SAMPLED)

    spans = collector.spans
    found = roots(spans)
    assert 2 == len(found)
    for root in found:
        assert (TRACE, SPAN) == (root.trace_id.hex(), root.parent_span_id.hex())
        assert root.name.endswith(("ModelInfer", "POST /v2/models/{model}/infer"))
        assert sorted(PHASES) == sorted(within(spans, root))
    assert ["", "vendor=value"] == sorted(root.trace_state for root in found)
    assert "xlaserve" == collector.resources[0]["service.name"]


async def test_a_trace_that_is_not_sampled_has_no_spans(
    serve: Serve, models: Path, collector: Collector
) -> None:
    async with (
        serve(models, http_endpoint="port:0", **MODE) as server,
        stock_client("http.aio", server) as client,
    ):
        # It does not use up the trace count, either.
        server.application.tracing.update("", {"trace_rate": ["1"], "trace_count": ["1"]})
        await infer(client, "echo", traceparent=f"00-{TRACE}-{SPAN}-00")
        await infer(client, "other")

    assert ["other"] == [attributes(span)["xlaserve.model"] for span in roots(collector.spans)]
    assert TRACE != collector.spans[0].trace_id.hex()


async def test_the_settings_of_triton_drive_it(
    serve: Serve, models: Path, collector: Collector
) -> None:
    async with (
        serve(models, http_endpoint="port:0", **MODE) as server,
        stock_client("grpc.aio", server) as client,
    ):
        settings = {"trace_rate": "2", "trace_count": "2"}
        shown = await client.ask("update_trace_settings", settings=settings, as_json=True)
        for _ in range(10):
            await infer(client, "echo")
        await client.ask("update_trace_settings", "echo", settings={"trace_level": ["OFF"]})
        await infer(client, "echo", traceparent=SAMPLED)

    assert ["opentelemetry"] == shown["settings"]["trace_mode"]["value"]
    assert 2 == len(roots(collector.spans))


async def test_steps_of_an_ensemble_are_spans_within_it(
    serve: Serve, models: Path, collector: Collector
) -> None:
    async with (
        serve(models, **MODE) as server,
        stock_client("grpc.aio", server) as client,
    ):
        await infer(client, "both", traceparent=SAMPLED)

    spans = collector.spans
    (root,) = roots(spans)
    assert "inference.GRPCInferenceService/ModelInfer" == root.name
    names = within(spans, root)
    assert ["step echo", "step other"] == [name for name in names if name.startswith("step")]
    for step in (span for span in spans if span.name.startswith("step")):
        assert sorted(PHASES) == sorted(within(spans, step))


async def test_a_failure_is_in_its_span(serve: Serve, models: Path, collector: Collector) -> None:
    async with (
        serve(models, **MODE) as server,
        stock_client("grpc.aio", server) as client,
    ):
        tensor = client.input("z", [1], "FP32")
        tensor.set_data_from_numpy(np.zeros(1, np.float32))
        await client.fault("infer", "echo", [tensor], headers={"traceparent": SAMPLED})
        await client.fault("infer", "nowhere", [tensor], headers={"traceparent": SAMPLED})

    found = roots(collector.spans)
    assert ["echo", "nowhere"] == [attributes(span)["xlaserve.model"] for span in found]
    said = [str(attributes(span)["xlaserve.error"]) for span in found]
    assert "z" in said[0]
    assert "ModelNotFound" in said[1]


async def test_nobody_waits_for_a_collector_that_is_not_there(
    serve: Serve, models: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "600")
    monkeypatch.setattr("xlaserve.serving.observability.tracing._CLOSING_SECONDS", 0.2)
    async with (
        serve(models, **MODE) as server,
        stock_client("grpc.aio", server) as client,
    ):
        for _ in range(3):
            await infer(client, "echo", traceparent=SAMPLED)

    assert [] == collector.spans
    # Lost spans are counted and logged: one span with four parts per request.
    assert 15 == server.application.tracing.dropped()
    # No thread may keep retrying: it would for 25 seconds, with backoff.
    for thread in threading.enumerate():
        if thread.name.startswith("OtelBatch"):
            await asyncio.to_thread(thread.join, 20)
            assert not thread.is_alive()


@pytest.mark.parametrize("module", ["sdk.trace", "exporter.otlp.proto.http.trace_exporter"])
async def test_a_missing_extra_is_named(
    serve: Serve, models: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    monkeypatch.setitem(sys.modules, f"opentelemetry.{module}", None)
    with pytest.raises(InvalidSettings, match=r"xlaserve\[otel\]"):
        async with serve(models, **MODE):
            pass


async def test_a_protocol_that_there_is_not_is_refused(
    serve: Serve, models: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "carrier-pigeon")
    with pytest.raises(InvalidSettings, match="carrier-pigeon"):
        async with serve(models, **MODE):
            pass


async def test_requests_that_are_sampled_are_exemplars_of_their_buckets(
    serve: Serve, models: Path, collector: Collector
) -> None:
    """With the client's trace id; unsampled and failed requests are no exemplars."""
    accept = ("Accept", "application/openmetrics-text")
    other = "5" * 32
    async with (
        serve(models, http_endpoint="port:0", **MODE) as server,
        stock_client("grpc", server) as client,
    ):
        await infer(client, "other", traceparent=f"00-{other}-{SPAN}-00")
        await infer(client, "echo", traceparent=SAMPLED)
        assert server.http is not None
        async with connect(server.http) as page:
            answer = await page.ask(message("GET", "/metrics", accept))
    found = {
        sample.labels["model"]: sample.exemplar.labels["trace_id"]
        for family in read_openmetrics(answer.body.decode())
        for sample in family.samples
        if sample.exemplar is not None
    }

    assert {"echo": TRACE} == found
