"""Pods behind llm-d's endpoint picker: `/metrics` as the picker reads it."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from support.containers import container_settings
from support.images import ROOT
from support.server import Serve

import kubernetes_manifests
from xlaserve.http.metrics.generation_families import OF_GENERATORS, GenerationReading
from xlaserve.http.metrics.metric_folds import FoldedMetrics
from xlaserve.process.endpoints import Endpoint
from xlaserve.runtime.generator.counts import GenerationCounts

PICKER: Any = yaml.safe_load((ROOT / "deploy/kubernetes/endpoint-picker.yaml").read_text())
PLUGINS: Mapping[str, Any] = {row.get("name", row["type"]): row for row in PICKER["plugins"]}
EXTRACTOR: Any = PLUGINS["metrics-extractor"]["parameters"]
SPECS = ("queuedRequestsSpec", "runningRequestsSpec", "kvUsageSpec")
POOL: Mapping[str, Any] = {
    one["kind"]: one for one in yaml.safe_load_all(kubernetes_manifests.POOL.read_text())
}


def engine() -> Mapping[str, str]:
    (found,) = EXTRACTOR["engineConfigs"]
    return dict(found)


def picked(text: str) -> Mapping[str, float]:
    """Return the picker's readings: one series of each configured gauge."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for spec in SPECS:
            if family.name == engine()[spec]:
                (sample,) = family.samples
                assert ("gauge", {}) == (family.type, sample.labels)
                found[spec] = sample.value
    return found


async def test_a_server_without_generators_has_the_gauges_at_nought(
    serve: Serve, tmp_path: Path
) -> None:
    """Without them the picker would treat the pod as unresponsive."""
    async with (
        serve(tmp_path, http_endpoint="port:0") as server,
        aiohttp.ClientSession() as session,
        session.get(f"http://{server.http}/metrics") as answer,
    ):
        assert dict.fromkeys(SPECS, 0.0) == picked(await answer.text())


def reading(slots: int, length: int, used: int, running: int, waiting: int) -> GenerationReading:
    counts = GenerationCounts(slots, slots * length, running=running, positions_used=used)
    return GenerationReading(counts, waiting)


def text_of(*readings: GenerationReading) -> str:
    total = GenerationReading.sum_of(readings)
    rows = ([family.head, *family.lines("", total)] for family in OF_GENERATORS)
    return "".join(line for lines in rows for line in lines)


def test_all_models_of_a_pod_are_one_series() -> None:
    """Not the mean of their shares: one cache has a hundred rows and the other three hundred."""
    text = text_of(reading(1, 100, 100, 1, 5), reading(3, 100, 0, 0, 2))

    assert {"queuedRequestsSpec": 7, "runningRequestsSpec": 1, "kvUsageSpec": 0.25} == picked(text)


def test_processes_of_a_server_are_one_pod() -> None:
    folded = FoldedMetrics()
    for worker, one in (("0", reading(1, 100, 100, 1, 5)), ("1", reading(1, 100, 10, 1, 0))):
        assert [] == list(folded.add(worker, text_of(one)))

    found = picked("".join(folded.texts()))
    assert {"queuedRequestsSpec": 5, "runningRequestsSpec": 2, "kvUsageSpec": 1.0} == found


def test_the_pods_of_the_chart_are_those_of_the_picker() -> None:
    template = POOL["Deployment"]["spec"]["template"]
    labels, container = template["metadata"]["labels"], template["spec"]["containers"][0]
    settings = container_settings(container)
    http = Endpoint.parse("http_endpoint", settings.http_endpoint)
    pool = POOL["InferencePool"]["spec"]

    assert engine()["name"] == labels[EXTRACTOR["engineLabelKey"]] == EXTRACTOR["defaultEngine"]
    assert pool["selector"]["matchLabels"].items() <= labels.items()
    assert http
    assert [{"number": http.port}] == pool["targetPorts"]
    assert "http" == settings.metrics_endpoint, "the picker reads where requests are served"
    assert http.port in {row["containerPort"] for row in container["ports"]}


def test_monitoring_that_reaches_the_api_has_a_rule_for_its_port() -> None:
    """The page shows it with the pool: on the request port, for metrics and probes only."""
    policy = POOL["NetworkPolicy"]["spec"]["ingress"]
    clients, monitoring = ([port["port"] for port in rule["ports"]] for rule in policy)
    text = (ROOT / "docs/kubernetes.md").read_text()
    section = text.partition("behind an InferencePool")[2].partition("\n## ")[0]
    (caller,) = tomllib.loads(section.partition("```toml")[2].partition("```")[0])["caller"]

    assert monitoring == ["http"]
    assert set(monitoring) < set(clients)
    assert caller["listener"] == "http_endpoint"
    assert {"health", "metrics"} == set(caller["allow"])


@pytest.mark.parametrize("place", ["schedulingProfiles", "dataLayer"])
def test_the_configuration_names_plugins_that_it_has(place: str) -> None:
    def references(value: Any) -> list[str]:
        if isinstance(value, list):
            return [name for one in value for name in references(one)]
        if not isinstance(value, dict):
            return []
        own = [value["pluginRef"]] if "pluginRef" in value else []
        return own + [name for one in value.values() for name in references(one)]

    found = references(PICKER[place])
    assert found
    assert set(found) <= PLUGINS.keys()


def test_the_page_shows_the_same_gauges() -> None:
    page = (ROOT / "docs/kubernetes.md").read_text()

    assert [] == [name for name in (engine()[spec] for spec in SPECS) if f"`{name}`" not in page]
