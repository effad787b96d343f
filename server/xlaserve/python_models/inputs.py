"""Converts the inputs of a request into arrays for Python code."""

from collections.abc import Mapping

import numpy as np

from xlaserve.runtime.loaded import Value
from xlaserve.tensors import Tensor


def on_host(inputs: Mapping[str, Value]) -> dict[str, Tensor]:
    """Return inputs as host arrays, fetching those that an ensemble step left on a device."""
    return {
        name: value if isinstance(value, np.ndarray) else value.numpy()
        for name, value in inputs.items()
    }
