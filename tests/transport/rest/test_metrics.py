"""The Prometheus text format, read back by prometheus-client's parser."""

import asyncio
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs
from support.calls import NotedCall
from support.executions import succeed

from xlaserve.errors import ModelNotFound, XlaserveError
from xlaserve.grpc.http2.limits import Shared
from xlaserve.http.metrics.metric_families import OF_VERSIONS
from xlaserve.http.metrics.metrics import Metrics
from xlaserve.http.metrics.observing_families import ObservingReading
from xlaserve.model_config.config import ModelConfig
from xlaserve.net.ledger import Kind, Ledger
from xlaserve.net.memory import MessageMemory
from xlaserve.residence.capacity import Capacity, Reservation
from xlaserve.residence.lifecycle import Event
from xlaserve.residence.registry import Instance, Registry, Version
from xlaserve.runtime.loaded import Bucket, ModelInfo, ModelMemory
from xlaserve.serving.answers import Counting
from xlaserve.serving.gates import Gates
from xlaserve.serving.observability.failures import Failures
from xlaserve.serving.statistics import NO_OFFLOADS, Offloads

Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


def loaded(
    registry: Registry,
    capacity: Capacity,
    name: str = "m",
    number: str = "1",
    waiting: Sequence[int] = (),
) -> Version:
    info = ModelInfo(
        "fake",
        (),
        (),
        8,
        ModelMemory(1, 2, 4, 8, {"cpu:0": 10, "cpu:1": 5}),
        buckets=tuple(Bucket(rows, 0.0, 0.0) for rows in (1, 2, 4, 8)),
        compile_seconds=1.5,
    )
    reservation = Reservation(capacity, name)
    reservation.set({"cpu:0": info.memory.total_bytes})
    runner: Any = SimpleNamespace(info=info, replicas=1)
    version = registry.version(name, number)
    registry.change(version, Event.LOAD)
    station: Any = SimpleNamespace(pending_since=lambda: iter(waiting))
    version.instance = Instance(
        runner, 1, reservation, ModelConfig(), make_station=lambda instance, before: station
    )
    version.statistics.loaded(2.5)
    registry.change(version, Event.LOADED)
    return version


async def scrape(metrics: Metrics) -> Samples:
    text = b"".join(await metrics.parts()).decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float | None:
    return samples.get((name, frozenset(labels.items())))


M = {"model": "m", "version": "1"}


@pytest.fixture
def registry() -> Registry:
    return Registry(10)


@pytest.fixture
def capacity() -> Capacity:
    return Capacity({"cpu:0": 100})


async def test_requests_are_counted_by_tritons_names(
    registry: Registry, capacity: Capacity
) -> None:
    """The parser names every counter `_total`, as OpenMetrics does."""
    statistics = loaded(registry, capacity).statistics
    succeed(statistics, 3, (1_000, 4_000, 9_000, 15_000, 22_000), 10**18)
    statistics.failed(ValueError(), 1)
    samples = await scrape(Metrics(registry, capacity))
    counters = {
        name: value(samples, f"nv_inference_{name}_total", **M)
        for name in (
            "request_success",
            "count",
            "exec_count",
            "request_duration_us",
            "queue_duration_us",
            "compute_input_duration_us",
            "compute_infer_duration_us",
            "compute_output_duration_us",
        )
    }

    assert [1, 3, 1, 21, 5, 3, 6, 7] == list(counters.values())
    assert {"BACKEND": 1, "REJECTED": 0, "CANCELED": 0, "OTHER": 0} == {
        reason: value(samples, "nv_inference_request_failure_total", reason=reason, **M)
        for reason in ("BACKEND", "REJECTED", "CANCELED", "OTHER")
    }


async def test_gauges_of_a_loaded_model(registry: Registry, capacity: Capacity) -> None:
    loaded(registry, capacity)
    samples = await scrape(Metrics(registry, capacity, {"grpc": lambda: 3}))
    parts = ("parameters", "constants", "temporaries", "executables")

    assert [1, 2, 4, 8] == [
        value(samples, "xlaserve_model_bytes", part=part, **M) for part in parts
    ]
    assert [1.5, 2.5, 1, 0] == [
        value(samples, name, **M)
        for name in (
            "xlaserve_model_compile_seconds",
            "nv_model_load_duration_secs",
            "xlaserve_model_ready",
            "nv_inference_pending_request_count",
        )
    ]
    assert [100, 15] == [
        value(samples, name) for name in ("xlaserve_capacity_bytes", "xlaserve_capacity_used_bytes")
    ]
    assert [100, 15] == [
        value(samples, f"xlaserve_device_capacity_{name}", device="cpu:0")
        for name in ("bytes", "used_bytes")
    ]
    assert 0 == value(samples, "xlaserve_requests_in_progress", model="m")
    assert 3 == value(samples, "xlaserve_connections", protocol="grpc")


