"""What ModelMesh's controller accepts of a manifest, as functions to what is wrong with one."""

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

# --- what there may be (Implementing a Custom Serving Runtime, Spec Attributes; the CRDs) --------

_FREE_FIELDS = "annotations labels requests limits parameters nodeSelector affinity tolerations"
"""What is in them is not ModelMesh's to say."""
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

# --- what is taken (servingruntime_validator.go, const.go) ---------------------------------------

_RESERVED_CONTAINERS = frozenset({"mm", "puller", "rest-proxy"})
_RESERVED_VOLUMES = frozenset(
    {"domain-socket", "models-dir", "storage-config", "etcd-config", "tc-config"}
)
_RESERVED_PORT_NAMES = frozenset({"grpc", "http", "prometheus"})
_REFUSED_PORTS = frozenset({8080, 8085, 8089, 8090, *range(11881, 11900)})
"""By the validator, where a container declares them."""
_PORTS_IN_USE = frozenset({8080, 8089, 8090, 8033, 8086, 8008, 2112})
"""Of the mesh, the puller, the proxy and the metrics, in the network that all containers share.
8085 is the adapter's, and free where there is none."""
_MOUNTED = frozenset({"/models", "/pvc_mounts", "/storage-config"})

# --- the rules -----------------------------------------------------------------------------------


def unknown_fields(manifest: Manifest) -> Iterator[str]:
    """Every field is one that the kind has."""
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
    """The controller takes the runtime, and the mesh chooses it for a model by its format."""
    spec = manifest["spec"]
    if spec.get("multiModel") is not True or spec.get("disabled"):
        yield "not for ModelMesh"
    if "grpc-v2" not in spec.get("protocolVersions", ()):
        yield "no protocol"
    if not any(row.get("autoSelect") for row in spec.get("supportedModelFormats", ())):
        yield "never chosen for a model"


def reserved_names(manifest: Manifest) -> Iterator[str]:
    """Containers, volumes and ports are not called as those that the controller adds."""
    names = [(row["name"], _RESERVED_VOLUMES) for row in manifest["spec"].get("volumes", ())]
    for container in manifest["spec"]["containers"]:
        names.append((container["name"], _RESERVED_CONTAINERS))
        names += ((row["name"], _RESERVED_VOLUMES) for row in container.get("volumeMounts", ()))
        names += ((row["name"], _RESERVED_PORT_NAMES) for row in container.get("ports", ()))
    for name, reserved in names:
        if name in reserved or name.startswith("mm-"):
            yield f"{name} is reserved"


def reserved_ports(manifest: Manifest) -> Iterator[str]:
    """No port is declared that another container of the pod listens on."""
    for container in manifest["spec"]["containers"]:
        for port in container.get("ports", ()):
            if port["containerPort"] in _REFUSED_PORTS | _PORTS_IN_USE:
                yield f"port {port['containerPort']} is taken"


def managed_fields(manifest: Manifest) -> Iterator[str]:
    """Readiness, and the end of a pod, are ModelMesh's."""
    for container in manifest["spec"]["containers"]:
        for name in ("readinessProbe", "lifecycle"):
            if name in container:
                yield f"{name} is ModelMesh's"


def _endpoints(manifest: Manifest) -> list[Endpoint]:
    names = ("grpcEndpoint", "grpcDataEndpoint")
    endpoints = (Endpoint.parse(name, str(manifest["spec"].get(name))) for name in names)
    return [endpoint for endpoint in endpoints if endpoint is not None]


def reachable_endpoints(manifest: Manifest) -> Iterator[str]:
    """Endpoints have the form and the place in which the mesh finds them."""
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
    """The controller mounts an empty directory there, in every container.

    What the image or another mount has there would be hidden, or be a second mount of one path.
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
    """Flags and variables are settings, and their values can be used."""
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
    """The server does what the manifest tells the mesh about it."""
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
    """Prometheus reaches HTTP from another pod, at a port that the container declares."""
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
    """Whoever reaches gRPC manages models: where other pods reach the host, it is on a socket."""
    try:
        settings = _settings(manifest)
        ports = [endpoint.port for endpoint in _endpoints(manifest) if endpoint.port is not None]
    except InvalidSettings:
        return
    if ports and not ip_address(settings.host).is_loopback:
        yield f"everybody reaches {ports}"


def kept_programs(manifest: Manifest) -> Iterator[str]:
    """What is compiled is written to a volume, and is there for the next container."""
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
    """The server is told the memory request; the size of /models comes from the limit."""
    container = _server(manifest)
    request = {"containerName": container["name"], "resource": "requests.memory"}
    variables = [row for row in container["env"] if row["name"] in CONTAINER_MEMORY_VARIABLES]
    if [{"resourceFieldRef": request}] != [row.get("valueFrom") for row in variables]:
        yield "the memory request is not told"
    resources = container["resources"]
    if not {"memory"} <= resources["requests"].keys() & resources["limits"].keys():
        yield "no memory request, or no limit"


def working_probe(manifest: Manifest) -> Iterator[str]:
    """The kubelet reaches neither the socket nor the loopback of the pod: it runs a command."""
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
    """Without the annotation it would be KServe's, with a pod of its own."""
    annotations = manifest["metadata"].get("annotations", {})
    if annotations.get("serving.kserve.io/deploymentMode") != "ModelMesh":
        yield "KServe would deploy it"


def one_path(manifest: Manifest) -> Iterator[str]:
    """The files of the model are in one place."""
    if manifest["kind"] == "Predictor":
        given = [manifest["spec"].get("path")]
    else:
        model = manifest["spec"]["predictor"]["model"]
        given = [model.get("storage", {}).get("path"), model.get("storageUri")]
    if sum(path is not None for path in given) != 1:
        yield f"not one path: {given}"


def supported_format(manifest: Manifest) -> Iterator[str]:
    """A runtime of ours loads it without being named."""
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
    """List the rules that the manifest breaks."""
    return [rule.__name__ for rule in RULES[name] if list(rule(manifest))]
