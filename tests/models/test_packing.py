"""Small parameters in flat buffers: where each one is, and that models use them correctly."""

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xlaserve.artifact import manifest
from xlaserve.authoring.export import export_model
from xlaserve.runtime.devices.device_parameters import DeviceParameters
from xlaserve.runtime.devices.packing import PACKED_BYTES, Packing, Parameter
from xlaserve.runtime.devices.sites import Site
from xlaserve.runtime.loaded import LoadedModel
from xlaserve.tensors import Tensor

Load = Callable[..., LoadedModel]
Run = Callable[..., dict[str, Tensor]]

DTYPES = [np.dtype(name) for name in ("f4", "f2", "i8", "?", "u1", ml_dtypes.bfloat16)]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3), st.booleans()),
        max_size=6,
    )
)
def test_each_parameter_is_found_again(
    described: list[tuple["np.dtype[np.generic]", list[int], bool]],
) -> None:
    """The order is the artifact's, whichever are packed; scalars and empty ones are supported."""
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
    """Two parameters have the same shape, and a partition rule excludes one of them."""
    parameter = Parameter(np.dtype("f4"), (2,))
    first, second = (Packing.of({index: parameter}, 2) for index in (0, 1))

    assert first.buffers == second.buffers
    assert first.text != second.text
    assert 4 == len({Packing.of({}, 2, turned).text for turned in ([], [0], [1], [0, 1])})


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


def _convolved(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Convolve twice, and use other four-dimensional parameters."""
    kinds = jax.lax.conv_dimension_numbers(x.shape, params["first"].shape, ("NCHW", "OIHW", "NCHW"))
    for name in ("first", "second"):
        x = jax.lax.conv_general_dilated(x, params[name], (1, 1), "SAME", dimension_numbers=kinds)
    x = jnp.einsum("nchw,abcd->nhwabd", x, params["long"])
    x = x * params["depthwise"][0, 0, 0, 0]
    return x + params["flat"][0].sum() + params["whole"].sum().astype(np.float32)


def _kernels() -> dict[str, Tensor]:
    random = np.random.default_rng(7)
    return {
        "first": random.standard_normal((8, 4, 3, 3)).astype(np.float32),
        "depthwise": random.standard_normal((40, 1, 3, 3)).astype(np.float32),
        "flat": random.standard_normal((64, 8, 1, 1)).astype(np.float32),
        "long": random.standard_normal((2, 3, 6, 12)).astype(np.float32),
        "second": random.standard_normal((6, 8, 5, 3)).astype(np.float32),
        "whole": random.integers(0, 9, (8, 8, 3, 3)).astype(np.int32),
    }


@pytest.mark.parametrize("mapped", [False, True])
def test_kernels_lie_as_the_cpu_multiplies_them(
    tmp_path: Path, load: Load, run: Run, mapped: bool
) -> None:
    """The programs then transpose no kernel, and give the same results."""
    params = _kernels()
    path = export_model(
        _convolved,
        params,
        {"x": ("FP32", [-1, 4, 9, 7])},
        tmp_path / "1",
        outputs=["y"],
        max_batch_size=2,
    )
    model = load(path, mmap_parameters=mapped)
    [copy] = model._copies  # type: ignore[attr-defined]
    x = np.random.default_rng(8).standard_normal((2, 4, 9, 7)).astype(np.float32)

    assert [
        (3, 3, 1, 40),
        (3, 3, 4, 8),
        (64, 8, 1, 1),
        (2, 3, 6, 12),
        (5, 3, 8, 6),
        (8, 8, 3, 3),
    ] == [leaf.shape for leaf in copy.leaves]
    assert sum(each.nbytes for each in params.values()) == model.info.memory.parameters_bytes
    found = run(model, {"x": x})["y"]
    np.testing.assert_allclose(found, _convolved(_as_jax(params), jnp.asarray(x)), rtol=1e-4)


def _as_jax(params: dict[str, Tensor]) -> dict[str, jax.Array]:
    return {name: jnp.asarray(each) for name, each in params.items()}


def test_a_program_for_the_cpu_turns_no_kernel() -> None:
    """XLA's transposition for its convolution and the earlier transposition cancel out."""
    kernel = _kernels()["first"]
    copies = []
    for turned in ([], [0]):
        packing = Packing.of({}, 1, turned)
        held = kernel.transpose(2, 3, 1, 0) if turned else kernel

        def model(leaf: jax.Array, x: jax.Array, packing: Packing = packing) -> jax.Array:
            [found] = packing.unpack([leaf])
            return jax.lax.conv(x, found, (1, 1), "SAME")

        compiled = jax.jit(model).lower(held, np.ones((1, 4, 9, 7), np.float32)).compile()
        text = compiled.as_text()
        assert text is not None
        assert "convolution(" in text
        copies.append(text.count("f32[3,3,4,8]{3,2,1,0} copy("))

    assert [1, 0] == copies


@pytest.mark.parametrize(("platform", "turned"), [("cpu", {0}), ("cuda", set[int]())])
def test_kernels_are_turned_for_the_cpu_alone(
    tmp_path: Path, platform: str, turned: set[int]
) -> None:
    """Other platforms require other layouts."""
    kernel = _kernels()["first"]
    path = export_model(
        lambda w, x: jax.lax.conv(x, w, (1, 1), "SAME"),
        kernel,
        {"x": ("FP32", [-1, 4, 9, 7])},
        tmp_path / "1",
        outputs=["y"],
        max_batch_size=2,
    )
    site = Site(jax.devices()[:1], platform=platform)

    found = DeviceParameters.described(path, manifest.read(path), [site])

    assert turned == found.packing.turned
    assert [(3, 3, 4, 8) if turned else kernel.shape] == [leaf.shape for leaf in found.leaves[0]]
