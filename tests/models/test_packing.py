"""Small parameters in flat buffers: what goes where, and that models compute with them."""

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlaserve.models.export import export_model
from xlaserve.models.loaded import LoadedModel
from xlaserve.models.packing import PACKED_BYTES, Packing, Parameter
from xlaserve.tensors import Tensor

Load = Callable[..., LoadedModel]
Run = Callable[..., dict[str, Tensor]]

DTYPES = [np.dtype(name) for name in ("f4", "f2", "i8", "?", "u1", ml_dtypes.bfloat16)]


@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3), st.booleans()),
        max_size=6,
    )
)
def test_each_parameter_is_found_again(
    described: list[tuple["np.dtype[np.generic]", list[int], bool]],
) -> None:
    """In the artifact's order, whichever are packed; scalars and empty ones too."""
    tensors = [
        np.arange(index, index + np.prod(shape, dtype=int)).astype(dtype).reshape(shape)
        for index, (dtype, shape, _) in enumerate(described)
    ]
    packed = {index for index, (_, _, is_small) in enumerate(described) if is_small}
    packing = Packing.of(
        {index: Parameter(tensors[index].dtype, tensors[index].shape) for index in packed},
        len(tensors),
    )
    buffers = [np.zeros(count, dtype) for dtype, count in packing.buffers]
    for index, place in packing.places.items():
        buffers[place.buffer][place.start : place.stop] = tensors[index].ravel()
    large = [tensor for index, tensor in enumerate(tensors) if index not in packed]
    with jax.enable_x64(True):
        found = list(packing.unpack([jnp.asarray(leaf) for leaf in (*buffers, *large)]))

    assert len(buffers) == len({tensors[index].dtype for index in packed})
    assert len(tensors) == len(found)
    for expected, got in zip(tensors, found, strict=True):
        assert (expected.dtype, expected.shape) == (got.dtype, got.shape)
        assert expected.tobytes() == np.asarray(got).tobytes()


def test_equal_arguments_that_mean_something_else_are_told_apart() -> None:
    """Two parameters of one shape, of which a partition rule leaves one or the other out."""
    parameter = Parameter(np.dtype("f4"), (2,))
    first, second = (Packing.of({index: parameter}, 2) for index in (0, 1))

    assert first.buffers == second.buffers
    assert first.text != second.text


@pytest.mark.parametrize(("count", "arguments"), [(256, 1), (257, 3)])
@pytest.mark.parametrize("mapped", [False, True])
def test_small_parameters_are_one_argument(
    tmp_path: Path, load: Load, run: Run, count: int, arguments: int, mapped: bool
) -> None:
    def fn(params: list[jax.Array], x: jax.Array) -> jax.Array:
        return (x * params[0][None, :] - params[1]) / params[2][None, :]

    divisor = np.arange(1, count + 1, dtype=np.float32)
    params = [np.full(count, 3, np.float32), np.float32(1), divisor]
    inputs = {"x": ("FP32", [-1, count])}
    path = export_model(fn, params, inputs, tmp_path / "1", outputs=["y"], max_batch_size=2)

    model = load(path, mmap_parameters=mapped)

    assert 1024 == PACKED_BYTES
    assert sum(np.asarray(leaf).nbytes for leaf in params) == model.info.memory.parameters_bytes
    assert 0 == model.info.memory.constants_bytes
    assert arguments == len(model._copies[0].leaves)  # type: ignore[attr-defined]
    found = run(model, {"x": np.ones((2, count), np.float32)})["y"]
    np.testing.assert_allclose(found, np.stack([2 / divisor] * 2), rtol=1e-6)
