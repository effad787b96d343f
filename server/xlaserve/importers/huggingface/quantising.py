"""Matrices of a decoder quantised to 8 or 4 bits, as `products` multiplies them."""

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
"""The most elements of a row that have one scale in 4 bits."""
_LEAST_GROUP = 8
_MATRICES = frozenset(
    {
        *("q", "k", "v", "o", "gate", "up", "down"),
        *("expert_gate", "expert_up", "expert_down", "shared_gate", "shared_up", "shared_down"),
    }
)


def quantised(params: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the parameters with the matrices of their layers as one of KINDS.

    The embedding and the head are of 8 bits in both: the rarest tokens are rows of them. Norms,
    biases, routers and learned positions stay. Raises InvalidModel, with the tensor's role.
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
    """Return a matrix, or those of all experts one by one, as one kind."""
    if array.ndim == 2:
        return kind(array, role)
    found = [kind(matrix, role) for matrix in array]
    return {name: np.stack([one[name] for one in found]) for name in found[0]}


def int8(matrix: Tensor, role: str) -> dict[str, Tensor]:
    """Return [out, in] as int8 with an FP32 scale for each row: its largest number is 127."""
    wide = matrix.astype(np.float32)
    scale = _scale(wide, _MOST_INT8, role)
    return {"int8": np.rint(wide / scale[:, None]).astype(np.int8), "scale": scale}


def int4(matrix: Tensor, role: str) -> dict[str, Tensor]:
    """Return [out, in] as two numbers a byte, with a BF16 scale for each group of a row."""
    out, size = matrix.shape
    group = math.gcd(size // 2, GROUP)
    if size % 2 or group < _LEAST_GROUP:
        raise InvalidModel(
            f"tensor '{role}': expected rows of a multiple of {2 * _LEAST_GROUP} elements for "
            f"int4, got {size}; int8 has no such bound"
        )
    groups = matrix.astype(np.float32).reshape(out, size // group, group)
    # Rounded first: the numbers are those of the scale that is stored.
    scale = _scale(groups, _MOST_INT4, role).astype(ml_dtypes.bfloat16)
    found = np.rint(groups / scale.astype(np.float32)[..., None])
    low = np.clip(found, -INT4_ZERO, _MOST_INT4).reshape(out, size) + INT4_ZERO
    halves = low.astype(np.uint8)
    return {"int4": halves[:, : size // 2] | halves[:, size // 2 :] << 4, "scale": scale}


def _scale(numbers: Tensor, most: int, role: str) -> Tensor:
    largest = np.abs(numbers).max(axis=-1)
    if not np.isfinite(largest).all():
        raise InvalidModel(f"tensor '{role}': expected finite numbers to quantise, got others")
    return np.where(largest > 0, largest / most, 1).astype(np.float32)


KINDS: Mapping[str, Callable[[Tensor, str], dict[str, Tensor]]] = MappingProxyType(
    {"int8": int8, "int4": int4}
)
"""The types that matrices are quantised to, by name."""
