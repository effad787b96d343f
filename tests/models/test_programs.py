from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from xlaserve.models.buckets import FIXED
from xlaserve.models.export import export_model
from xlaserve.models.loaded import LoadedModel
from xlaserve.models.programs import CONSTANT_BYTES, bucket_shape, warmed
from xlaserve.tensors import DATATYPES, Tensor, TensorSpec

Load = Callable[..., LoadedModel]
Run = Callable[..., dict[str, Tensor]]

X = TensorSpec("x", DATATYPES["FP32"], (-1, 4))


def test_bucket_takes_the_place_of_the_batch() -> None:
    assert (6, 4) == bucket_shape(X, 6)


def test_fixed_shape_stays_what_it_is() -> None:
    assert (3, 4) == bucket_shape(TensorSpec("x", DATATYPES["FP32"], (3, 4)), FIXED)


class _Executable:
    """Remembers with what it was called."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, leaves: Sequence[jax.Array], inputs: list[Tensor]) -> list[Tensor]:
        self.shapes += [array.shape for array in inputs]
        return inputs


def test_bucket_is_executed_before_it_is_measured() -> None:
    """The first execution is slower than the others: pages, threads, caches."""
    executable: Any = _Executable()

    program = warmed(executable, [], [X], 6)

    assert len(executable.shapes) > 2
    assert {(6, 4)} == set(executable.shapes)
    assert 0 < program.seconds


@pytest.mark.parametrize(("count", "constants", "arguments"), [(256, 1024, 0), (257, 0, 1028)])
def test_small_parameters_are_constants(
    tmp_path: Path, load: Load, run: Run, count: int, constants: int, arguments: int
) -> None:
    def fn(params: jax.Array, x: jax.Array) -> jax.Array:
        return x * params[None, :]

    inputs = {"x": ("FP32", [-1, count])}
    params = np.full(count, 3, np.float32)
    path = export_model(fn, params, inputs, tmp_path / "1", outputs=["y"], max_batch_size=2)

    model = load(path)

    assert CONSTANT_BYTES == 1024
    assert 2 * constants == model.info.memory.constants_bytes
    assert arguments == model.info.memory.parameters_bytes
    assert np.all(run(model, {"x": np.ones((2, count), np.float32)})["y"] == 3)
