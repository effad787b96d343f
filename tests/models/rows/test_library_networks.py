"""Networks of flax and equinox layers: their verdicts, checked by execution."""

# Both libraries are only partly typed.
# mypy: ignore-errors=True

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from support.row_trial import leak
from support.rows import exported

from xlaserve.row_proofs import prove

pytestmark = pytest.mark.slow

KEY: Any = np.zeros(2, np.uint32)
"""The raw form of a JAX key: creating a key at import would start XLA and its threads."""
Network = tuple[Callable[[], Callable[..., Any]], list[tuple[tuple[int, ...], str]]]


def f(*shape: int) -> tuple[tuple[int, ...], str]:
    return shape, "float32"


def i(*shape: int) -> tuple[tuple[int, ...], str]:
    return shape, "int32"


def flax(make: Callable[[], Any], *inputs: Any, **more: Any) -> Network:
    """A flax module with random parameters."""

    def build() -> Callable[..., Any]:
        module = make()
        examples = [jnp.ones((2, *shape), dtype) for shape, dtype in inputs]
        variables = module.init(KEY, *examples, **more)
        return lambda *x: module.apply(variables, *x, **more)

    return build, list(inputs)


def each(make: Callable[[], Any], *inputs: Any) -> Network:
    """An equinox module, applied to each row by itself."""

    def build() -> Callable[..., Any]:
        return jax.vmap(make())

    return build, list(inputs)


class Encoder(nn.Module):
    """An encoder of token sequences with lengths."""

    @nn.compact
    def __call__(self, ids, lengths):
        x = nn.Embed(50, 16)(ids % 50) + nn.Embed(12, 16)(jnp.arange(ids.shape[1]))
        mask = jnp.arange(ids.shape[1])[None] < lengths[:, None]
        for _ in range(2):
            attended = nn.MultiHeadDotProductAttention(4)(
                nn.LayerNorm()(x), mask=nn.make_attention_mask(mask, mask)
            )
            x = x + attended
            x = x + nn.Dense(16)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(x))))
        return x[:, 0], jnp.where(mask[..., None], x, 0).sum(1) / mask.sum(1, keepdims=True)


class Decoder(nn.Module):
    """Causal attention over tokens, returning the last one."""

    @nn.compact
    def __call__(self, ids, lengths):
        x = nn.Embed(50, 16)(ids % 50)
        x = x + nn.MultiHeadDotProductAttention(2)(nn.RMSNorm()(x), mask=nn.make_causal_mask(ids))
        last = jnp.clip(lengths - 1, 0, ids.shape[1] - 1)
        return nn.Dense(50)(x[jnp.arange(ids.shape[0]), last])


class Residual(nn.Module):
    """Two ResNet blocks, normalized by trained statistics or by the batch."""

    learned: bool = True

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            y = nn.BatchNorm(use_running_average=self.learned)(nn.Conv(4, (3, 3))(x))
            x = nn.relu(nn.Conv(4, (1, 1))(x) + y)
        return nn.Dense(3)(nn.avg_pool(x, (2, 2), (2, 2)).mean((1, 2)))


class UNet(nn.Module):
    """Downsampling and upsampling."""

    @nn.compact
    def __call__(self, x):
        low = nn.max_pool(nn.relu(nn.Conv(8, (3, 3))(x)), (2, 2), (2, 2))
        up = nn.ConvTranspose(4, (2, 2), (2, 2))(nn.GroupNorm(2)(low))
        return nn.Conv(2, (1, 1))(jnp.concatenate([x, up], -1))


class Patches(nn.Module):
    """A vision transformer of one block."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(8, (4, 4), (4, 4))(x).reshape(x.shape[0], -1, 8)
        head = self.param("head", nn.initializers.normal(), (1, 1, 8))
        x = jnp.concatenate([jnp.broadcast_to(head, (x.shape[0], 1, 8)), x], 1)
        return (x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x)))[:, 0]


class Squeezed(nn.Module):
    """Channels weighted by their content (squeeze and excitation)."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(8, (3, 3), feature_group_count=4)(x)
        return x * nn.sigmoid(nn.Dense(8)(nn.relu(nn.Dense(2)(x.mean((1, 2), keepdims=True)))))


class Both(nn.Module):
    """A bidirectional recurrent network over the length of each row."""

    @nn.compact
    def __call__(self, x, lengths):
        forth, back = nn.RNN(nn.GRUCell(5)), nn.RNN(nn.GRUCell(5))
        return nn.Bidirectional(forth, back)(x, seq_lengths=lengths % 6 + 1)


class Experts(nn.Module):
    """Every expert processes every row; a gate weights two of them."""

    @nn.compact
    def __call__(self, x):
        weights, chosen = jax.lax.top_k(nn.softmax(nn.Dense(4)(x)), 2)
        made = jnp.stack([nn.Dense(3)(x) for _ in range(4)], 1)
        return (jnp.take_along_axis(made, chosen[..., None], 1) * weights[..., None]).sum(1)


class Noisy(nn.Module):
    """Dropout with one key for the batch."""

    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=False)(nn.Dense(4)(x), rng=jax.random.key(1))


