"""Quantises a decoder's matrices to 8 or 4 bits, in the format that `products` reads."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from xlaserve.errors import InvalidModel
from xlaserve.importers.huggingface.products import INT4_ZERO
from xlaserve.tensors import Tensor

_MOST_INT8, _MOST_INT4 = 127, 7
GROUP = 32
"""Largest number of elements that share a scale in int4."""
_LEAST_GROUP = 8
_MATRICES = frozenset(
    {
        *("q", "k", "v", "o", "gate", "up", "down"),
        *("expert_gate", "expert_up", "expert_down", "shared_gate", "shared_up", "shared_down"),
    }
)


def quantised(params: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the parameters with the layers' matrices quantised to one of KINDS.

    The embedding and the head are always int8, because each token has only one row in them. Norms,
    biases, routers and learned positions are not quantised. Raises InvalidModel that names the
    tensor.
    """
    found = dict(params)
    for role in ("embedding", "head"):
        if role in params:
            found[role] = int8(params[role], role)
    found["layers"] = [
        {
            role: _matrices(KINDS[kind], array, f"{role}' of layer '{number}")
            if role in _MATRICES
            else array
            for role, array in layer.items()
        }
        for number, layer in enumerate(params["layers"])
    ]
    return found


def _matrices(
    kind: Callable[[Tensor, str], dict[str, Tensor]], array: Tensor, role: str
) -> dict[str, Tensor]:
    """Quantise a matrix, or each matrix of a stack of experts."""
    if array.ndim == 2:
        return kind(array, role)
    found = [kind(matrix, role) for matrix in array]
    return {name: np.stack([one[name] for one in found]) for name in found[0]}


def int8(matrix: Tensor, role: str) -> dict[str, Tensor]:
    """Quantise [out, in] to int8 with an FP32 scale per row, which maps its maximum to 127."""
    wide = matrix.astype(np.float32)
    scale = _scale(wide, _MOST_INT8, role)
    return {"int8": np.rint(wide / scale[:, None]).astype(np.int8), "scale": scale}


def int4(matrix: Tensor, role: str) -> dict[str, Tensor]:
    """Quantise [out, in] to packed nibbles with a BF16 scale per group of elements."""
    out, size = matrix.shape
    group = math.gcd(size // 2, GROUP)
    if size % 2 or group < _LEAST_GROUP:
        raise InvalidModel(
            f"tensor '{role}': expected rows of a multiple of {2 * _LEAST_GROUP} elements for"
            f" int4, got {size}: use int8, which has no such limit"
        )
    groups = matrix.astype(np.float32).reshape(out, size // group, group)
    # Round the scale first, so that the numbers match the stored scale.
    scale = _scale(groups, _MOST_INT4, role).astype(ml_dtypes.bfloat16)
    found = np.rint(groups / scale.astype(np.float32)[..., None])
    low = np.clip(found, -INT4_ZERO, _MOST_INT4).reshape(out, size) + INT4_ZERO
    halves = low.astype(np.uint8)
    return {"int4": halves[:, : size // 2] | halves[:, size // 2 :] << 4, "scale": scale}


def _scale(numbers: Tensor, most: int, role: str) -> Tensor:
    largest = np.abs(numbers).max(axis=-1)
    if not np.isfinite(largest).all():
        raise InvalidModel(f"tensor '{role}': cannot quantize non-finite numbers")
    return np.where(largest > 0, largest / most, 1).astype(np.float32)


KINDS: Mapping[str, Callable[[Tensor, str], dict[str, Tensor]]] = MappingProxyType(
    {"int8": int8, "int4": int4}
)
"""Quantisation functions by name."""
