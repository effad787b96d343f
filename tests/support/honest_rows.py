"""Row-independent networks of the kinds that people serve, in plain JAX."""

# A table of networks whose names say what they are.
# mypy: ignore-errors=True
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# ruff: noqa: E501, PLW0108

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, nn

Inputs = Sequence[tuple[Sequence[int], str]]
Network = tuple[Callable[..., Any], Inputs]

_RANDOM = np.random.default_rng(3)


def w(*shape: int) -> np.ndarray:
    """Return random weights."""
    return (_RANDOM.standard_normal(shape) * 0.3).astype(np.float32)


def f(*shape: int) -> tuple[Sequence[int], str]:
    """Declare a float input; the shape excludes the batch dimension."""
    return shape, "float32"


def i(*shape: int) -> tuple[Sequence[int], str]:
    """Declare an input of small integers."""
    return shape, "int32"


def dense(x, n, act=nn.relu):
    return act(x @ w(x.shape[-1], n) + w(n))


def conv(x, channels, kernel=3, stride=1, groups=1, padding="SAME", dilation=1):
    return lax.conv_general_dilated(
        x, w(kernel, kernel, x.shape[-1] // groups, channels), (stride, stride), padding,
        rhs_dilation=(dilation, dilation), dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )  # fmt: skip


def layer_norm(x):
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * w(x.shape[-1])


def attention(x, heads=2, mask=None, kv=None):
    kv = x if kv is None else kv
    size = x.shape[-1] // heads

    def split(v):
        return v.reshape(v.shape[0], v.shape[1], heads, size).transpose(0, 2, 1, 3)

    q, k, v = (split(dense(each, x.shape[-1], lambda y: y)) for each in (x, kv, kv))
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) / np.sqrt(size).astype(np.float32)
    if mask is not None:
        scores = jnp.where(mask, scores, -1e9)
    out = jnp.einsum("bhqk,bhkd->bhqd", nn.softmax(scores), v)
    return dense(out.transpose(0, 2, 1, 3).reshape(x.shape), x.shape[-1], lambda y: y)


def block(x, **options):
    x = x + attention(layer_norm(x), **options)
    return x + dense(dense(layer_norm(x), 16, nn.gelu), x.shape[-1], lambda y: y)


def bert(ids, lengths):
    x = jnp.asarray(w(30, 8))[ids] + w(6, 8)
    mask = (jnp.arange(6)[None, :] < lengths[:, None])[:, None, None, :]
    x = block(block(x, mask=mask), mask=mask)
    return jnp.tanh(x[:, 0] @ w(8, 8))


def gpt_step(token, cache, position):
    x = jnp.asarray(w(30, 8))[token]
    new = x @ w(8, 8)
    cache = jax.vmap(lambda c, n, p: lax.dynamic_update_slice(c, n[None], (p, 0)))(
        cache, new, position
    )
    scores = jnp.einsum("bd,btd->bt", x, cache)
    scores = jnp.where(jnp.arange(5)[None, :] <= position[:, None], scores, -jnp.inf)
    return jnp.einsum("bt,btd->bd", nn.softmax(scores), cache), cache


def gpt_shared_position(token, cache):
    def step(carry, n):
        token, cache = carry
        new = (jnp.asarray(w(30, 8))[token] @ w(8, 8))[:, None]
        cache = lax.dynamic_update_slice(cache, new, (0, n, 0))
        logits = cache.mean(1) @ w(8, 30)
        token = jnp.argmax(logits, -1).astype(jnp.int32)
        return (token, cache), token

    (_, _), tokens = lax.scan(step, (token, cache), jnp.arange(5))
    return tokens.T


def lstm(x, cell_first=True):
    def step(carry, inputs):
        h, c = carry
        gates = inputs @ w(4, 12) + h @ w(3, 12)
        a, g, o, n = jnp.split(gates, 4, axis=-1)
        c = nn.sigmoid(a) * c + nn.sigmoid(g) * jnp.tanh(n)
        h = nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zeros = jnp.zeros((x.shape[0], 3), jnp.float32)
    (h, _), states = lax.scan(step, (zeros, zeros), x.transpose(1, 0, 2))
    return h, states.transpose(1, 0, 2)