class Recurrent(eqx.Module):
    """A recurrent cell of equinox, over time."""

    cell: Any

    def __call__(self, x):
        begin = jnp.zeros(self.cell.hidden_size)
        if isinstance(self.cell, eqx.nn.LSTMCell):
            begin = begin, begin
        found, _ = jax.lax.scan(lambda s, one: (self.cell(one, s), None), begin, x)
        return found


def attention(x):
    return eqx.nn.MultiheadAttention(2, 8, key=KEY)(x, x, x)


def turned(x):
    return eqx.nn.RotaryPositionalEmbedding(8)(x)


PROVED: dict[str, Network] = {
    "dense": flax(lambda: nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(3)]), f(4)),
    "dense over axes": flax(lambda: nn.DenseGeneral((2, 3), axis=(-2, -1)), f(4, 5)),
    "encoder": flax(Encoder, i(9), i()),
    "decoder": flax(Decoder, i(9), i()),
    "residual": flax(Residual, f(8, 8, 3)),
    "u-net": flax(UNet, f(8, 8, 3)),
    "patches": flax(Patches, f(8, 8, 3)),
    "squeeze and excite": flax(Squeezed, f(6, 6, 4)),
    "lstm": flax(lambda: nn.RNN(nn.LSTMCell(5)), f(6, 3)),
    "optimised lstm": flax(lambda: nn.RNN(nn.OptimizedLSTMCell(5)), f(6, 3)),
    "gru": flax(lambda: nn.RNN(nn.GRUCell(5)), f(6, 3)),
    "mgu": flax(lambda: nn.RNN(nn.MGUCell(5)), f(6, 3)),
    "simple cell": flax(lambda: nn.RNN(nn.SimpleCell(5)), f(6, 3)),
    "convolutional lstm": flax(lambda: nn.RNN(nn.ConvLSTMCell(2, (3, 3))), f(3, 4, 4, 2)),
    "both directions": flax(Both, f(6, 3), i()),
    "local convolution": flax(lambda: nn.ConvLocal(3, (3,)), f(6, 2)),
    "circular convolution": flax(lambda: nn.Conv(3, (3,), padding="CIRCULAR"), f(6, 2)),
    "causal, dilated": flax(
        lambda: nn.Conv(3, (2,), padding="CAUSAL", kernel_dilation=2), f(6, 2)
    ),
    "instance norm": flax(nn.InstanceNorm, f(6, 6, 4)),
    "weight norm": flax(lambda: nn.WeightNorm(nn.Dense(3)), f(4)),
    "maxout and prelu": flax(lambda: nn.Sequential([nn.Dense(8), nn.PReLU(), nn.glu]), f(4)),
    "einsum": flax(lambda: nn.Einsum((4, 2, 3), "...i,ijk->...jk"), f(4)),
    "experts": flax(Experts, f(5)),
    "mlp of each": each(lambda: eqx.nn.MLP(4, 3, 8, 2, key=KEY), f(4)),
    "convolutions of each": each(
        lambda: eqx.nn.Sequential([
            eqx.nn.Conv2d(2, 4, 3, key=KEY), eqx.nn.MaxPool2d(2), eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.ConvTranspose2d(4, 2, 2, key=KEY), eqx.nn.AdaptiveAvgPool2d(2),
        ]),
        f(2, 8, 8),
    ),
    "lstm of each": each(lambda: Recurrent(eqx.nn.LSTMCell(3, 5, key=KEY)), f(6, 3)),
    "gru of each": each(lambda: Recurrent(eqx.nn.GRUCell(3, 5, key=KEY)), f(6, 3)),
    "attention of each": each(lambda: attention, f(6, 8)),
    "rotary of each": each(lambda: turned, f(6, 8)),
    "norms of each": each(
        lambda: eqx.nn.Sequential([eqx.nn.LayerNorm((4, 6)), eqx.nn.GroupNorm(2, 4)]), f(4, 6)
    ),
    "embedding of each": each(lambda: jax.vmap(eqx.nn.Embedding(9, 4, key=KEY)), i(5)),
    "dropout at inference": each(lambda: eqx.nn.Dropout(0.5, inference=True), f(4)),
}  # fmt: skip

MIXES: dict[str, Network] = {
    "normalised by the batch": flax(lambda: Residual(learned=False), f(8, 8, 3), mutable=True),
    "noise of one key": flax(Noisy, f(4)),
}


def _judged(network: Network) -> tuple[str, str]:
    """Return the verdict, and the result of a trial of the proved outputs."""
    build, inputs = network
    # The layers are written for JAX's defaults, not for the strict settings of these tests.
    with (
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        function = build()
    artifact = exported(function, inputs)
    found = prove(artifact, 0, [f"y{n}" for n in range(len(artifact.out_avals))])
    return str(found), leak(artifact) if str(found) == "proved" else ""


@pytest.mark.parametrize("name", PROVED)
def test_a_network_of_a_library_is_proved_and_holds(name: str) -> None:
    assert ("proved", "") == _judged(PROVED[name])


@pytest.mark.parametrize("name", MIXES)
def test_a_network_that_mixes_rows_is_not_proved(name: str) -> None:
    verdict, _ = _judged(MIXES[name])

    assert verdict.startswith("unknown")
