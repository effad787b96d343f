"""Permitted values of other settings, and mutual exclusions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from xlaserve.errors import InvalidSettings
from xlaserve.settings.choices import ModelControlMode, ProcessRoles, TraceLevel, TraceMode

_LOG_LEVELS = ("auto", "debug", "info", "warning", "error")
_MESH_DECIDES = "none with modelmesh, which controls loading"


@dataclass(frozen=True, slots=True)
class _Conflict:
    name: str
    """The setting to name in the error."""
    expected: str
    found: Callable[[Any], bool]
    got: Callable[[Any], object]


_CONFLICTS: Sequence[_Conflict] = (
    _Conflict(
        "server_name",
        "a printable name",
        lambda s: not s.server_name.strip() or not s.server_name.isprintable(),
        lambda s: s.server_name,
    ),
    _Conflict(
        "process_roles",
        "auto or workers with one process, since front ends need a separate engine (processes)",
        lambda s: s.process_roles is ProcessRoles.FRONT_ENDS and s.processes == 1,
        lambda s: s.process_roles.value,
    ),
    _Conflict(
        "json_surrogates",
        "false with strict_json",
        lambda s: s.json_surrogates and s.strict_json,
        lambda s: "true",
    ),
    _Conflict(
        "trace_file",
        "none with trace_mode opentelemetry, which writes no files",
        lambda s: bool(s.trace_file) and s.trace_mode is TraceMode.OPENTELEMETRY,
        lambda s: s.trace_file,
    ),
    _Conflict(
        "trace_level",
        "OFF without a trace_file",
        lambda s: (
            not s.trace_file
            and s.trace_mode is TraceMode.TRITON
            and s.trace_level is TraceLevel.TIMESTAMPS
        ),
        lambda s: "TIMESTAMPS",
    ),
    _Conflict(
        "log_level",
        " or ".join(_LOG_LEVELS),
        lambda s: s.log_level not in _LOG_LEVELS,
        lambda s: s.log_level,
    ),
    _Conflict(
        "load_model",
        "model_control_mode explicit",
        lambda s: bool(s.load_model) and s.model_control_mode is not ModelControlMode.EXPLICIT,
        lambda s: s.model_control_mode.value,
    ),
    _Conflict(
        "model_control_mode",
        _MESH_DECIDES,
        lambda s: s.modelmesh and s.model_control_mode is ModelControlMode.POLL,
        lambda s: s.model_control_mode.value,
    ),
    _Conflict(
        "sagemaker",
        "false with modelmesh, since only one can control loading",
        lambda s: s.modelmesh and s.sagemaker,
        lambda s: "true",
    ),
    _Conflict(
        "load_model",
        _MESH_DECIDES,
        lambda s: s.modelmesh and bool(s.load_model),
        lambda s: ",".join(s.load_model),
    ),
)
"""In order of precedence: an error names the first conflict."""


def check_conflicts(settings: Any) -> None:
    """Raise InvalidSettings for the first conflict in a `Settings`."""
    for conflict in _CONFLICTS:
        if conflict.found(settings):
            raise InvalidSettings(conflict.name, conflict.expected, conflict.got(settings))
