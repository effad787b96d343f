"""Rules of ModelMesh's controller for manifests; each yields a manifest's violations."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

import yaml

from support.containers import container_settings
from xlaserve.cli.health import health
from xlaserve.errors import InvalidSettings
from xlaserve.process.endpoints import MAX_UNIX_PATH_BYTES, Endpoint
from xlaserve.settings import Settings
from xlaserve.settings.choices import Device
from xlaserve.settings.reading import CONTAINER_MEMORY_VARIABLES

Manifest: TypeAlias = dict[str, Any]
Rule: TypeAlias = Callable[[Manifest], Iterator[str]]

FOLDER = Path(__file__).resolve().parent.parent.parent / "deploy" / "modelmesh"

# --- Known fields (Implementing a Custom Serving Runtime, Spec Attributes; the CRDs) -------------

_FREE_FIELDS = "annotations labels requests limits parameters nodeSelector affinity tolerations"
"""Fields whose content ModelMesh does not define."""
_RUNTIME: Mapping[str, str] = {
    "": "apiVersion kind metadata spec",
    "metadata": "name annotations labels",
    "spec": "supportedModelFormats protocolVersions multiModel disabled containers grpcEndpoint "
    "grpcDataEndpoint storageHelper replicas nodeSelector affinity tolerations volumes",
    "spec.supportedModelFormats": "name version autoSelect",
    "spec.storageHelper": "disabled",
    "spec.volumes": "name emptyDir",
    "spec.containers": "name image imagePullPolicy command args env resources workingDir ports "
    "volumeMounts livenessProbe readinessProbe lifecycle",
    "spec.containers.env": "name value valueFrom",
    "spec.containers.env.valueFrom": "resourceFieldRef secretKeyRef",
    "spec.containers.env.valueFrom.resourceFieldRef": "containerName resource divisor",
    "spec.containers.env.valueFrom.secretKeyRef": "name key",
    "spec.containers.resources": "requests limits",
    "spec.containers.ports": "name containerPort protocol",
    "spec.containers.volumeMounts": "name mountPath readOnly",
    "spec.containers.livenessProbe": "exec httpGet initialDelaySeconds periodSeconds "
    "timeoutSeconds failureThreshold",
    "spec.containers.livenessProbe.exec": "command",
}
_SERVICE: Mapping[str, str] = {
    "": "apiVersion kind metadata spec",
    "metadata": "name annotations labels",
    "spec": "predictor",
    "spec.predictor": "model",
    "spec.predictor.model": "modelFormat protocolVersion runtime storage storageUri",
    "spec.predictor.model.modelFormat": "name version",
    "spec.predictor.model.storage": "key path schemaPath parameters",
}
_PREDICTOR: Mapping[str, str] = {
    "": "apiVersion kind metadata spec",
    "metadata": "name annotations labels",
    "spec": "modelType path schemaPath protocolVersion runtime storage",
    "spec.modelType": "name version",
    "spec.runtime": "name",
    "spec.storage": "s3",
    "spec.storage.s3": "secretKey bucket",
}
_FIELDS: Mapping[str, Mapping[str, str]] = {
    "serving.kserve.io/v1alpha1 ServingRuntime": _RUNTIME,
    "serving.kserve.io/v1alpha1 ClusterServingRuntime": _RUNTIME,
    "serving.kserve.io/v1beta1 InferenceService": _SERVICE,
    "serving.kserve.io/v1alpha1 Predictor": _PREDICTOR,
}

# --- Reserved names and ports (servingruntime_validator.go, const.go) ----------------------------

_RESERVED_CONTAINERS = frozenset({"mm", "puller", "rest-proxy"})
_RESERVED_VOLUMES = frozenset(
    {"domain-socket", "models-dir", "storage-config", "etcd-config", "tc-config"}
)
_RESERVED_PORT_NAMES = frozenset({"grpc", "http", "prometheus"})
_REFUSED_PORTS = frozenset({8080, 8085, 8089, 8090, *range(11881, 11900)})
"""Container ports that the validator rejects."""
_PORTS_IN_USE = frozenset({8080, 8089, 8090, 8033, 8086, 8008, 2112})
"""Ports of the mesh, puller, proxy and metrics, in the network namespace that all containers share.
8085 belongs to the adapter, and is free without one.
"""
_MOUNTED = frozenset({"/models", "/pvc_mounts", "/storage-config"})

# --- Rules ---------------------------------------------------------------------------------------


def unknown_fields(manifest: Manifest) -> Iterator[str]:
    """Every field must exist in this kind of manifest."""
    kind = f"{manifest['apiVersion']} {manifest['kind']}"
    if kind in _FIELDS:
        yield from _walk(manifest, "", _FIELDS[kind])
    else:
        yield f"unknown kind {kind}"


def _walk(value: object, place: str, allowed: Mapping[str, str]) -> Iterator[str]:
    if isinstance(value, list):
        for part in value:
            yield from _walk(part, place, allowed)
    if not isinstance(value, dict):
        return
    for name, inner in value.items():
        if name not in allowed.get(place, "").split():
            yield f"unknown field {place}.{name}"
        elif name not in _FREE_FIELDS.split():
            yield from _walk(inner, f"{place}.{name}".removeprefix("."), allowed)


def many_models(manifest: Manifest) -> Iterator[str]:
    """The controller must accept the runtime, and the mesh must select it by model format."""
    spec = manifest["spec"]
    if spec.get("multiModel") is not True or spec.get("disabled"):
        yield "not for ModelMesh"
    if "grpc-v2" not in spec.get("protocolVersions", ()):
        yield "no protocol"
    if not any(row.get("autoSelect") for row in spec.get("supportedModelFormats", ())):
        yield "never chosen for a model"


def reserved_names(manifest: Manifest) -> Iterator[str]:
    """Containers, volumes and ports must not have the names of those the controller adds."""
    names = [(row["name"], _RESERVED_VOLUMES) for row in manifest["spec"].get("volumes", ())]
    for container in manifest["spec"]["containers"]:
        names.append((container["name"], _RESERVED_CONTAINERS))
        names += ((row["name"], _RESERVED_VOLUMES) for row in container.get("volumeMounts", ()))
        names += ((row["name"], _RESERVED_PORT_NAMES) for row in container.get("ports", ()))
    for name, reserved in names:
        if name in reserved or name.startswith("mm-"):
            yield f"{name} is reserved"


def reserved_ports(manifest: Manifest) -> Iterator[str]:
    """No declared port may be in use by another container of the pod."""
    for container in manifest["spec"]["containers"]:
        for port in container.get("ports", ()):
            if port["containerPort"] in _REFUSED_PORTS | _PORTS_IN_USE:
                yield f"port {port['containerPort']} is taken"


def managed_fields(manifest: Manifest) -> Iterator[str]:
    """Readiness probes and lifecycle hooks are reserved for ModelMesh."""
    for container in manifest["spec"]["containers"]:
        for name in ("readinessProbe", "lifecycle"):
            if name in container:
                yield f"{name} is ModelMesh's"


def _endpoints(manifest: Manifest) -> list[Endpoint]:
    names = ("grpcEndpoint", "grpcDataEndpoint")
    endpoints = (Endpoint.parse(name, str(manifest["spec"].get(name))) for name in names)
    return [endpoint for endpoint in endpoints if endpoint is not None]


def reachable_endpoints(manifest: Manifest) -> Iterator[str]:
    """Endpoints must have a form and an address that the mesh accepts."""
    try:
        endpoints = _endpoints(manifest)
    except InvalidSettings as error:
        yield str(error)
        return
    if len({endpoint.path.parent for endpoint in endpoints if endpoint.path}) > 1:
        yield "sockets in two directories"
    for endpoint in endpoints:
        if endpoint.port is not None and endpoint.port in _PORTS_IN_USE | {0}:
            yield f"port {endpoint.port} is taken"


def socket_folder(manifest: Manifest) -> Iterator[str]:
    """The sockets' directory must be free for the controller's own mount.

    The controller mounts an empty directory there in every container. It would hide files of
    the image, or collide with another mount.
    """
    mounts = set(_MOUNTED)
    for container in manifest["spec"]["containers"]:
        mounts |= {row["mountPath"] for row in container.get("volumeMounts", ())}
    for text in map(str, map(manifest["spec"].get, ("grpcEndpoint", "grpcDataEndpoint"))):
        path = PurePosixPath(text.removeprefix("unix:"))
        if not text.startswith("unix:"):
            continue
        if not path.is_absolute() or len(str(path)) > MAX_UNIX_PATH_BYTES:
            yield f"{path} is not an absolute path that fits"
        elif path.parent == PurePosixPath("/") or mounts & {str(path.parent)}:
            yield f"{path.parent} is not a directory of the socket alone"


def accepted_settings(manifest: Manifest) -> Iterator[str]:
    """Flags and environment variables must be valid settings."""
    try:
        _settings(manifest)
    except InvalidSettings as error:
        yield str(error)


def _settings(manifest: Manifest) -> Settings:
    return container_settings(_server(manifest))


def _server(manifest: Manifest) -> Manifest:
    servers = [row for row in manifest["spec"]["containers"] if row.get("args")]
    assert len(servers) == 1
    return dict(servers[0])


def one_server(manifest: Manifest) -> Iterator[str]:
    """The server's settings must match what the manifest tells the mesh."""
    try:
        settings = _settings(manifest)
    except InvalidSettings:
        return
    spec = manifest["spec"]
    if not settings.modelmesh or str(settings.repository) != "/models":
        yield "the server does not serve the mesh"
    if settings.grpc_endpoint != spec.get("grpcEndpoint"):
        yield "another grpcEndpoint"
    if (settings.grpc_data_endpoint or settings.grpc_endpoint) != spec.get("grpcDataEndpoint"):
        yield "another grpcDataEndpoint"
    gpus = _server(manifest)["resources"]["limits"].get("nvidia.com/gpu", 0)
    if (settings.device is Device.CUDA) != (gpus == 1):
        yield f"{gpus} GPUs for {settings.device}"


