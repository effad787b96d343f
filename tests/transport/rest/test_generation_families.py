"""Metrics of generators: histograms, gauges, and sums over models that share a series."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from xlaserve.http.metrics.metrics import Metrics
from xlaserve.model_config.config import ModelConfig
from xlaserve.residence.capacity import Capacity, Reservation
from xlaserve.residence.lifecycle import Event
from xlaserve.residence.registry import Instance, Registry
from xlaserve.runtime.generator.counts import BOUNDS_NS, GenerationCounts
from xlaserve.runtime.loaded import ModelInfo

PREFIX = "xlaserve_generation_"


def load(registry: Registry, name: str, **more: Any) -> None:
    info = ModelInfo("generator", (), (), 0)
    runner: Any = SimpleNamespace(info=info, replicas=1, **more)
    version = registry.version(name, "1")
    registry.change(version, Event.LOAD)
    station: Any = SimpleNamespace(pending_since=lambda: iter([1, 2]))
    version.instance = Instance(
        *(runner, 1, Reservation(Capacity(), name), ModelConfig()),
        make_station=lambda instance, before: station,
    )
    registry.change(version, Event.LOADED)


async def scrape(registry: Registry, **settings: Any) -> Mapping[tuple[str, str, str], float]:
    metrics = Metrics(registry, Capacity(), **settings)
    text = b"".join(await metrics.parts()).decode()
    return {
        (sample.name, sample.labels["model"], sample.labels.get("le", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith(PREFIX)
    }


def counts() -> GenerationCounts:
    found = GenerationCounts(4, 256, running=1, positions_used=9, prompt_tokens=8, host_ns=10**9)
    found.cached_tokens, found.prefix_lookups, found.prefix_hits = 5, 3, 2
    found.preemptions = 6
    for ns in (BOUNDS_NS[0], BOUNDS_NS[0] + 1, 10**15):
        found.first_token.add(ns)
    return found


async def test_a_generator_has_rows_and_other_models_have_none() -> None:
    """A time equal to a bound is in that bucket; without samples there is no histogram."""
    registry = Registry(10)
    load(registry, "story", counts=counts())
    load(registry, "other_kind")
    found = await scrape(registry)
    buckets = [
        value
        for (name, _, _), value in found.items()
        if name == f"{PREFIX}first_token_seconds_bucket"
    ]

    assert {"story"} == {model for _, model, _ in found}
    assert [1, 2, 2] == buckets[:3]
    assert (2, 3) == (buckets[-2], buckets[-1])
    assert 3 == found[f"{PREFIX}first_token_seconds_count", "story", ""]
    assert not any(name.startswith(f"{PREFIX}token_seconds") for name, _, _ in found)
    assert [2, 1, 4, 9, 256, 8, 1.0, 5, 3, 2, 6] == [
        found[f"{PREFIX}{name}", "story", ""]
        for name in (
            *("waiting", "running", "slots", "positions_used", "positions"),
            *("prompt_tokens_total", "host_seconds_total", "cached_tokens_total"),
            *("prefix_lookups_total", "prefix_hits_total", "preemptions_total"),
        )
    ]


async def test_generators_beyond_the_limit_share_one_series() -> None:
    registry = Registry(10)
    for name in ("a", "b", "c"):
        load(registry, name, counts=counts())
    found = await scrape(registry, max_versions=1)

    assert {"a", "other"} == {model for _, model, _ in found}
    for name, value in (("waiting", 4), ("slots", 8), ("first_token_seconds_count", 6)):
        assert value == found[f"{PREFIX}{name}", "other", ""]
