"""Settings from SageMaker's environment variables (SageMaker, Your own container).

They take precedence over defaults, but not over flags and `XLASERVE_*` variables.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType

from xlaserve.errors import InvalidSettings

BIND_TO_PORT = "SAGEMAKER_BIND_TO_PORT"
SAFE_PORT_RANGE = "SAGEMAKER_SAFE_PORT_RANGE"
MULTI_MODEL = "SAGEMAKER_MULTI_MODEL"
BASE_DIR = "SAGEMAKER_BASE_DIR"
MAX_PAYLOAD = "SAGEMAKER_MAX_PAYLOAD_IN_MB"
DEFAULT_ACCEPT = "SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT"
LOG_LEVEL = "SAGEMAKER_CONTAINER_LOG_LEVEL"

MODEL_NAME = "model"
"""Model name in single-model mode."""

_DEFAULT_PORT = "8080"
_DEFAULT_BASE = "/opt/ml"
_UNLOAD_SECONDS = 350
"""The platform waits 360 s for an unload, and then considers the memory free."""

_PORTS = range(1, 65536)
_MEGABYTES = range(1, 1 << 20)
_TRUTHS = MappingProxyType({"true": True, "1": True, "false": False, "0": False})
_LEVELS = MappingProxyType(
    {"10": "debug", "20": "info", "30": "warning", "40": "error", "50": "error"}
)
"""Python's logging levels."""

_ENDPOINTS = ("http_endpoint", "grpc_endpoint", "grpc_data_endpoint")
_TCP = re.compile(r"port:([0-9]{1,5})", re.ASCII)


def settings_below(
    environment: Mapping[str, str], given: Mapping[str, object]
) -> dict[str, object]:
    """Return the settings that follow from SageMaker's variables and conventions.

    Omits settings in `given`. All ports are within the safe range, if there is one. Raises
    InvalidSettings that names the variable.
    """
    http_port = _number(environment, BIND_TO_PORT, _DEFAULT_PORT, _PORTS)
    safe = _safe_ports(environment)
    _check_ports(given, safe, http_port)
    below: dict[str, object] = {
        "host": "0.0.0.0",
        "http_endpoint": f"port:{http_port}",
        "grpc_endpoint": _grpc_endpoint(safe, _port_of(given.get("http_endpoint")) or http_port),
        "model_control_mode": "explicit",
        **_models(environment, given),
        **_optional(environment),
    }
    return {name: value for name, value in below.items() if name not in given}


def _models(environment: Mapping[str, str], given: Mapping[str, object]) -> dict[str, object]:
    base = environment.get(BASE_DIR) or _DEFAULT_BASE
    if given.get("sagemaker_multi_model", _truth(environment, MULTI_MODEL)):
        return {
            "sagemaker_multi_model": "true",
            "repository": f"{base}/models",
            "drain_seconds": str(_UNLOAD_SECONDS),
        }
    single: dict[str, object] = {"repository": f"{base}/model", "readiness": "models"}
    if given.get("model_control_mode", "explicit") == "explicit":
        single["load_model"] = "*"
    return single


def _optional(environment: Mapping[str, str]) -> dict[str, object]:
    """Return the settings whose variables are set."""
    found: dict[str, object] = {}
    if environment.get(MAX_PAYLOAD):
        megabytes = _number(environment, MAX_PAYLOAD, "", _MEGABYTES)
        found["max_message_bytes"] = str(megabytes << 20)
    if environment.get(DEFAULT_ACCEPT):
        found["default_accept"] = environment[DEFAULT_ACCEPT]
    if environment.get(LOG_LEVEL):
        found["log_level"] = _log_level(environment[LOG_LEVEL])
    return found


def _log_level(text: str) -> str:
    level = _LEVELS.get(text)
    if level is None:
        raise InvalidSettings(LOG_LEVEL, " or ".join(_LEVELS), text)
    return level


# --- ports -------------------------------------------------------------------------------------


def _safe_ports(environment: Mapping[str, str]) -> range | None:
    text = environment.get(SAFE_PORT_RANGE)
    if not text:
        return None
    first, _, last = text.partition("-")
    if all(part.isascii() and part.isdigit() and len(part) < 6 for part in (first, last)):
        ports = range(int(first), int(last) + 1)
        if ports and ports[0] in _PORTS and ports[-1] in _PORTS:
            return ports
    raise InvalidSettings(SAFE_PORT_RANGE, "<first port>-<last port>", text)


def _grpc_endpoint(safe: range | None, http_port: int) -> str:
    """Return the first free port of the safe range, or none without a range."""
    port = next((port for port in safe or () if port != http_port), None)
    return "none" if port is None else f"port:{port}"


def _check_ports(given: Mapping[str, object], safe: range | None, http_port: int) -> None:
    for name in _ENDPOINTS:
        port = _port_of(given.get(name))
        if port is None or safe is None or port in safe:
            continue
        if (name, port) != ("http_endpoint", http_port):
            expected = f"a port of {SAFE_PORT_RANGE}, {safe[0]} to {safe[-1]}"
            raise InvalidSettings(name, expected, given[name])


def _port_of(endpoint: object) -> int | None:
    found = _TCP.fullmatch(str(endpoint))
    return int(found[1]) if found else None


# --- texts -------------------------------------------------------------------------------------


def _number(environment: Mapping[str, str], variable: str, default: str, allowed: range) -> int:
    text = environment.get(variable) or default
    if text.isascii() and text.isdigit() and len(text) < 10 and int(text) in allowed:
        return int(text)
    raise InvalidSettings(variable, f"{allowed[0]} to {allowed[-1]}", text)


def _truth(environment: Mapping[str, str], variable: str) -> bool:
    text = environment.get(variable) or "false"
    if text.lower() not in _TRUTHS:
        raise InvalidSettings(variable, "true or false", text)
    return _TRUTHS[text.lower()]