def gru_with_lengths(x, lengths):
    def step(h, inputs):
        n, v = inputs
        new = jnp.tanh(v @ w(4, 3) + h @ w(3, 3))
        return jnp.where((n < lengths)[:, None], new, h), None

    h, _ = lax.scan(
        step, jnp.zeros((x.shape[0], 3), jnp.float32), (jnp.arange(5), x.transpose(1, 0, 2))
    )
    return h


def bidirectional(x):
    forward, _ = lstm(x)
    backward, _ = lstm(x[:, ::-1])
    return jnp.concatenate([forward, backward], -1)


def mixture(x):
    gates = nn.softmax(x @ w(8, 4))
    best, chosen = lax.top_k(gates, 2)
    experts = jnp.einsum("bd,edh->beh", x, w(4, 8, 6))
    taken = jnp.take_along_axis(experts, chosen[:, :, None], axis=1)
    return (taken * best[:, :, None]).sum(1)


def one_hot_mixture(x):
    chosen = nn.one_hot(jnp.argmax(x @ w(8, 4), -1), 4, dtype=jnp.float32)
    return jnp.einsum("be,bd,edh->bh", chosen, x, w(4, 8, 6))


def resnet(x):
    x = nn.relu(conv(x, 4, stride=2))
    y = conv(nn.relu(conv(x, 4)), 4)
    x = nn.relu(x + y)
    return nn.softmax(x.mean((1, 2)) @ w(4, 5))


def mobilenet(x):
    x = nn.relu6(conv(x, 6, 1))
    x = nn.relu6(conv(x, 6, 3, groups=6))
    squeezed = nn.sigmoid(x.mean((1, 2), keepdims=True) @ w(6, 6))
    return conv(x * squeezed, 4, 1).mean((1, 2))


def max_pool(x, size=2, stride=2):
    return lax.reduce_window(
        x, -jnp.inf, lax.max, (1, size, size, 1), (1, stride, stride, 1), "VALID"
    )


def unet(x):
    one = nn.relu(conv(x, 4))
    two = nn.relu(conv(max_pool(one), 6))
    up = jax.image.resize(two, (x.shape[0], 8, 8, 6), "nearest")
    return conv(jnp.concatenate([one, up], -1), 2)


def vit(x):
    b = x.shape[0]
    patches = x.reshape(b, 2, 4, 2, 4, 3).transpose(0, 1, 3, 2, 4, 5).reshape(b, 4, 48)
    x = patches @ w(48, 8)
    x = jnp.concatenate([jnp.broadcast_to(w(1, 1, 8), (b, 1, 8)), x], 1) + w(5, 8)
    return block(x)[:, 0] @ w(8, 3)


def swin(x):
    b = x.shape[0]
    rolled = jnp.roll(x, (-1, -1), (1, 2))
    windows = rolled.reshape(b, 2, 4, 2, 4, 8).transpose(0, 1, 3, 2, 4, 5).reshape(b * 4, 16, 8)
    windows = block(windows)
    whole = windows.reshape(b, 2, 2, 4, 4, 8).transpose(0, 1, 3, 2, 4, 5).reshape(b, 8, 8, 8)
    return jnp.roll(whole, (1, 1), (1, 2)).mean((1, 2))


def tree(x):
    feature, threshold = np.array([0, 1, 2, 3, 0, 1, 2]), w(7)
    left, right = np.array([1, 3, 5, 3, 4, 5, 6]), np.array([2, 4, 6, 3, 4, 5, 6])

    def down(_, node):
        value = jnp.take_along_axis(x, jnp.asarray(feature)[node][:, None], axis=1)[:, 0]
        goes_left = value < jnp.asarray(threshold)[node]
        return jnp.where(goes_left, jnp.asarray(left)[node], jnp.asarray(right)[node])

    return jnp.asarray(w(7))[lax.fori_loop(0, 3, down, jnp.zeros(x.shape[0], jnp.int32))]


