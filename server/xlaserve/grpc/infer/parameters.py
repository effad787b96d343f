"""Conversion between parameter maps of protobuf messages and plain values."""

from collections.abc import Mapping
from typing import Any

import betterproto

from xlaserve.errors import InvalidRequest
from xlaserve.tensors import Parameter
from xlaserve_proto import inference as pb

_SHOWN_CHARACTERS = 80
_LARGEST_SIGNED = 2**63 - 1


def write_parameters(parameters: Mapping[str, Parameter]) -> dict[str, pb.InferParameter]:
    """Convert plain values to InferParameter messages; integers are int64, or uint64 if larger."""
    return {name: _written(value) for name, value in parameters.items()}


def _written(value: Parameter) -> pb.InferParameter:
    if isinstance(value, bool):
        return pb.InferParameter(bool_param=value)
    if isinstance(value, str):
        return pb.InferParameter(string_param=value)
    if isinstance(value, float):
        return pb.InferParameter(double_param=value)
    if value > _LARGEST_SIGNED:
        return pb.InferParameter(uint64_param=value)
    return pb.InferParameter(int64_param=value)


def read_parameters(parameters: Mapping[str, betterproto.Message]) -> dict[str, Any]:
    """Convert InferParameter or ModelRepositoryParameter messages to plain values.

    Raises InvalidRequest for a parameter without a value.
    """
    plain: dict[str, Any] = {}
    for name, parameter in parameters.items():
        # Bypass betterproto's attribute access, which takes longer than the rest of the loop.
        fields = object.__getattribute__(parameter, "__dict__")
        value = fields.get(fields["_group_current"]["parameter_choice"])
        if value is None:
            raise InvalidRequest(f"parameter '{name[:_SHOWN_CHARACTERS]}' has no value")
        plain[name] = value
    return plain