async def test_a_model_that_is_not_loaded_keeps_its_counters_only(
    registry: Registry, capacity: Capacity
) -> None:
    version = loaded(registry, capacity)
    registry.change(version, Event.UNLOAD)
    version.instance = None
    samples = await scrape(Metrics(registry, capacity))

    assert 0 == value(samples, "xlaserve_model_ready", **M)
    assert 1 == value(samples, "xlaserve_model_loads_total", **M)
    assert value(samples, "xlaserve_model_bytes", part="parameters", **M) is None
    assert value(samples, "xlaserve_model_compile_seconds", **M) is None


@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 10**11)), min_size=1, max_size=20))
async def test_histograms_end_with_the_count_and_never_fall(
    requests: list[tuple[int, int]],
) -> None:
    registry, capacity = Registry(10), Capacity({"cpu:0": 100})
    statistics = loaded(registry, capacity).statistics
    for rows, ended in requests:
        succeed(statistics, rows, (0, 0, 0, 0, ended))
    samples = await scrape(Metrics(registry, capacity))
    sums = {
        "xlaserve_request_seconds": (sum(ended for _, ended in requests) / 1e9, 1e9),
        "xlaserve_batch_size": (sum(rows for rows, _ in requests), 1),
    }
    values = [[ended for _, ended in requests], [rows for rows, _ in requests]]
    for (name, (total, unit)), measured in zip(sums.items(), values, strict=True):
        buckets = {
            float(dict(labels)["le"]): count
            for (found, labels), count in samples.items()
            if found == f"{name}_bucket"
        }

        assert len(requests) == buckets[float("inf")] == value(samples, f"{name}_count", **M)
        assert total == value(samples, f"{name}_sum", **M)
        assert {
            bound: sum(each <= bound * unit for each in measured) for bound in buckets
        } == buckets


@pytest.mark.parametrize("name", ['a"b', "back\\slash\\n", "new\nline", "ünï 名", "{}", "a,b=c"])
async def test_a_name_may_hold_anything(registry: Registry, capacity: Capacity, name: str) -> None:
    """A model name must not be able to inject metrics."""
    loaded(registry, capacity, name)
    samples = await scrape(Metrics(registry, capacity))

    assert 1 == value(samples, "xlaserve_model_ready", model=name, version="1")
    assert 0 == value(samples, "xlaserve_requests_in_progress", model=name)


async def test_the_process_is_measured_without_global_state(
    registry: Registry, capacity: Capacity
) -> None:
    samples = [await scrape(Metrics(registry, capacity)) for _ in range(2)]

    assert all(0 < (value(each, "process_resident_memory_bytes") or 0) for each in samples)
    assert all(0 < (value(each, "process_open_fds") or 0) for each in samples)
    assert all(value(each, "process_cpu_seconds_total") is not None for each in samples)


async def test_requests_have_their_turn_during_a_scrape(
    registry: Registry, capacity: Capacity
) -> None:
    for number in range(100):
        loaded(registry, Capacity(), f"m{number}")
    turns = 0
    scraping = asyncio.ensure_future(Metrics(registry, capacity).parts())
    while not scraping.done():
        turns += 1
        await asyncio.sleep(0)

    assert len(OF_VERSIONS) + 3 < turns


async def test_a_version_that_is_forgotten_has_no_rows(
    registry: Registry, capacity: Capacity
) -> None:
    version = loaded(registry, capacity)
    registry.change(version, Event.UNLOAD)
    registry.change(version, Event.UNLOADED)
    registry.forget("m")
    samples = await scrape(Metrics(registry, capacity))

    assert not any(dict(labels).get("model") for _, labels in samples)


async def test_what_clients_make_the_server_hold(registry: Registry, capacity: Capacity) -> None:
    shared = Shared(Ledger(64 << 20), MessageMemory(8 << 20))
    account = shared.ledger.open()
    for count, kind in ((5, Kind.REQUESTS), (7, Kind.ANSWERS), (11, Kind.AHEAD)):
        account.hold(count, kind)
    assert not account.reserve(64 << 20)
    account.wait(32 << 20, lambda: None)
    shared.memory.take(1 << 20)
    samples = await scrape(Metrics(registry, capacity, shared=shared))

    assert [5, 7, 11, 1 << 20] == [
        value(samples, "xlaserve_held_bytes", kind=kind)
        for kind in ("requests", "answers", "ahead", "spare")
    ]
    assert [64 << 20, 1, 1] == [
        value(samples, name)
        for name in (
            "xlaserve_held_limit_bytes",
            "xlaserve_held_refusals_total",
            "xlaserve_held_waits_total",
        )
    ]


async def test_buckets_and_padding_follow_from_the_batches(
    registry: Registry, capacity: Capacity
) -> None:
    statistics = loaded(registry, capacity).statistics
    # The last one comes from an earlier instance, which had larger batches.
    for rows in (3, 3, 4, 5, 16):
        succeed(statistics, rows, (0, 0, 0, 0, 1))
    samples = await scrape(Metrics(registry, capacity))

    assert {"4": 3.0, "8": 1.0, "16": 1.0} == {
        rows: value(samples, "xlaserve_bucket_executions_total", rows=rows, **M)
        for rows in ("4", "8", "16")
    }
    assert 1 + 1 + 3 == value(samples, "xlaserve_padding_rows_total", **M)
    assert [10, 5] == [
        value(samples, "xlaserve_model_device_bytes", device=device, **M)
        for device in ("cpu:0", "cpu:1")
    ]


