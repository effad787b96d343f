"""Enable 64-bit integers, as imports and servers do."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def _x64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield
