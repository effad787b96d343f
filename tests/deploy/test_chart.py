"""The Helm chart, rendered by helm, and checked against the schemas of Kubernetes and operators.

Runs in a separate environment, `tox run -e deploy`, which builds helm and kubeconform.
"""

import json
import subprocess
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.containers import container_settings
from support.go_tools import go_module, go_program
from support.images import ROOT

import kubernetes_manifests

pytestmark = pytest.mark.large

HELM = "helm.sh/helm/v3/cmd/helm@v3.18.6"
KUBECONFORM = "github.com/yannh/kubeconform/cmd/kubeconform@v0.7.0"
CRDS = (
    (
        "github.com/prometheus-operator/prometheus-operator@v0.85.0",
        "example/prometheus-operator-crd/*_podmonitors.yaml",
    ),
    (
        "github.com/prometheus-operator/prometheus-operator@v0.85.0",
        "example/prometheus-operator-crd/*_servicemonitors.yaml",
    ),
    (
        "sigs.k8s.io/gateway-api-inference-extension@v1.0.1",
        "config/crd/bases/inference.networking.k8s.io_inferencepools.yaml",
    ),
    ("github.com/kserve/kserve@v0.15.2", "config/crd/full/*_clusterservingruntimes.yaml"),
    ("github.com/kserve/kserve@v0.15.2", "config/crd/full/*_inferenceservices.yaml"),
)
MODELS = "--set=models.existingClaim=models"


@pytest.fixture(scope="module")
def helm(pytestconfig: pytest.Config) -> str:
    return go_program(pytestconfig, "helm", HELM)


@pytest.fixture(scope="module")
def schemas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of schemas in kubeconform's layout."""
    package = pytest.importorskip("kubernetes_validate")
    folder = tmp_path_factory.mktemp("schemas")
    source = resources.files(package) / "kubernetes-json-schema"
    for file in (source / f"v{kubernetes_manifests.KUBERNETES}-local-strict").iterdir():
        schema = json.loads(file.read_text().replace("/api/_definitions.json", "_definitions.json"))
        schema.pop("$id", None)
        (folder / file.name).write_text(json.dumps(schema))
    for module, pattern in CRDS:
        (path,) = go_module(module).glob(pattern)
        for name, schema in schemas_of(yaml.safe_load(path.read_text())["spec"]):
            (folder / name).write_text(json.dumps(schema))
    return folder


def schemas_of(crd: Any) -> Sequence[tuple[str, Any]]:
    """Return the schemas of a custom resource, named as for kubeconform; unknown fields fail."""
    kind, group = crd["names"]["kind"].lower(), crd["group"].partition(".")[0]
    return [
        (f"{kind}-{group}-{version['name']}.json", closed(version["schema"]["openAPIV3Schema"]))
        for version in crd["versions"]
    ]


def closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    told = {key: closed(value) for key, value in schema.items()}
    if "properties" in told and not told.get("x-kubernetes-preserve-unknown-fields"):
        told.setdefault("additionalProperties", False)
    if told.pop("x-kubernetes-int-or-string", False):
        told.pop("type", None)
        told["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    return told


@pytest.fixture
def conforms(pytestconfig: pytest.Config, schemas: Path) -> Any:
    kubeconform = go_program(pytestconfig, "kubeconform", KUBECONFORM)
    location = f"{schemas}/{{{{ .ResourceKind }}}}{{{{ .KindSuffix }}}}.json"

    def check(manifests: str) -> str:
        """Return kubeconform's findings; empty if the manifests are valid."""
        command = [kubeconform, "-strict", "-verbose", f"-schema-location={location}"]
        done = subprocess.run(command, input=manifests, capture_output=True, text=True, check=False)
        found = done.stdout.splitlines()
        assert found
        return "\n".join(line for line in found if not line.endswith(" is valid"))

    return check


def test_helm_finds_nothing_wrong(helm: str) -> None:
    command = [helm, "lint", "--strict", MODELS, str(kubernetes_manifests.CHART)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert 0 == done.returncode, done.stdout


@pytest.mark.parametrize("file", kubernetes_manifests.MADE_OF, ids=lambda file: file.stem)
def test_the_manifests_are_those_of_the_chart(helm: str, conforms: Any, file: Path) -> None:
    assert kubernetes_manifests.page(helm, file) == file.read_text()
    assert "" == conforms(file.read_text())


VARIANTS: Sequence[Sequence[str]] = (
    (),
    ("autoscaling.enabled=false", "podMonitor.enabled=false"),
    ("device.kind=cuda", "device.gpus=2"),
    ("tls.existingSecret=a", "tls.clientCaConfigMap=b"),
    ("models.existingClaim=", "models.volume.nfs.server=a", "models.volume.nfs.path=/b"),
    ("models.subPath=here", "cache.existingClaim=c", "serviceAccount.existing=d"),
    ("args={--evict,--strict-json}", "env[0].name=A", "env[0].value=b", "replicas=3"),
    (
        "networkPolicy.clients[0].podSelector.matchLabels.a=b",
        "networkPolicy.egress[0].to[0].podSelector.matchLabels.a=b",
    ),
    ("podAnnotations.a=b", "podLabels.c=d", "nodeSelector.e=f", "priorityClassName=g"),
    ("access.existingSecret=a", "podMonitor.enabled=false", "serviceMonitor.enabled=true"),
    (
        "inferencePool.enabled=true",
        "inferencePool.failureMode=FailOpen",
        "autoscaling.enabled=false",
    ),
    (
        *("extraVolumes[0].name=a", "extraVolumes[0].secret.secretName=b"),
        *("extraVolumeMounts[0].name=a", "extraVolumeMounts[0].mountPath=/c"),
        *("envFrom[0].secretRef.name=d", "autoscaling.queueSeconds=500m"),
    ),
)


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_kubernetes_takes_what_the_chart_makes(
    helm: str, conforms: Any, changes: Sequence[str]
) -> None:
    options = [f"--set={change}" for change in changes]
    text = kubernetes_manifests.rendered(
        helm, kubernetes_manifests.FOLDER / "values.yaml", *options
    )
    pods = [
        one["spec"]["template"]["spec"]
        for one in yaml.safe_load_all(text)
        if one["kind"] == "Deployment"
    ]

    assert "" == conforms(text)
    container_settings(pods[0]["containers"][0])
    mounted = {row["name"] for row in pods[0]["containers"][0]["volumeMounts"]}
    assert mounted == {row["name"] for row in pods[0]["volumes"]}


WRONG: Sequence[tuple[str, str]] = (
    ("models.existingClaim=", "say where the models are"),
    ("models.volume.emptyDir.medium=Memory", "two places"),
    ("tls.clientCaConfigMap=b", "needs tls.existingSecret"),
    ("repository.existingClaim=a", "repository"),
    ("serviceMonitor.enabled=true", "enable one"),
    ("autoscaling.queueSeconds=soon", "/autoscaling/queueSeconds"),
    ("inferencePool.failureMode=Open", "/inferencePool/failureMode"),
    ("device.kind=gpu", "/device/kind"),
    ("replicas=many", "/replicas"),
)


@pytest.mark.parametrize(("change", "said"), WRONG)
def test_the_chart_refuses_what_makes_no_sense(helm: str, change: str, said: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        kubernetes_manifests.rendered(
            helm, kubernetes_manifests.FOLDER / "values.yaml", f"--set={change}"
        )

    assert said in caught.value.stderr


KSERVE = sorted((ROOT / "deploy" / "kserve").glob("*.yaml"))


@pytest.mark.parametrize("path", KSERVE, ids=lambda path: path.stem)
def test_kserve_takes_its_manifests(conforms: Any, path: Path) -> None:
    assert "" == conforms(path.read_text())


def test_a_manifest_that_is_wrong_is_refused(conforms: Any) -> None:
    """Proves that the checks above can fail: an unknown field, and a wrong type."""
    good = kubernetes_manifests.FILE.read_text()

    assert "Deployment" in conforms(
        good.replace("replicas:", "replica:").replace("startupProbe", "startProbe")
    )
    assert "PodMonitor" in conforms(good.replace("podMetricsEndpoints", "podMetricEndpoints"))