async def test_versions_beyond_the_limit_share_one_series(capacity: Capacity) -> None:
    """The text stays bounded, no count is lost, and the log reports it once."""
    registry = Registry(10)
    for number in range(5):
        waiting = [10**10, (9 - number) * 10**9]
        statistics = loaded(registry, Capacity(), f"m{number}", waiting=waiting).statistics
        succeed(statistics, 2, (0, 0, 0, 0, 10**6))
        statistics.failed(ValueError(), 1)
    metrics = Metrics(registry, capacity, max_versions=2, now_ns=lambda: 10**10)
    with capture_logs() as logged:
        samples = await scrape(metrics)
        await scrape(metrics)
    other = {"model": "other", "version": "other"}

    assert {"m0", "m1", "other"} == {
        dict(labels)["model"] for _, labels in samples if "model" in dict(labels)
    }
    assert 3 == value(samples, "nv_inference_request_success_total", **other)
    assert 6 == value(samples, "nv_inference_count_total", **other)
    assert 3 == value(samples, "nv_inference_request_failure_total", reason="BACKEND", **other)
    assert 3 == value(samples, "xlaserve_request_seconds_bucket", le="+Inf", **other)
    assert 3 == value(samples, "xlaserve_model_ready", **other)
    assert 6 == value(samples, "nv_inference_pending_request_count", **other)
    assert 5 == value(samples, "xlaserve_queue_age_seconds", **other)
    assert 1 == value(samples, "xlaserve_queue_age_seconds", model="m0", version="1")
    assert 3 == value(samples, "xlaserve_model_loads_total", **other)
    assert 1 == len(logged)
    assert ("other", 3) == (logged[0]["series"], logged[0]["versions"])


@pytest.mark.parametrize("most", [2, 0])
async def test_batches_of_other_workers_are_counted(capacity: Capacity, most: int) -> None:
    """By outcome, also for versions that share a series. Without offloading there are no rows."""
    registry = Registry(2)
    for name, offloads in (("n", NO_OFFLOADS), ("m", Offloads(3, 100, 2, 1))):
        loaded(registry, capacity, name).statistics.offloads = offloads
    samples = await scrape(Metrics(registry, capacity, max_versions=most))
    labels = M if most == 2 else {"model": "other", "version": "other"}
    batches, size = "xlaserve_offloaded_batches_total", "xlaserve_offloaded_bytes_total"

    assert [3, 2, 1] == [
        value(samples, batches, **labels, outcome=outcome)
        for outcome in ("executed", "refused", "lost")
    ]
    assert 100 == value(samples, size, **labels)
    assert 4 == sum(name in (batches, size) for name, _ in samples)


async def test_failures_are_counted_by_their_reason(registry: Registry, capacity: Capacity) -> None:
    failures = Failures()
    counting = Counting(failures=failures)
    gates = Gates(observers=[counting])
    for error in (ModelNotFound("m"), ModelNotFound("n"), ValueError("secret"), None):
        call = NotedCall(model="m")
        gates.admit(call)
        call.end(error)
    samples = await scrape(
        Metrics(registry, capacity, observing=ObservingReading(failures=failures))
    )

    assert [2, 1] == [
        value(samples, "xlaserve_refusals_total", reason=reason)
        for reason in ("ModelNotFound", "Unexpected")
    ]
    assert ["", str(ModelNotFound("n")), str(ModelNotFound("m"))] == [
        failure.text for failure in failures.last
    ]


def test_reasons_and_last_failures_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xlaserve.serving.observability.failures.MAX_REASONS", 2)
    failures = Failures()
    for number in range(200):
        kind = type(f"Made{number}", (XlaserveError,), {})
        failures.note(NotedCall(model="m" * 10_000), kind("x" * 10_000), number)

    assert 3 == len(failures.counts)
    assert 198 == failures.counts["Other"]
    assert 50 == len(failures.last)
    assert all(len(failure.text) + len(failure.model) < 1000 for failure in failures.last)


async def test_the_lag_of_the_event_loop_is_a_histogram(
    registry: Registry, capacity: Capacity
) -> None:
    reading = ObservingReading()
    for seconds in (-0.1, 0.002, 9.0):
        reading.lag.note(seconds)
    samples = await scrape(Metrics(registry, capacity, observing=reading))
    name = "xlaserve_event_loop_lag_seconds"

    assert [1, 2, 3] == [
        value(samples, f"{name}_bucket", le=le) for le in ("0.001", "0.0025", "+Inf")
    ]
    assert 3 == value(samples, f"{name}_count")
    assert 9.002 == value(samples, f"{name}_sum")
