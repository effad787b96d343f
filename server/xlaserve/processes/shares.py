"""Settings of a server that is several processes: what each of them is given."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from xlaserve.core.host import compile_processes, load_threads, memory_limit_bytes
from xlaserve.errors import InvalidSettings
from xlaserve.settings import Settings
from xlaserve.settings_bounds import SMALLEST
from xlaserve.settings_choices import Device, ProcessCount

SHARED: Final = (
    *("capacity_bytes", "container_memory_bytes", "max_held_bytes", "max_spare_bytes"),
    *("response_cache_bytes", "max_connections", "max_http_connections", "execute_threads"),
    *("max_requests_per_model", "max_infer_streams", "max_health_watchers"),
)
"""Limits that are of the whole server, and that each worker has an equal part of."""


@dataclass(frozen=True, slots=True)
class _Unsupported:
    """A setting that several processes cannot obey."""

    expected: str
    found: Callable[[Settings], bool]
    got: Callable[[Settings], object]


UNSUPPORTED: Mapping[str, _Unsupported] = MappingProxyType(
    {
        "processes": _Unsupported(
            "1 with a device other than the CPU, which one process owns",
            lambda s: s.device not in (Device.AUTO, Device.CPU),
            lambda s: s.processes,
        ),
        "evict": _Unsupported(
            "false with several processes: each would evict other models",
            lambda s: s.evict,
            lambda s: "true",
        ),
        "trace_file": _Unsupported(
            "none with several processes, which cannot write one file",
            lambda s: bool(s.trace_file),
            lambda s: s.trace_file,
        ),
        "access_log": _Unsupported(
            "a path, stderr or stdout with several processes, which have no other descriptors",
            lambda s: s.access_log.startswith("fd:"),
            lambda s: s.access_log,
        ),
    }
)
"""By the setting that the error names."""


def check_supported(settings: Settings) -> None:
    """Raise InvalidSettings for the first setting that several processes cannot obey."""
    for name, row in UNSUPPORTED.items():
        if row.found(settings):
            raise InvalidSettings(name, row.expected, row.got(settings))


def share_of(settings: Settings) -> Settings:
    """Return the settings of each worker: of limits of the server, an equal part.

    A worker may always have what is the least that makes sense.
    """
    count = settings.processes
    given: dict[str, Any] = {name: getattr(settings, name) for name in SHARED}
    if not settings.container_memory_bytes:
        given["container_memory_bytes"] = memory_limit_bytes()
    if not settings.execute_threads:
        given["execute_threads"] = os.cpu_count() or count
    # Each worker loads every model: together they take what one server would.
    given |= {
        "load_threads": load_threads(settings),
        "compile_processes": compile_processes(settings),
    }
    parts: dict[str, Any] = {name: _part(name, value, count) for name, value in given.items()}
    return replace(settings, **parts)


def _part(name: str, value: int, count: int) -> int:
    if value <= 0:
        return value  # 0 and -1 stand for something else
    part = value // count if name.endswith("_bytes") else -(-value // count)
    return max(1, int(SMALLEST.get(name, 1)), part)


# --- on their way to a worker ------------------------------------------------------------------


def encoded(settings: Settings) -> dict[str, Any]:
    """Return the settings as JSON can hold them."""
    return {field.name: _plain(getattr(settings, field.name)) for field in fields(settings)}


def decoded(values: Mapping[str, Any]) -> Settings:
    """Return the settings again; raises InvalidSettings."""
    return Settings.read({}, **values)


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    if isinstance(value, ProcessCount):
        return int(value)
    return str(value) if isinstance(value, StrEnum | Path) else value
