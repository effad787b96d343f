"""Parameter maps: messages that hold one of several kinds of value."""

from collections.abc import Mapping
from typing import Any

import betterproto

from xlaserve.errors import InvalidRequest

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
