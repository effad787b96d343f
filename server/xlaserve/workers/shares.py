"""Divides the settings of a server among its processes."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from xlaserve.errors import InvalidSettings
from xlaserve.residence.host import compile_processes, load_threads, memory_limit_bytes
from xlaserve.settings import Settings
from xlaserve.settings.bounds import SMALLEST
from xlaserve.settings.choices import Device, ProcessCount, ProcessRoles, TraceLevel, TraceMode
from xlaserve.workers.messages import Part

SHARED: Final = (
    *("capacity_bytes", "container_memory_bytes", "max_held_bytes", "max_spare_bytes"),
    *("response_cache_bytes", "max_connections", "max_http_connections", "execute_threads"),
    *("max_requests_per_model", "max_infer_streams", "max_health_watchers"),
)
"""Limits of the whole server, which are divided equally among the workers."""


OF_CLIENTS: Final = (
    *("max_connections", "max_http_connections", "max_infer_streams", "max_health_watchers"),
)
"""Limits divided among the front ends; the engine has no clients."""

NOT_OF_ENGINE: Final[Mapping[str, Any]] = MappingProxyType(
    {
        # Front ends check callers, and log and trace calls.
        "access_rules": "",
        "grpc_restricted_protocol": (),
        "http_restricted_api": (),
        "access_log": "",
        "trace_mode": TraceMode.TRITON,
        "trace_level": TraceLevel.AUTO,
        "service": (),
        # Front ends serve the engine's metrics.
        "metrics_endpoint": "http",
        # The engine has all the memory for models.
        "processes": ProcessCount(1),
        "process_roles": ProcessRoles.AUTO,
    }
)
"""Settings overridden in the engine."""

NOT_OF_FRONT_END: Final[Mapping[str, Any]] = MappingProxyType(
    {
        # Only the engine caches responses, because it receives the requests of all front ends.
        "response_cache_bytes": 0,
        "compile_processes": 0,
    }
)
"""Settings overridden in front ends."""


SPARE_BYTES: Final = 128 << 20
"""Private memory of a spare engine: 117 MiB with JAX 0.10."""


def has_front_ends(settings: Settings) -> bool:
    """Tell whether one process is the engine and the others are front ends."""
    if settings.process_roles is ProcessRoles.AUTO:
        return settings.device not in (Device.AUTO, Device.CPU)
    return settings.process_roles is ProcessRoles.FRONT_ENDS


def parts_of(settings: Settings) -> Sequence[Part]:
    """Return the role of each process, by process number."""
    if not has_front_ends(settings):
        return [Part.WORKER] * settings.processes
    return [Part.ENGINE, *[Part.FRONT_END] * (settings.processes - 1)]


def offloads(settings: Settings) -> bool:
    """Tell whether workers execute batches for one another."""
    return (
        bool(settings.offload_seconds) and not has_front_ends(settings) and settings.processes > 1
    )


@dataclass(frozen=True, slots=True)
class _Unsupported:
    """A setting that is not supported with several processes."""

    expected: str
    found: Callable[[Settings], bool]
    got: Callable[[Settings], object]


UNSUPPORTED: Mapping[str, _Unsupported] = MappingProxyType(
    {
        "processes": _Unsupported(
            "1, or process_roles front-ends with a device other than the CPU, since a device"
            " belongs to one process",
            lambda s: s.device not in (Device.AUTO, Device.CPU) and not has_front_ends(s),
            lambda s: s.processes,
        ),
        "modelmesh": _Unsupported(
            "false with process_roles front-ends, which cannot report the engine's sizes to a mesh",
            lambda s: s.modelmesh and has_front_ends(s),
            lambda s: "true",
        ),
        "evict": _Unsupported(
            "false with several processes, each of which would evict different models",
            lambda s: s.evict,
            lambda s: "true",
        ),
        "trace_file": _Unsupported(
            "none with several processes, which cannot share one file",
            lambda s: bool(s.trace_file),
            lambda s: s.trace_file,
        ),
        "access_log": _Unsupported(
            "a path, stderr or stdout with several processes, which do not inherit other"
            " descriptors",
            lambda s: s.access_log.startswith("fd:"),
            lambda s: s.access_log,
        ),
    }
)
"""Unsupported settings, by the name reported in the error."""


def check_supported(settings: Settings) -> None:
    """Raise InvalidSettings for the first setting not supported with several processes."""
    for name, row in UNSUPPORTED.items():
        if row.found(settings):
            raise InvalidSettings(name, row.expected, row.got(settings))


def share_of(settings: Settings, part: Part = Part.WORKER) -> Settings:
    """Return the settings of one process.

    Each worker gets an equal share of the server's limits. With front ends, the engine gets the
    limits of models, and each front end a share of the limits of clients. A share is never below
    the smallest useful value.
    """
    # The parent answers probes.
    settings = replace(settings, probe_socket="")
    if part is not Part.WORKER:
        return _share_with_engine(settings, part)
    count = settings.processes
    given: dict[str, Any] = {name: getattr(settings, name) for name in SHARED}
    if not settings.container_memory_bytes:
        given["container_memory_bytes"] = memory_limit_bytes()
    if not settings.execute_threads:
        given["execute_threads"] = os.cpu_count() or count
    # Each worker loads every model, so they divide these limits.
    given |= {
        "load_threads": load_threads(settings),
        "compile_processes": compile_processes(settings),
    }
    parts: dict[str, Any] = {name: _part(name, value, count) for name, value in given.items()}
    return replace(settings, **parts)


def _share_with_engine(settings: Settings, part: Part) -> Settings:
    count = settings.processes
    held = {name: getattr(settings, name) for name in ("max_held_bytes", "max_spare_bytes")}
    changed = {name: _part(name, value, count) for name, value in held.items()}
    if part is Part.ENGINE:
        if settings.spare_engine:
            memory = settings.container_memory_bytes or memory_limit_bytes()
            changed["container_memory_bytes"] = max(1, memory - SPARE_BYTES)
        return replace(settings, **(changed | dict(NOT_OF_ENGINE)))
    for name in OF_CLIENTS:
        changed[name] = _part(name, getattr(settings, name), count - 1)
    return replace(settings, **(changed | dict(NOT_OF_FRONT_END)))


def _part(name: str, value: int, count: int) -> int:
    if value <= 0:
        return value  # 0 and -1 have special meanings
    part = value // count if name.endswith("_bytes") else -(-value // count)
    return max(1, int(SMALLEST.get(name, 1)), part)


# --- Serialization -----------------------------------------------------------------------------


def encoded(settings: Settings) -> dict[str, Any]:
    """Convert settings to JSON values."""
    return {field.name: _plain(getattr(settings, field.name)) for field in fields(settings)}


def decoded(values: Mapping[str, Any]) -> Settings:
    """Convert JSON values back to settings; raises InvalidSettings."""
    return Settings.read({}, **values)


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    if isinstance(value, ProcessCount):
        return int(value)
    return str(value) if isinstance(value, StrEnum | Path) else value
