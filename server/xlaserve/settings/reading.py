"""Parses settings from flags, environment variables and SageMaker's variables."""

import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, get_args, get_origin

from xlaserve.errors import InvalidSettings
from xlaserve.settings import sagemaker_environment

ENVIRONMENT_PREFIX = "XLASERVE_"

CONTAINER_MEMORY_VARIABLES = ("MODEL_SERVER_MEM_REQ_BYTES", "CONTAINER_MEM_REQ_BYTES")
"""Variables with a pod's memory request (Downward API); the first one set is used."""

_OF_KUBERNETES = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT(_\w+)?$|_PORT(_\d+_\w+)?$")
"""Variables that Kubernetes sets in pods if a Service is called `xlaserve`."""

REPLACED: Mapping[str, str] = {
    "max_receiving_bytes": "max_held_bytes",
    "max_parked_bytes": "max_held_bytes",
    "grpc_tls_certificate": "tls_certificate",
    "grpc_tls_key": "tls_key",
    "grpc_tls_client_ca": "tls_client_ca",
}
"""Former settings and their replacements, for the environment, files and flags."""

_TRUTHS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def successor(name: str, spelled: Callable[[str], str] = str) -> str:
    """Describe the replacement of a former setting; empty for any other name.

    `spelled` formats the replacement's name as a flag or variable.
    """
    found = REPLACED.get(name)
    return "" if found is None else f"{spelled(found)}, which replaced it"


def read_values(
    hints: Mapping[str, Any], environment: Mapping[str, str], flags: Mapping[str, object]
) -> dict[str, Any]:
    """Return the given settings, parsed as their types in `hints`.

    A flag of None is absent. Raises InvalidSettings for a value that cannot be parsed, for an
    `XLASERVE_` variable that names no setting, and if no repository is given.
    """
    values: dict[str, Any] = {}
    for variable, text in environment.items():
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        if name not in hints and _OF_KUBERNETES.search(variable):
            continue
        if name not in hints:
            raise InvalidSettings(variable, successor(name) or "the name of a setting", text)
        values[name] = _from_text(variable, hints[name], text)
    values |= {
        name: _from_flag(name, hints[name], value)
        for name, value in flags.items()
        if value is not None
    }
    if "container_memory_bytes" not in values:
        for variable in CONTAINER_MEMORY_VARIABLES:
            if environment.get(variable):
                values["container_memory_bytes"] = _from_text(variable, int, environment[variable])
                break
    if values.get("sagemaker"):
        below = sagemaker_environment.settings_below(environment, values)
        values |= {name: _from_flag(name, hints[name], text) for name, text in below.items()}
    return _with_repository(values)


def _with_repository(values: dict[str, Any]) -> dict[str, Any]:
    """Move the first `model_repository` to `repository` if that is absent.

    Raises InvalidSettings if no repository is given.
    """
    if "repository" in values:
        return values
    if not values.get("model_repository"):
        expected = "a directory, as in `xlaserve serve DIRECTORY` (`xlaserve init` makes one)"
        raise InvalidSettings("repository", expected, None)
    first, *others = values["model_repository"]
    return {**values, "repository": first, "model_repository": tuple(others)}


def _from_flag(name: str, hint: Any, value: object) -> Any:
    if get_origin(hint) is tuple and isinstance(value, list | tuple):
        return tuple(_from_flag(name, get_args(hint)[0], part) for part in value)
    return _from_text(name, hint, value) if type(value) is str else value


def _from_text(variable: str, hint: Any, text: str) -> Any:
    if get_origin(hint) is tuple:
        inner = get_args(hint)[0]
        return tuple(_from_text(variable, inner, part) for part in text.split(",") if part)
    try:
        if hint is bool:
            return _TRUTHS[text.lower()]
        # Accepts Python's notation, such as 0o666 and 1_000.
        return int(text, 0) if hint is int else hint(text)
    except (KeyError, ValueError):
        expected = "|".join(hint) if issubclass(hint, StrEnum) else hint.__name__
        raise InvalidSettings(variable, expected, text) from None