def shown_metrics(manifest: Manifest) -> Iterator[str]:
    """Prometheus must reach HTTP from another pod, on a port that the container declares."""
    try:
        settings = _settings(manifest)
    except InvalidSettings:
        return
    endpoint = Endpoint.parse("http_endpoint", settings.http_endpoint)
    declared = [row["containerPort"] for row in _server(manifest).get("ports", ())]
    if endpoint is None or endpoint.port not in declared:
        yield f"no metrics at {declared}"
    if ip_address(settings.host).is_loopback:
        yield f"nobody reaches {settings.host}"


def hidden_management(manifest: Manifest) -> Iterator[str]:
    """Management over gRPC must be a Unix socket if other pods can reach the server's host."""
    try:
        settings = _settings(manifest)
        ports = [endpoint.port for endpoint in _endpoints(manifest) if endpoint.port is not None]
    except InvalidSettings:
        return
    if ports and not ip_address(settings.host).is_loopback:
        yield f"everybody reaches {ports}"


def kept_programs(manifest: Manifest) -> Iterator[str]:
    """Compiled programs must be written to a volume, so that they survive the container."""
    try:
        directory = PurePosixPath(_settings(manifest).compilation_cache_directory)
    except InvalidSettings:
        return
    volumes = {row["name"] for row in manifest["spec"].get("volumes", ())}
    mounts = [
        row
        for row in _server(manifest).get("volumeMounts", ())
        if row["name"] in volumes and directory.is_relative_to(row["mountPath"])
    ]
    if not mounts or any(row.get("readOnly") for row in mounts):
        yield f"{directory} is no volume that can be written"


