"""Element types: their names are MLIR's, and their sizes in bytes."""

import jax
import ml_dtypes
import numpy as np
import pytest

from xlaserve.artifact.element_types import ITEMSIZES, name_of
from xlaserve.artifact.wrapper import DTYPES


def module(dtype: "np.dtype[np.generic]") -> str:
    with jax.enable_x64(True):
        return jax.jit(lambda x: x).lower(np.zeros(3, dtype)).as_text()


@pytest.mark.parametrize("name", sorted({*DTYPES} - {"float0"}))
def test_names_are_those_of_mlir(name: str) -> None:
    """A computation uses these names for its arguments, which must match its manifest."""
    dtype = np.dtype(getattr(ml_dtypes, name, name))

    assert f"%arg0: tensor<3x{name_of(name)}>" in module(dtype)
    assert dtype.itemsize == ITEMSIZES[name_of(name)]
