"""Images keep channels last between convolutions, and every result stays the same."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Callable

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from xlaserve.authoring.cpu import channels_last
from xlaserve.authoring.cpu.optimizing import optimize
from xlaserve.row_proofs import prove
from xlaserve.row_proofs.verdict import Independence

RANDOM = np.random.default_rng(3)
KERNEL = RANDOM.standard_normal((4, 4, 3, 3)).astype(np.float32)
IMAGE = RANDOM.standard_normal((2, 4, 6, 7)).astype(np.float32)
CHANNELS = np.arange(1, 5, dtype=np.float32)


def _conv(x: jax.Array, kernel: object = KERNEL) -> jax.Array:
    """Convolve [N,C,H,W] without changing its size."""
    found: jax.Array = lax.conv_general_dilated(x, jnp.asarray(kernel), (1, 1), "SAME")
    return found


BETWEEN: dict[str, Callable[[jax.Array], jax.Array]] = {
    "numbers": lambda x: jnp.clip(x * 2 - 1, -3, 3),
    "a number of each channel": lambda x: (
        x * CHANNELS[None, :, None, None] + CHANNELS[None, ::-1, None, None]
    ),
    "numbers of each pixel": lambda x: x + IMAGE[:, :1],
    "the image before": lambda x: jnp.where(x > IMAGE, x, IMAGE / 2),
    "an activation": jax.nn.silu,
    "one with derivatives of its own": jax.nn.relu,
    "a jitted function": jax.jit(lambda x: jnp.tanh(x) + x**2),
    "a checkpoint": jax.checkpoint(jnp.exp),
    "another datatype": lambda x: x.astype(jnp.bfloat16).astype(jnp.float32),
    "greatest of windows": lambda x: lax.reduce_window(
        x, -jnp.inf, lax.max, (1, 1, 2, 3), (1, 1, 1, 2), ((0, 0), (0, 0), (1, 0), (0, 2))
    ),
    "greatest of windows with gaps": lambda x: lax.reduce_window(
        x,
        -jnp.inf,
        lax.max,
        (1, 1, 2, 2),
        (1, 1, 1, 1),
        ((0, 0), (0, 0), (1, 1), (1, 2)),
        window_dilation=(1, 1, 2, 3),
    ),
    "least of windows": lambda x: lax.reduce_window(
        x, jnp.inf, lax.min, (2, 1, 3, 3), (1, 1, 1, 1), "SAME"
    ),
    "windows of a wide image": lambda x: lax.reduce_window(
        x, 0.0, lax.add, (1, 1, 2, 17), (1, 1, 1, 1), "SAME"
    ),
    "windows of an image with gaps": lambda x: lax.reduce_window(
        x, 0.0, lax.add, (1, 1, 2, 2), (1, 1, 2, 2), "SAME", base_dilation=(1, 1, 2, 2)
    ),
    "sums of windows": lambda x: lax.reduce_window(
        x, 0.0, lax.add, (1, 2, 3, 1), (1, 1, 2, 1), ((0, 0), (1, 0), (0, 2), (0, 0))
    ),
    "channels of two": lambda x: jnp.concatenate([x, IMAGE], 1)[:, 1:5],
    "rows of two": lambda x: jnp.concatenate([IMAGE, x], 2),
    "a border": lambda x: jnp.pad(x, ((0, 0), (0, 0), (2, 1), (0, 3)), constant_values=2),
    "a part": lambda x: x[:, :, 1:6:2, 2:],
    "the mean of a channel": lambda x: x * x.mean((2, 3), keepdims=True),
    "the greatest of a channel": lambda x: x - x.max((2, 3))[:, :, None, None],
    "the sum over channels": lambda x: x + x.sum(1, keepdims=True),
    "the sum over rows": lambda x: x + x.sum(2, keepdims=True),
    "a softmax over channels": lambda x: jax.nn.softmax(x, 1),
    "another shape": lambda x: x.reshape((2, 4, -1))[:, :, ::-1].reshape(x.shape),
    "turned": lambda x: x.transpose((0, 1, 3, 2)),
    "a branch": lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x),
    "another convolution": lambda x: _conv(x, KERNEL[:, :, ::-1, :1]),
    "a kernel that is an image": lambda x: _conv(jnp.asarray(IMAGE), x[:, :, :3, :3].repeat(2, 0)),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_what_is_between_two_convolutions_is_the_same(name: str) -> None:
    between = BETWEEN[name]

    def function(x: jax.Array) -> jax.Array:
        return _conv(between(_conv(x)))

    found = jax.jit(optimize(function))(IMAGE)

    np.testing.assert_allclose(found, function(jnp.asarray(IMAGE)), rtol=1e-3, atol=1e-3)


TURNED_BACK = frozenset(
    {
        "a branch",
        "a kernel that is an image",
        "a softmax over channels",
        "another shape",
        "the sum over channels",
        "the sum over rows",
        "turned",
        "windows of a wide image",
        "windows of an image with gaps",
    }
)
"""Names of those that need an image as it was."""


@pytest.mark.parametrize("name", BETWEEN)
def test_images_are_turned_back_behind_the_last_convolution(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    turned: list[int] = []
    back = channels_last.Last.back

    def counting(self: channels_last.Last) -> jax.Array:
        turned.append(self.ndim)
        return back(self)

    monkeypatch.setattr(channels_last.Last, "back", counting)
    between = BETWEEN[name]
    jax.export.export(jax.jit(optimize(lambda x: _conv(between(_conv(x))))), platforms=["cpu"])(
        jax.ShapeDtypeStruct(IMAGE.shape, IMAGE.dtype)
    )

    assert (name in TURNED_BACK) == (len(turned) > 1)
    assert turned


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_images_of_any_dimensions(rank: int) -> None:
    sizes = (5, 6, 7)[:rank]
    image = RANDOM.standard_normal((2, 3, *sizes)).astype(np.float32)
    kernel = jnp.asarray(RANDOM.standard_normal((3, 3, *(3,) * rank)), jnp.float32)

    def function(x: jax.Array) -> jax.Array:
        once = lax.conv_general_dilated(x, kernel, (1,) * rank, "SAME")
        found: jax.Array = lax.conv_general_dilated(jnp.tanh(once), kernel, (2,) * rank, "VALID")
        return found

    np.testing.assert_allclose(
        jax.jit(optimize(function))(image), function(jnp.asarray(image)), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("platforms", [["cpu"], ["cpu", "cuda"]])
def test_rows_of_a_network_are_proved_independent(platforms: list[str]) -> None:
    (rows,) = jax.export.symbolic_shape("b")

    def network(kernel: jax.Array, x: jax.Array) -> jax.Array:
        x = jax.nn.relu(_conv(x, kernel) + CHANNELS[None, :, None, None])
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
        x = x * jax.nn.sigmoid(x.mean((2, 3), keepdims=True))
        return _conv(x, kernel).mean((2, 3))

    exported = jax.export.export(jax.jit(optimize(network)), platforms=platforms)(
        jax.ShapeDtypeStruct(KERNEL.shape, KERNEL.dtype),
        jax.ShapeDtypeStruct((rows, 4, 6, 6), IMAGE.dtype),
    )

    assert Independence.PROVED is prove(exported, 1, ["y"], {}).independence


def test_other_platforms_compute_what_was_written() -> None:
    shape = jax.ShapeDtypeStruct(IMAGE.shape, IMAGE.dtype)

    def text(function: Callable[[jax.Array], jax.Array], platform: str) -> str:
        exported = jax.export.export(jax.jit(function), platforms=[platform])(shape)
        return str(exported.mlir_module())

    assert "stablehlo.transpose" in text(optimize(_conv), "cpu")
    assert "stablehlo.transpose" not in text(optimize(_conv), "cuda")
    assert 1 == text(optimize(_conv), "cuda").count("stablehlo.convolution")