def told_memory(manifest: Manifest) -> Iterator[str]:
    """The server must know its memory request; the limit decides the size of /models."""
    container = _server(manifest)
    request = {"containerName": container["name"], "resource": "requests.memory"}
    variables = [row for row in container["env"] if row["name"] in CONTAINER_MEMORY_VARIABLES]
    if [{"resourceFieldRef": request}] != [row.get("valueFrom") for row in variables]:
        yield "the memory request is not told"
    resources = container["resources"]
    if not {"memory"} <= resources["requests"].keys() & resources["limits"].keys():
        yield "no memory request, or no limit"


def working_probe(manifest: Manifest) -> Iterator[str]:
    """The liveness probe must run a command: the kubelet reaches neither socket nor loopback."""
    probe = _server(manifest).get("livenessProbe", {})
    words = probe.get("exec", {}).get("command", [])
    parameters = inspect.signature(health).parameters
    options = {f"--{name}" for name in parameters}
    given = {word for word in words if word.startswith("--")}
    if words[:2] != ["xlaserve", "health"] or given - options:
        yield f"no probe that runs: {words}"
    if probe.get("timeoutSeconds", 1) <= parameters["timeout"].default:
        yield "it is killed before it can say why"


def deployed_by_modelmesh(manifest: Manifest) -> Iterator[str]:
    """The annotation must select ModelMesh; otherwise KServe deploys the model in its own pod."""
    annotations = manifest["metadata"].get("annotations", {})
    if annotations.get("serving.kserve.io/deploymentMode") != "ModelMesh":
        yield "KServe would deploy it"


