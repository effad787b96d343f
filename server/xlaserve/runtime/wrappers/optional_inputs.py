"""Inputs marked `optional` in the configuration, and their defaults."""

import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from xlaserve.errors import InvalidModel
from xlaserve.model_config.config import ConfigTensor, ModelConfig
from xlaserve.model_config.fields import DEFAULT
from xlaserve.runtime.loaded import Optional
from xlaserve.tensors import BYTES, Tensor, TensorDataError, TensorSpec, describe, from_elements

MOST_CHARACTERS = 1 << 20
"""Maximum length of a default. A single number fills an input of any size."""

_SHOWN = 200
"""Names in error messages are cut to this many characters."""


def of_code(config: ModelConfig) -> Optional:
    """Return the optional inputs of a model with code; the code sees which are absent."""
    return MappingProxyType({one.name: None for one in config.inputs if one.is_optional})


def of_computation(config: ModelConfig) -> Optional:
    """Return a computation's optional inputs.

    Raises InvalidModel for an optional input without a valid default.
    """
    found = with_defaults(config)
    for name, default in found.items():
        if default is None:
            raise InvalidModel(
                f"input '{name[:_SHOWN]}' is optional: expected its default in the parameter "
                f"'{DEFAULT}{name[:_SHOWN]}', got none"
            )
    return found


def with_defaults(config: ModelConfig) -> Optional:
    """Return the optional inputs, with their defaults if they have any.

    Raises InvalidModel for an invalid default.
    """
    return MappingProxyType(
        {one.name: _default(config, one) for one in config.inputs if one.is_optional}
    )


def completed(
    inputs: Mapping[str, Any], specs: tuple[TensorSpec, ...], optional: Optional, rows: int
) -> dict[str, Any]:
    """Fill in defaults for inputs that a request omits.

    `rows` is 0 for a model without a batch dimension.
    """
    return {**inputs, **dict(_left_out(inputs, specs, optional, rows))}


def _left_out(
    inputs: Mapping[str, Any], specs: tuple[TensorSpec, ...], optional: Optional, rows: int
) -> Iterator[tuple[str, Tensor]]:
    for spec in specs:
        default = None if spec.name in inputs else optional.get(spec.name)
        if default is None:
            continue
        shape = default.shape or spec.shape[bool(rows) :]
        whole = (rows, *shape) if rows else shape
        yield spec.name, np.full(whole, default, dtype=default.dtype)


def _default(config: ModelConfig, tensor: ConfigTensor) -> Tensor | None:
    name = f"{DEFAULT}{tensor.name}"
    text = config.parameters.get(name)
    if text is None:
        return None
    wanted = describe(tensor.datatype, tensor.dims)
    if len(text) > MOST_CHARACTERS:
        raise _unfit(name, f"at most {MOST_CHARACTERS} characters", str(len(text)))
    try:
        value = json.loads(text)
        array = np.array(value, dtype=object)
        flat: list[Any] = array.ravel().tolist()
        shape = array.shape
        # A list of strings is an array of BYTES elements.
        found = from_elements(tensor.datatype, shape, flat)
    except TensorDataError as error:
        raise _unfit(name, f"{error.expected} for {wanted}", error.got) from None
    except (ValueError, RecursionError):
        expected = f"a number, or a list, in JSON for {wanted}"
        if tensor.datatype is BYTES:
            expected = f"a string, or a list, in JSON for {wanted}"
        raise _unfit(name, expected, f"'{text[:64]}'") from None
    if not shape and -1 in tensor.dims:
        expected = f"a list that determines the dynamic sizes of {wanted}"
        raise _unfit(name, expected, f"'{text[:64]}'")
    if shape and not TensorSpec(tensor.name, tensor.datatype, tensor.dims).accepts(shape):
        raise _unfit(name, wanted, describe(tensor.datatype, shape))
    return found


def _unfit(name: str, expected: str, got: str) -> InvalidModel:
    return InvalidModel(f"parameter '{name[:_SHOWN]}': expected {expected}, got {got}")
