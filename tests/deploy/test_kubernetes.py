"""The manifests for Kubernetes and KServe start a secure server with valid settings."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import yaml
from support.containers import container_settings
from support.images import ROOT, of

import kubernetes_manifests
from xlaserve.process.endpoints import Endpoint
from xlaserve.settings.choices import ModelControlMode

Manifest = Mapping[str, Any]
MANIFESTS: Sequence[Manifest] = tuple(yaml.safe_load_all(kubernetes_manifests.FILE.read_text()))
KSERVE: Manifest = yaml.safe_load((ROOT / "deploy/kserve/serving-runtime.yaml").read_text())


def only(kind: str) -> Any:
    (found,) = (one for one in MANIFESTS if one["kind"] == kind)
    return found


def pod() -> Any:
    return only("Deployment")["spec"]["template"]["spec"]


CONTAINERS = {"kubernetes": pod()["containers"][0], "kserve": KSERVE["spec"]["containers"][0]}


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_starts_a_server_that_its_pod_reaches(name: str) -> None:
    container = CONTAINERS[name]
    settings = container_settings(container)
    served = {
        endpoint.port
        for field in ("grpc_endpoint", "http_endpoint", "metrics_endpoint")
        if (value := getattr(settings, field)) != "http"
        and (endpoint := Endpoint.parse(field, value))
    }

    assert "0.0.0.0" == settings.host
    assert {row["containerPort"] for row in container["ports"]} <= served
    assert ModelControlMode.NONE is settings.model_control_mode, "everybody would load models"
    reference = container["env"][0]["valueFrom"]["resourceFieldRef"]
    assert (container["name"], "requests.memory") == (
        reference["containerName"],
        reference["resource"],
    )


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_may_do_nothing_but_serve(name: str) -> None:
    context = CONTAINERS[name]["securityContext"] | (
        pod()["securityContext"] if name == "kubernetes" else {}
    )

    assert {"drop": ["ALL"]} == context["capabilities"]
    assert (True, False) == (context["runAsNonRoot"], context["allowPrivilegeEscalation"])
    assert of("USER", "server") == [str(context["runAsUser"])]


def test_what_the_server_writes_is_on_a_volume() -> None:
    """The root is read-only: a path that is not mounted would fail a load."""
    container = CONTAINERS["kubernetes"]
    settings = container_settings(container)
    mounts = {row["mountPath"]: row for row in container["volumeMounts"]}

    assert container["securityContext"]["readOnlyRootFilesystem"]
    for path in (settings.compilation_cache_directory, str(settings.scratch_directory), "/tmp"):
        assert not mounts[path].get("readOnly"), path
    assert mounts[str(settings.repository)]["readOnly"]
    assert {row["name"] for row in mounts.values()} == {row["name"] for row in pod()["volumes"]}


def test_the_pod_waits_for_the_server_to_end() -> None:
    """The pod sleeps, then the server drains; only after both may it be killed."""
    settings = container_settings(CONTAINERS["kubernetes"])
    sleeps = CONTAINERS["kubernetes"]["lifecycle"]["preStop"]["sleep"]["seconds"]

    assert pod()["terminationGracePeriodSeconds"] > sleeps + settings.grace_seconds


def test_the_autoscaler_counts_by_a_metric_that_there_is() -> None:
    """The adapter averages over pods, so the metric must be a gauge whose sum has a meaning."""
    (metric,) = only("HorizontalPodAutoscaler")["spec"]["metrics"]
    name = metric["pods"]["metric"]["name"]

    assert f"| `{name}` | gauge |" in (ROOT / "docs/metrics.md").read_text()


def test_what_selects_the_pods_selects_them() -> None:
    labels = only("Deployment")["spec"]["template"]["metadata"]["labels"]
    selectors = [
        only("Deployment")["spec"]["selector"]["matchLabels"],
        only("Service")["spec"]["selector"],
        only("PodMonitor")["spec"]["selector"]["matchLabels"],
        only("NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
        only("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
    ]

    for selector in selectors:
        assert selector.items() <= labels.items()
    names = {row["name"] for row in CONTAINERS["kubernetes"]["ports"]}
    asked = {row["targetPort"] for row in only("Service")["spec"]["ports"]}
    assert asked | {only("PodMonitor")["spec"]["podMetricsEndpoints"][0]["port"]} <= names


def test_probes_ask_where_no_certificate_is_needed() -> None:
    container = CONTAINERS["kubernetes"]
    settings = container_settings(container)
    probes = [container[kind]["httpGet"] for kind in container if kind.endswith("Probe")]
    port = Endpoint.parse("metrics_endpoint", settings.metrics_endpoint)

    assert {"metrics"} == {probe["port"] for probe in probes}
    assert port
    assert {"name": "metrics", "containerPort": port.port} in container["ports"]
    assert {"/v2/health/live", "/v2/health/ready"} == {probe["path"] for probe in probes}
