"""Parameter maps: messages that hold one of several kinds of value."""

from collections.abc import Mapping
from typing import Any

import betterproto

from xlaserve.errors import InvalidRequest
from xlaserve.tensors import Parameter
from xlaserve_proto import inference as pb

_SHOWN_CHARACTERS = 80


def read_parameters(parameters: Mapping[str, betterproto.Message]) -> dict[str, Any]:
    """Return an InferParameter or ModelRepositoryParameter map with plain values.

    Raises InvalidRequest for a parameter that holds nothing.
    """
    plain: dict[str, Any] = {}
    for name, parameter in parameters.items():
        _, value = betterproto.which_one_of(parameter, "parameter_choice")
        if value is None:
            raise InvalidRequest(f"parameter '{name[:_SHOWN_CHARACTERS]}' has no value")
        plain[name] = value
    return plain


def write_parameter(value: Parameter) -> pb.InferParameter:
    """Return the InferParameter of a plain value."""
    match value:
        case bool():
            return pb.InferParameter(bool_param=value)
        case int():
            return pb.InferParameter(int64_param=value)
        case float():
            return pb.InferParameter(double_param=value)
        case str():
            return pb.InferParameter(string_param=value)
