"""The manifests of deploy/modelmesh follow ModelMesh's rules; breaking a rule fails."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
from support.manifests import FOLDER, RULES, Manifest, broken_rules, load


def test_every_manifest_is_checked() -> None:
    assert sorted(RULES) == sorted(path.stem for path in FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("name", RULES)
def test_a_manifest_breaks_no_rule(name: str) -> None:
    manifest = load(name)
    problems = [problem for rule in RULES[name] for problem in rule(manifest)]

    assert [] == problems


RUNTIME = "serving-runtime"
SERVER = "spec.containers.0"
SOCKET = "unix:/sockets/grpc.sock"


def port(number: int, name: str = "inference") -> object:
    return {"name": name, "containerPort": number}


def mount(path: str, name: str = "files", **more: object) -> object:
    return {"name": name, "mountPath": path, **more}


BREAKS: Sequence[tuple[str, str, object, str]] = (
    (RUNTIME, "kind", "ServingRuntimes", "unknown_fields"),
    (RUNTIME, "spec.httpEndpoint", "port:8000", "unknown_fields"),
    (RUNTIME, f"{SERVER}.memory", "4Gi", "unknown_fields"),
    (RUNTIME, f"{SERVER}.env.0.valueForm", {}, "unknown_fields"),
    (RUNTIME, "spec.multiModel", False, "many_models"),
    (RUNTIME, "spec.disabled", True, "many_models"),
    (RUNTIME, "spec.protocolVersions", ["v1"], "many_models"),
    (RUNTIME, "spec.supportedModelFormats.0.autoSelect", False, "many_models"),
    (RUNTIME, "spec.volumes.1", {"name": "models-dir"}, "reserved_names"),
    (RUNTIME, "spec.volumes.1", {"name": "mm-models"}, "reserved_names"),
    (RUNTIME, f"{SERVER}.volumeMounts.1", mount("/other", "domain-socket"), "reserved_names"),
    (RUNTIME, f"{SERVER}.ports.0", port(8000, "http"), "reserved_names"),
    (RUNTIME, "spec.containers.1", {"name": "puller"}, "reserved_names"),
    (RUNTIME, f"{SERVER}.ports.1", port(8085), "reserved_ports"),
    (RUNTIME, f"{SERVER}.ports.1", port(11899), "reserved_ports"),
    (RUNTIME, f"{SERVER}.readinessProbe", {}, "managed_fields"),
    (RUNTIME, f"{SERVER}.lifecycle", {}, "managed_fields"),
    (RUNTIME, f"{SERVER}.volumeMounts.1", mount("/sockets"), "socket_folder"),
    (RUNTIME, f"{SERVER}.args.1", "/other", "one_server"),
    (RUNTIME, f"{SERVER}.args.2", "--no-such-flag", "accepted_settings"),
    (RUNTIME, f"{SERVER}.args.6", "gpu", "accepted_settings"),
    (RUNTIME, f"{SERVER}.args.6", "cuda", "one_server"),
    (RUNTIME, f"{SERVER}.env.0.name", "XLASERVE_ENDPOINT", "accepted_settings"),
    (RUNTIME, f"{SERVER}.env.0.value", "unix:/sockets/other.sock", "one_server"),
    (RUNTIME, f"{SERVER}.args.4", "none", "shown_metrics"),
    (RUNTIME, f"{SERVER}.args.4", "port:9000", "shown_metrics"),
    (RUNTIME, f"{SERVER}.args.8", "127.0.0.1", "shown_metrics"),
    (RUNTIME, f"{SERVER}.ports", None, "shown_metrics"),
    (RUNTIME, f"{SERVER}.args.10", "auto", "kept_programs"),
    (RUNTIME, f"{SERVER}.args.10", "/models", "kept_programs"),
    (RUNTIME, f"{SERVER}.volumeMounts", None, "kept_programs"),
    (RUNTIME, f"{SERVER}.volumeMounts.0", mount("/cache", "other"), "kept_programs"),
    (
        RUNTIME,
        f"{SERVER}.volumeMounts.0",
        mount("/cache", "compiled", readOnly=True),
        "kept_programs",
    ),
    (RUNTIME, "spec.volumes", None, "kept_programs"),
    (RUNTIME, f"{SERVER}.env.1.name", "MEMORY", "told_memory"),
    (RUNTIME, f"{SERVER}.env.1.valueFrom.resourceFieldRef.containerName", "mm", "told_memory"),
    (RUNTIME, f"{SERVER}.resources.limits", {"cpu": "1"}, "told_memory"),
    (RUNTIME, f"{SERVER}.livenessProbe", {"httpGet": {}}, "working_probe"),
    (RUNTIME, f"{SERVER}.livenessProbe.timeoutSeconds", 5, "working_probe"),
    (RUNTIME, f"{SERVER}.livenessProbe.exec.command.2", "--alive", "working_probe"),
    ("cluster-serving-runtime", f"{SERVER}.resources.limits.nvidia~com/gpu", 0, "one_server"),
    ("inference-service", "spec.model", {}, "unknown_fields"),
    ("inference-service", "metadata.annotations", {}, "deployed_by_modelmesh"),
    ("inference-service", "spec.predictor.model.storageUri", "s3://b/x", "one_path"),
    (
        "inference-service",
        "spec.predictor.model.modelFormat.name",
        "tensorflow",
        "supported_format",
    ),
    ("inference-service", "spec.predictor.model.modelFormat.version", "2", "supported_format"),
    ("predictor", "spec.model", {}, "unknown_fields"),
    ("predictor", "spec.path", None, "one_path"),
    ("predictor", "spec.modelType.version", "2", "supported_format"),
)


@pytest.mark.parametrize(("name", "place", "value", "rule"), BREAKS)
def test_a_rule_finds_what_breaks_it(name: str, place: str, value: object, rule: str) -> None:
    assert [rule] == broken_rules(name, changed(load(name), place, value))


@pytest.mark.parametrize(
    ("management", "data", "rules"),
    [
        ("unix:/sockets/a.sock", "unix:/sockets/b.sock", []),
        ("port:8085", SOCKET, ["hidden_management"]),
        ("port:8085", "port:8085", ["hidden_management"]),
        (SOCKET, "unix:/other/grpc.sock", ["reachable_endpoints"]),
        ("port:8086", SOCKET, ["reachable_endpoints", "hidden_management"]),
        ("port:0", SOCKET, ["reachable_endpoints", "hidden_management"]),
        ("8085", SOCKET, ["reachable_endpoints"]),
        (SOCKET, "unix:", ["reachable_endpoints", "socket_folder"]),
        ("unix:grpc.sock", "unix:grpc.sock", ["socket_folder"]),
        ("unix:/models/grpc.sock", "unix:/models/grpc.sock", ["socket_folder"]),
        ("unix:/grpc.sock", "unix:/grpc.sock", ["socket_folder"]),
    ],
)
def test_endpoints_are_where_the_mesh_can_reach_them(
    management: str, data: str, rules: list[str]
) -> None:
    """Endpoint formats, and their Warning: two sockets share a directory."""
    manifest = changed(load(RUNTIME), "spec.grpcEndpoint", management)
    manifest = changed(manifest, "spec.grpcDataEndpoint", data)
    manifest = changed(manifest, f"{SERVER}.env.0.value", management)
    manifest["spec"]["containers"][0]["args"] += ["--grpc-data-endpoint", data]

    assert rules == broken_rules(RUNTIME, manifest)


def test_every_rule_is_seen_to_fail() -> None:
    rules = {rule.__name__ for rules in RULES.values() for rule in rules}

    assert rules == {rule for *_, rule in BREAKS} | {"reachable_endpoints", "hidden_management"}


def changed(manifest: Manifest, place: str, value: object) -> Manifest:
    """Return a copy with another value at `a.0.b`, or without that key if the value is None."""
    copied = copy.deepcopy(manifest)
    *folders, last = (part.replace("~", ".") for part in place.split("."))
    inner: Any = copied
    for part in folders:
        inner = inner[int(part)] if isinstance(inner, list) else inner[part]
    if isinstance(inner, list):
        inner[int(last) : int(last) + 1] = [value]
    elif value is None:
        del inner[last]
    else:
        inner[last] = value
    return copied