def one_path(manifest: Manifest) -> Iterator[str]:
    """The manifest must give exactly one path to the model's files."""
    if manifest["kind"] == "Predictor":
        given = [manifest["spec"].get("path")]
    else:
        model = manifest["spec"]["predictor"]["model"]
        given = [model.get("storage", {}).get("path"), model.get("storageUri")]
    if sum(path is not None for path in given) != 1:
        yield f"not one path: {given}"


def supported_format(manifest: Manifest) -> Iterator[str]:
    """One of our runtimes must support the format without being named."""
    spec = manifest["spec"]
    asked = (
        spec["modelType"]
        if manifest["kind"] == "Predictor"
        else spec["predictor"]["model"]["modelFormat"]
    )
    supported = load("serving-runtime")["spec"]["supportedModelFormats"]
    if not any(asked.items() <= row.items() for row in supported):
        yield f"no runtime supports {asked}"


RUNTIME_RULES: tuple[Rule, ...] = (
    unknown_fields,
    many_models,
    reserved_names,
    reserved_ports,
    managed_fields,
    reachable_endpoints,
    socket_folder,
    accepted_settings,
    one_server,
    shown_metrics,
    hidden_management,
    kept_programs,
    told_memory,
    working_probe,
)
SERVICE_RULES: tuple[Rule, ...] = (
    unknown_fields,
    deployed_by_modelmesh,
    one_path,
    supported_format,
)
PREDICTOR_RULES: tuple[Rule, ...] = (unknown_fields, one_path, supported_format)
RULES: Mapping[str, Sequence[Rule]] = {
    "serving-runtime": RUNTIME_RULES,
    "cluster-serving-runtime": RUNTIME_RULES,
    "inference-service": SERVICE_RULES,
    "predictor": PREDICTOR_RULES,
}


def load(name: str) -> Manifest:
    """Read a manifest."""
    manifest = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    assert isinstance(manifest, dict)
    return manifest


def broken_rules(name: str, manifest: Manifest) -> list[str]:
    """Return the violations of all rules."""
    return [rule.__name__ for rule in RULES[name] if list(rule(manifest))]