def newton(x):
    def one(r):
        return lax.while_loop(
            lambda c: (jnp.abs(c[0] ** 2 - r) > 1e-4).any() & (c[1] < 30),
            lambda c: ((c[0] + r / c[0]) / 2, c[1] + 1),
            (jnp.ones_like(r), 0),
        )

    return jax.vmap(one)(jnp.abs(x) + 1.0)


def collatz(x):
    def one(n):
        return lax.while_loop(
            lambda c: (c[0] > 1) & (c[1] < 50),
            lambda c: (jnp.where(c[0] % 2 == 0, c[0] // 2, 3 * c[0] + 1), c[1] + 1),
            (n, 0),
        )[1]

    return jax.vmap(one)(jnp.abs(x) + 1)


def nested_loops(x):
    def inner(v):
        return lax.while_loop(lambda c: c < 10.0, lambda c: c * 2.0 + 1.0, v)

    return jax.vmap(lambda r: jax.vmap(inner)(jnp.abs(r)))(x)


def beam(x):
    def step(state, _):
        scores, tokens = state
        logits = nn.log_softmax(jnp.asarray(w(7, 7))[tokens]) + scores[:, :, None]
        best, at = lax.top_k(logits.reshape(x.shape[0], -1), 3)
        return (best, (at % 7).astype(jnp.int32)), at // 7

    start = (x[:, :3], jnp.zeros((x.shape[0], 3), jnp.int32))
    (scores, tokens), back = lax.scan(step, start, None, length=4)
    return scores, tokens, back.transpose(1, 0, 2)


def nms(boxes, scores):
    def one(b, s):
        order = jnp.argsort(-s)
        b = b[order]
        close = (jnp.abs(b[:, None] - b[None, :]).sum(-1)) < 0.5

        def keep(n, kept):
            return kept.at[n].set(~(close[n] & kept & (jnp.arange(5) < n)).any())

        return lax.fori_loop(0, 5, keep, jnp.zeros(5, bool)).astype(jnp.int32)

    return jax.vmap(one)(boxes, scores)


def ctc(x):
    best = jnp.argmax(x, -1)
    before = jnp.pad(best[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    return jnp.where(best != before, best, 0).astype(jnp.int32)


def gaussian_process(x: jax.Array) -> jax.Array:
    """Solve one linear system whose right-hand side has a column per row of the batch."""
    seen = w(5, 2)
    near = jnp.exp(-((x[:, None] - seen[None]) ** 2).sum(-1))
    factor = jnp.linalg.cholesky(jnp.eye(5) + np.exp(-((seen[:, None] - seen[None]) ** 2).sum(-1)))
    solved = jax.scipy.linalg.solve_triangular(factor, near.T, lower=True)
    return 1 - (solved**2).sum(0)


def kalman(x):
    def step(carry, z):
        m, p = carry
        s = p + 0.1
        k = p @ jnp.linalg.inv(s + 3 * jnp.eye(2, dtype=jnp.float32))
        return (m + jnp.einsum("bij,bj->bi", k, z - m), p - k @ p), m

    b = x.shape[0]
    eye = jnp.broadcast_to(jnp.eye(2, dtype=jnp.float32), (b, 2, 2))
    (_, _), means = lax.scan(step, (x[:, 0], eye), x.transpose(1, 0, 2))
    return means.transpose(1, 0, 2)


def loss_and_gradient(x):
    def energy(v):
        return jnp.sum(jnp.tanh(v @ w(4, 4)) ** 2)

    return jax.vmap(jax.value_and_grad(energy))(x)


def langevin(x):
    return x - 0.1 * jax.grad(lambda v: jnp.sum(jnp.cos(v @ w(4, 4))))(x)


def keyed_noise(x, seeds):
    def one(r, seed):
        return r + jax.random.normal(jax.random.key(seed), r.shape)

    return jax.vmap(one)(x, seeds)


def keyed_dropout(x, seeds):
    def one(r, seed):
        return jnp.where(jax.random.bernoulli(jax.random.key(seed), 0.5, r.shape), r, 0.0)

    return jax.vmap(one)(x, seeds)


def deformable(x, at):
    def one(image, points):
        return jax.scipy.ndimage.map_coordinates(image, [points[:, 0], points[:, 1]], order=1)

    return jax.vmap(one)(x, at)


def graph(x, edges):
    def one(nodes, e):
        messages = nodes[e[:, 0]] @ w(4, 4)
        return jax.ops.segment_sum(messages, e[:, 1], 5)

    return jax.vmap(one)(x, edges)


def group_norm(x):
    b = x.shape[0]
    y = x.reshape(b, 8, 8, 1, 3)
    y = (y - y.mean((1, 2, 4), keepdims=True)) / jnp.sqrt(y.var((1, 2, 4), keepdims=True) + 1e-5)
    return y.reshape(x.shape)


def viterbi(x):
    def step(scores, emission):
        both = scores[:, :, None] + w(4, 4)
        return both.max(1) + emission, both.argmax(1)

    scores, back = lax.scan(step, x[:, 0], x[:, 1:].transpose(1, 0, 2))

    def walk(state, pointers):
        state = jnp.take_along_axis(pointers, state[:, None], 1)[:, 0]
        return state, state

    _, path = lax.scan(walk, scores.argmax(-1), back, reverse=True)
    return path.T


def associative(x):
    return lax.associative_scan(lambda a, c: (a[0] * c[0], c[0] * a[1] + c[1]), (x, x), axis=1)[1]


def hyper(x):
    """Multiply each row by weights that are computed from that row."""
    weights = (x @ w(4, 12)).reshape(-1, 4, 3)
    return jnp.einsum("bi,bij->bj", x, weights)


def flat_gather(x, at):
    rows = jnp.arange(x.shape[0])
    return x[rows, at[:, 0]] + x[rows, at[:, 1]]


def flat_scatter(x, at):
    rows = jnp.arange(x.shape[0])
    return x.at[rows, at[:, 0]].add(1.0)


def sampled(x, seeds):
    return jax.vmap(lambda r, s: jax.random.categorical(jax.random.key(s), r))(x, seeds)


def begun_where_any(first, state):
    """Skip a computation if no row needs it; it only changes rows that do."""
    is_first = first == 0
    return lax.cond(
        jnp.any(is_first),
        lambda: jnp.where(is_first[:, None], jnp.tanh(state @ w(4, 4)), state),
        lambda: state,
    )


HONEST: Mapping[str, Network] = {
    "identity": (lambda x: x, [f(4)]),
    "affine": (lambda x: x @ w(4, 5) + w(5), [f(4)]),
    "mlp": (lambda x: nn.softmax(dense(dense(x, 8), 3, lambda y: y)), [f(4)]),
    "two inputs": (lambda x, y: x * y + jnp.maximum(x, y), [f(4), f(4)]),
    "mixed inputs": (lambda x, n: x * n[:, None].astype(jnp.float32), [f(4), i()]),
    "constant output": (lambda x: jnp.zeros((x.shape[0], 3), jnp.float32), [f(4)]),
    "cnn": (lambda x: dense(nn.relu(conv(x, 4)).reshape(x.shape[0], -1), 3), [f(8, 8, 3)]),
    "resnet": (resnet, [f(8, 8, 3)]),
    "mobilenet": (mobilenet, [f(8, 8, 3)]),
    "unet": (unet, [f(8, 8, 3)]),
    "vit": (vit, [f(8, 8, 3)]),
    "swin": (swin, [f(8, 8, 8)]),
    "dilated convolution": (lambda x: conv(x, 2, dilation=2), [f(8, 8, 3)]),
    "transposed convolution": (
        lambda x: lax.conv_transpose(x, w(3, 3, 3, 2), (2, 2), "SAME"), [f(8, 8, 3)],
    ),
    "convolution of sound": (
        lambda x: lax.conv_general_dilated(x[:, None], w(4, 1, 5), (2,), "VALID"), [f(32)],
    ),
    "convolution in NCHW": (
        lambda x: lax.conv(x, w(4, 3, 3, 3), (1, 1), "SAME"), [f(3, 8, 8)],
    ),
    "max pooling": (max_pool, [f(8, 8, 3)]),
    "average pooling": (
        lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "SAME") / 4.0,
        [f(8, 8, 3)],
    ),
    "gradient of pooling": (
        jax.vmap(lambda x: jax.grad(lambda v: (max_pool(v[None]) ** 2).sum())(x)), [f(8, 8, 3)],
    ),
    "batch norm in inference": (lambda x: (x - w(3)) / np.abs(w(3) + 1) * w(3), [f(8, 8, 3)]),
    "layer norm": (layer_norm, [f(6, 8)]),
    "group norm": (group_norm, [f(8, 8, 3)]),
    "instance norm": (
        lambda x: (x - x.mean((1, 2), keepdims=True)) / (x.std((1, 2), keepdims=True) + 1e-3),
        [f(8, 8, 3)],
    ),
    "rms norm": (lambda x: x * lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6), [f(8)]),
    "scaling by the row's own maximum": (
        lambda x: x / jnp.abs(x).max(-1, keepdims=True), [f(8)],
    ),
    "int8 of each row": (
        lambda x: jnp.round(x / (s := jnp.abs(x).max(-1, keepdims=True) / 127.0)) * s, [f(8)],
    ),
    "bert": (bert, [i(6), i()]),
    "transformer block": (block, [f(6, 8)]),
    "causal attention": (
        lambda x: attention(x, mask=np.tril(np.ones((6, 6), bool))[None, None]), [f(6, 8)],
    ),
    "cross attention": (lambda x, y: attention(x, kv=y), [f(6, 8), f(4, 8)]),
    "jax's own attention": (
        lambda x: nn.dot_product_attention(x, x, x, is_causal=True), [f(6, 2, 4)],
    ),
    "attention with lengths": (
        lambda x, n: attention(
            x, mask=(jnp.arange(6)[None, :] < n[:, None])[:, None, None, :]
        ), [f(6, 8), i()],
    ),
    "rotary positions": (
        lambda x: x * jnp.cos(jnp.arange(6.0)[:, None] * w(8))[None]
        + jnp.roll(x, 4, -1) * jnp.sin(jnp.arange(6.0)[:, None] * w(8))[None], [f(6, 8)],
    ),
    "gpt step with a cache": (gpt_step, [i(), f(5, 8), i()]),
    "greedy generation": (gpt_shared_position, [i(), f(5, 8)]),
    "beam search": (beam, [f(7)]),
    "embedding": (lambda n: jnp.asarray(w(30, 8))[n].sum(1), [i(6)]),
    "embedding by one hot": (lambda n: nn.one_hot(n, 30, dtype=jnp.float32) @ w(30, 8), [i(6)]),
    "bag of words": (
        lambda n: jnp.zeros((n.shape[0], 30), jnp.float32).at[
            jnp.arange(n.shape[0])[:, None], n
        ].add(1.0), [i(6)],
    ),
    "last token of each": (lambda x, n: x[jnp.arange(x.shape[0]), n], [f(6, 8), i()]),
    "last token by take_along_axis": (
        lambda x, n: jnp.take_along_axis(x, n[:, None, None], axis=1)[:, 0], [f(6, 8), i()],
    ),
    "lstm": (lstm, [f(5, 4)]),
    "gru with lengths": (gru_with_lengths, [f(5, 4), i()]),
    "bidirectional": (bidirectional, [f(5, 4)]),
    "viterbi": (viterbi, [f(5, 4)]),
    "ctc": (ctc, [f(6, 5)]),
    "kalman": (kalman, [f(5, 2)]),
    "gaussian process": (gaussian_process, [f(2)]),
    "mixture of experts": (mixture, [f(8)]),
    "one expert each": (one_hot_mixture, [f(8)]),
    "tree": (tree, [f(4)]),
    "nearest neighbours": (
        lambda x: lax.top_k(-((x[:, None] - w(20, 4)[None]) ** 2).sum(-1), 3), [f(4)],
    ),
    "support vectors": (
        lambda x: jnp.exp(-((x[:, None] - w(20, 4)) ** 2).sum(-1)) @ w(20), [f(4)],
    ),
    "newton for each": (newton, [f(4)]),
    "collatz": (collatz, [i()]),
    "loop in a loop of rows": (nested_loops, [f(4)]),
    "branch for each": (
        jax.vmap(lambda r: lax.cond(r.sum() > 0, lambda v: v * 2, lambda v: -v, r)), [f(4)],
    ),
    "begun where any row does": (begun_where_any, [i(), f(4)]),
    "switch for each": (
        jax.vmap(
            lambda n, r: lax.switch(n, [lambda v: v, lambda v: v**2, lambda v: v[::-1]], r)
        ), [i(), f(4)],
    ),
    "scan for each": (
        jax.vmap(lambda r: lax.scan(lambda c, v: (c * 0.5 + v, c), 0.0, r)), [f(6)],
    ),
    "slice for each": (
        jax.vmap(lambda r, n: lax.dynamic_slice(r, (n,), (2,))), [f(6), i()],
    ),
    "update for each": (
        jax.vmap(lambda r, n: lax.dynamic_update_slice(r, jnp.ones(2), (n,))), [f(6), i()],
    ),
    "scatter for each": (jax.vmap(lambda r, n: r.at[n].max(0.5)), [f(6), i(3)]),
    "histogram of each": (
        jax.vmap(lambda n: jnp.zeros(9, jnp.float32).at[n].add(1.0)), [i(6)],
    ),
    "gather by arange": (flat_gather, [f(6), i(2)]),
    "scatter by arange": (flat_scatter, [f(6), i(2)]),
    "boxes": (nms, [f(5, 4), f(5)]),
    "sort": (lambda x: jnp.sort(x, -1), [f(6)]),
    "argsort": (lambda x: jnp.argsort(x, -1), [f(6)]),
    "median and quantile": (
        lambda x: jnp.stack([jnp.median(x, -1), jnp.quantile(x, 0.3, axis=-1)], -1), [f(6)],
    ),
    "top k": (lambda x: lax.top_k(x, 3), [f(6)]),
    "argmax": (lambda x: jnp.argmax(x, -1), [f(6)]),
    "cumulative sum": (lambda x: jnp.cumsum(x, -1), [f(6)]),
    "cumulative maximum": (lambda x: lax.cummax(x, axis=1), [f(6)]),
    "associative scan": (associative, [f(6)]),
    "fourier": (lambda x: jnp.abs(jnp.fft.rfft(x)), [f(16)]),
    "spectrogram": (
        lambda x: jnp.abs(jnp.fft.rfft(x.reshape(x.shape[0], 4, 8) * np.hanning(8).astype("f4")))
        @ w(5, 3), [f(32)],
    ),
    "fourier of images": (lambda x: jnp.fft.ifft2(jnp.fft.fft2(x)).real, [f(8, 8)]),
    "solve": (
        lambda a, x: jnp.linalg.solve(a + 9 * jnp.eye(4, dtype="f4"), x[..., None])[..., 0],
        [f(4, 4), f(4)],
    ),
    "inverse": (lambda a: jnp.linalg.inv(a + 9 * jnp.eye(4, dtype="f4")), [f(4, 4)]),
    "determinant": (lambda a: jnp.linalg.det(a), [f(4, 4)]),
    "cholesky": (
        lambda a: jnp.linalg.cholesky(a @ a.mT + jnp.eye(4, dtype="f4")), [f(4, 4)],
    ),
    "qr": (lambda a: jnp.linalg.qr(a), [f(4, 4)]),
    "singular values": (lambda a: jnp.linalg.svd(a, compute_uv=False), [f(4, 3)]),
    "eigenvalues": (lambda a: jnp.linalg.eigvalsh(a + a.mT), [f(4, 4)]),
    "triangular": (
        lambda a, x: jax.scipy.linalg.solve_triangular(
            jnp.tril(a) + 5 * jnp.eye(4, dtype="f4"), x[..., None], lower=True
        ), [f(4, 4), f(4)],
    ),
    "matrix power": (lambda a: jnp.linalg.matrix_power(a, 3), [f(4, 4)]),
    "gradient of each": (loss_and_gradient, [f(4)]),
    "gradient of a sum": (langevin, [f(4)]),
    "noise of a key for each": (keyed_noise, [f(4), i()]),
    "dropout of a key for each": (keyed_dropout, [f(4), i()]),
    "sampling with a key for each": (sampled, [f(4), i()]),
    "resize": (
        lambda x: jax.image.resize(x, (x.shape[0], 12, 12, 3), "bilinear"), [f(8, 8, 3)],
    ),
    "cubic resize": (
        lambda x: jax.image.resize(x, (x.shape[0], 4, 4, 3), "cubic"), [f(8, 8, 3)],
    ),
    "flip and pad": (lambda x: jnp.pad(x[:, ::-1], ((0, 0), (2, 1), (0, 0))), [f(6, 2)]),
    "reflection": (lambda x: jnp.pad(x, ((0, 0), (2, 2)), mode="reflect"), [f(6)]),
    "tiles": (lambda x: jnp.tile(x, (1, 3)), [f(6)]),
    "repeat": (lambda x: jnp.repeat(x, 3, axis=1), [f(6)]),
    "time major": (
        lambda x: (jnp.tanh(x.transpose(1, 0, 2).reshape(-1, 4) @ w(4, 3))).reshape(
            5, -1, 3
        ).transpose(1, 0, 2), [f(5, 4)],
    ),
    "merged with time": (
        lambda x: jnp.tanh(x.reshape(-1, 4) @ w(4, 3)).reshape(x.shape[0], 5, 3), [f(5, 4)],
    ),
    "pixel shuffle": (
        lambda x: x.reshape(x.shape[0], 4, 4, 2, 2, 3).transpose(0, 1, 3, 2, 4, 5).reshape(
            x.shape[0], 8, 8, 3
        ), [f(4, 4, 12)],
    ),
    "deformable": (deformable, [f(8, 8), f(5, 2)]),
    "graph": (graph, [f(5, 4), i(7, 2)]),
    "weights from the row": (hyper, [f(4)]),
    "error function": (lambda x: jax.scipy.special.erf(x) + jax.scipy.special.erfinv(x), [f(4)]),
    "log gamma": (lambda x: jax.scipy.special.gammaln(x), [f(4)]),
    "bessel": (lambda x: jax.scipy.special.i1e(x), [f(4)]),
    "logsumexp": (lambda x: jax.nn.logsumexp(x, -1), [f(4)]),
    "images of bytes": (lambda x: (x.astype(jnp.float32) / 255.0).mean((1, 2)), [((8, 8, 3), "uint8")]),
    "half precision": (lambda x: nn.gelu(x @ w(4, 4).astype("bfloat16")), [((4,), "bfloat16")]),
    "complex numbers": (lambda x: jnp.abs(x * np.complex64(1 + 2j)), [((4,), "complex64")]),
    "truth values": (lambda x: (x & (x[:, :1])).any(-1), [((4,), "bool")]),
    "bits": (lambda x: lax.population_count(lax.bitcast_convert_type(x, jnp.uint32)).sum(-1), [f(4)]),
    "checkpointed": (lambda x: jax.checkpoint(lambda v: jnp.sin(v @ w(4, 4)))(x), [f(4)]),
    "euler steps": (
        lambda x: lax.fori_loop(0, 10, lambda _, v: v + 0.1 * jnp.tanh(v @ w(4, 4)), x), [f(4)],
    ),
}  # fmt: skip
