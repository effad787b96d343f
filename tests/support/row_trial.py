"""Runs what was proved: the hard trial of the product, on an artifact of a test."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.export import Exported

from xlaserve.row_proofs.neighbours import find_difference
from xlaserve.tensors import Tensor, TensorSpec, datatype_of


def leak(exported: Exported, seed: int = 0) -> str:
    """Return what a row of some output depends on besides the row; empty where nothing was seen."""
    call = jax.jit(exported.call)

    def run(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        return [np.asarray(output) for output in call(*inputs)]

    with jax.enable_x64(True):
        inputs, outputs = (
            [_spec(f"{kind}{n}", aval.shape, aval.dtype) for n, aval in enumerate(avals)]
            for kind, avals in (("x", exported.in_avals), ("y", exported.out_avals))
        )
        found = find_difference(run, inputs, outputs, seeds=(seed,))
    return str(found or "")


def _spec(name: str, shape: Sequence[object], dtype: "np.dtype[np.generic]") -> TensorSpec:
    datatype = datatype_of(dtype)
    assert datatype is not None
    return TensorSpec(
        name, datatype, tuple(size if isinstance(size, int) else -1 for size in shape)
    )
