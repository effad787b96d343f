"""The inputs of a request, as Python code takes them."""

from collections.abc import Mapping

import numpy as np

from xlaserve.runtime.loaded import Value
from xlaserve.tensors import Tensor


def on_host(inputs: Mapping[str, Value]) -> dict[str, Tensor]:
    """Return inputs as arrays of the host; what an ensemble left on a device is fetched."""
    return {
        name: value if isinstance(value, np.ndarray) else value.numpy()
        for name, value in inputs.items()
    }
