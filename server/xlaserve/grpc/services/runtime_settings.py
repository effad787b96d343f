"""Conversion of the messages of Triton's trace and logging extensions."""

from collections.abc import Mapping
from typing import Any

import betterproto

from xlaserve.errors import InvalidParameter
from xlaserve.serving.observability.tracing import Tracing
from xlaserve.tensors import Parameter
from xlaserve_proto import inference as pb

_SHOWN_CHARACTERS = 80


async def update_trace(tracing: Tracing, request: pb.TraceSettingRequest) -> None:
    """Change trace settings; a setting without values is cleared (trace extension)."""
    change = {name: list(setting.value) for name, setting in request.settings.items()}
    if change:
        await tracing.change(request.model_name, change)


def write_trace(tracing: Tracing, model: str) -> pb.TraceSettingResponse:
    """Return the trace settings of a model, or the global ones if `model` is empty."""
    return pb.TraceSettingResponse(
        settings={
            name: pb.TraceSettingResponseSettingValue(
                value=value if isinstance(value, list) else [value]
            )
            for name, value in tracing.texts(model).items()
        }
    )


def read_log(request: pb.LogSettingsRequest) -> dict[str, Any]:
    """Return the settings in a request; raise InvalidParameter for a setting without a value."""
    found = {}
    for name, setting in request.settings.items():
        _, value = betterproto.which_one_of(setting, "parameter_choice")
        if value is None:
            raise InvalidParameter(name[:_SHOWN_CHARACTERS], "a value", "none")
        found[name] = value
    return found


def write_log(settings: Mapping[str, Parameter]) -> pb.LogSettingsResponse:
    """Convert log settings to the response message."""
    return pb.LogSettingsResponse(
        settings={name: _setting(value) for name, value in settings.items()}
    )


def _setting(value: Parameter) -> pb.LogSettingsResponseSettingValue:
    if isinstance(value, bool):
        return pb.LogSettingsResponseSettingValue(bool_param=value)
    if isinstance(value, int):
        return pb.LogSettingsResponseSettingValue(uint32_param=value)
    return pb.LogSettingsResponseSettingValue(string_param=str(value))
