"""Well-known network architectures in plain JAX, with random parameters, for compile tests.

Each has the published size; `scale` divides it for tests.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from xlaserve.authoring.export import Exportable

Parameters: TypeAlias = dict[str, Any]
Function: TypeAlias = Callable[..., Mapping[str, jax.Array]]


@dataclass
class Drawn:
    """Random parameters by name, scaled so that activations keep their variance."""

    dtype: Any = np.float32
    arrays: Parameters = field(default_factory=dict)
    _random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(3))

    def weight(self, name: str, *shape: int) -> None:
        fan_in = int(np.prod(shape[:-1])) or 1
        drawn = self._random.standard_normal(shape, np.float32) / np.float32(np.sqrt(fan_in))
        self.arrays[name] = drawn.astype(self.dtype)

    def dense(self, name: str, into: int, out: int) -> None:
        self.weight(f"{name}/w", into, out)
        self.arrays[f"{name}/b"] = np.zeros(out, self.dtype)

    def conv(self, name: str, kernel: Sequence[int], into: int, out: int) -> None:
        """Add a convolution's parameters, with folded normalization (scale, shift)."""
        self.weight(f"{name}/w", *kernel, into, out)
        self.norm(name, out)

    def norm(self, name: str, size: int) -> None:
        self.arrays[f"{name}/scale"] = np.ones(size, self.dtype)
        self.arrays[f"{name}/shift"] = np.zeros(size, self.dtype)


# --- layers ------------------------------------------------------------------------------------


def dense(p: Parameters, name: str, x: jax.Array) -> jax.Array:
    weight: jax.Array = p[f"{name}/w"]
    bias: jax.Array = p[f"{name}/b"]
    return x @ weight + bias.reshape((1,) * (x.ndim - 1) + (-1,))


def _affine(p: Parameters, name: str, x: jax.Array) -> jax.Array:
    shape = (1,) * (x.ndim - 1) + (-1,)
    scale: jax.Array = p[f"{name}/scale"]
    shift: jax.Array = p[f"{name}/shift"]
    return x * scale.reshape(shape) + shift.reshape(shape)


def conv(p: Parameters, name: str, x: jax.Array, stride: int = 1, groups: int = 1) -> jax.Array:
    kernel = p[f"{name}/w"]
    letters = "HW"[: kernel.ndim - 2]
    out = jax.lax.conv_general_dilated(
        x,
        kernel,
        (stride,) * len(letters),
        "SAME",
        dimension_numbers=(f"N{letters}C", f"{letters}IO", f"N{letters}C"),
        feature_group_count=groups,
    )
    return _affine(p, name, out)


def layer_norm(p: Parameters, name: str, x: jax.Array) -> jax.Array:
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    return _affine(p, name, (x - mean) * jax.lax.rsqrt(variance + jnp.asarray(1e-5, x.dtype)))


def _heads(x: jax.Array, heads: int) -> jax.Array:
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)


def _attended(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key)
    scores = scores * jnp.asarray(query.shape[-1] ** -0.5, scores.dtype)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), value)
    return mixed.reshape(*mixed.shape[:2], -1)


def attention(p: Parameters, name: str, x: jax.Array, heads: int) -> jax.Array:
    parts = (_heads(dense(p, f"{name}/{part}", x), heads) for part in ("q", "k", "v"))
    return dense(p, f"{name}/o", _attended(*parts))


def _draw_block(drawn: Drawn, name: str, width: int, hidden: int) -> None:
    for part in ("q", "k", "v", "o"):
        drawn.dense(f"{name}/{part}", width, width)
    drawn.dense(f"{name}/up", width, hidden)
    drawn.dense(f"{name}/down", hidden, width)
    for part in ("first", "second"):
        drawn.norm(f"{name}/{part}", width)


def block(p: Parameters, name: str, x: jax.Array, heads: int) -> jax.Array:
    """Apply a pre-norm transformer layer."""
    x = x + attention(p, name, layer_norm(p, f"{name}/first", x), heads)
    hidden = jax.nn.gelu(dense(p, f"{name}/up", layer_norm(p, f"{name}/second", x)))
    return x + dense(p, f"{name}/down", hidden)


# --- Image networks ------------------------------------------------------------------------------


def resnet50(scale: int = 1) -> Exportable:
    """ResNet-50 for 224 x 224 pixels: 25.6 M parameters."""
    size, base, drawn = 224 // scale, 64 // scale, Drawn()
    stages = (3, 4, 6, 3)
    drawn.conv("stem", (7, 7), 3, base)
    channels = base
    for stage, blocks in enumerate(stages):
        width = base * 2**stage
        for index in range(blocks):
            name = f"{stage}/{index}"
            drawn.conv(f"{name}/a", (1, 1), channels, width)
            drawn.conv(f"{name}/b", (3, 3), width, width)
            drawn.conv(f"{name}/c", (1, 1), width, 4 * width)
            if not index:
                drawn.conv(f"{name}/kept", (1, 1), channels, 4 * width)
            channels = 4 * width
    drawn.dense("classes", channels, 1000)

    def predict(p: Parameters, image: jax.Array) -> Mapping[str, jax.Array]:
        x = jax.nn.relu(conv(p, "stem", image, 2))
        window = (1, 3, 3, 1)
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, (1, 2, 2, 1), "SAME")
        for stage, blocks in enumerate(stages):
            for index in range(blocks):
                name, stride = f"{stage}/{index}", 2 if stage and not index else 1
                y = jax.nn.relu(conv(p, f"{name}/a", x))
                y = jax.nn.relu(conv(p, f"{name}/b", y, stride))
                y = conv(p, f"{name}/c", y)
                x = jax.nn.relu(y + (x if index else conv(p, f"{name}/kept", x, stride)))
        return {"logits": dense(p, "classes", x.mean((1, 2)))}

    return _exportable(predict, drawn, {"image": ("FP32", [-1, size, size, 3])}, 32)


def mobilenet(scale: int = 1) -> Exportable:
    """MobileNetV2 (depthwise convolutions): 3.4 M parameters."""
    size, drawn = 224 // scale, Drawn()
    stages = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1),
              (6, 160, 3, 2), (6, 320, 1, 1))  # fmt: skip
    drawn.conv("stem", (3, 3), 3, 32)
    channels = 32
    for number, (expansion, out, repeats, _) in enumerate(stages):
        for index in range(repeats):
            name, wide = f"{number}/{index}", channels * expansion
            drawn.conv(f"{name}/a", (1, 1), channels, wide)
            drawn.conv(f"{name}/b", (3, 3), 1, wide)
            drawn.conv(f"{name}/c", (1, 1), wide, out)
            channels = out
    drawn.conv("last", (1, 1), channels, 1280)
    drawn.dense("classes", 1280, 1000)

    def predict(p: Parameters, image: jax.Array) -> Mapping[str, jax.Array]:
        x = jax.nn.relu6(conv(p, "stem", image, 2))
        for number, (_, out, repeats, stride) in enumerate(stages):
            for index in range(repeats):
                name, step = f"{number}/{index}", 1 if index else stride
                y = jax.nn.relu6(conv(p, f"{name}/a", x))
                y = jax.nn.relu6(conv(p, f"{name}/b", y, step, y.shape[-1]))
                y = conv(p, f"{name}/c", y)
                x = x + y if step == 1 and x.shape[-1] == out else y
        x = jax.nn.relu6(conv(p, "last", x))
        return {"logits": dense(p, "classes", x.mean((1, 2)))}

    return _exportable(predict, drawn, {"image": ("FP32", [-1, size, size, 3])}, 32)


def unet(scale: int = 1) -> Exportable:
    """U-Net that segments 256 x 256 pixels: 31 M parameters."""
    size, base, depth, drawn = 256 // scale, 64 // scale, 4, Drawn()
    widths = [base * 2**level for level in range(depth + 1)]
    for level, width in enumerate(widths):
        drawn.conv(f"down/{level}/a", (3, 3), widths[level - 1] if level else 3, width)
        drawn.conv(f"down/{level}/b", (3, 3), width, width)
    for level, width in reversed(list(enumerate(widths[:-1]))):
        drawn.conv(f"up/{level}/wide", (2, 2), 2 * width, width)
        drawn.conv(f"up/{level}/a", (3, 3), 2 * width, width)
        drawn.conv(f"up/{level}/b", (3, 3), width, width)
    drawn.conv("mask", (1, 1), base, 2)

    def predict(p: Parameters, image: jax.Array) -> Mapping[str, jax.Array]:
        x, kept = image, []
        for level in range(depth + 1):
            for part in "ab":
                x = jax.nn.relu(conv(p, f"down/{level}/{part}", x))
            if level < depth:
                kept.append(x)
                window = (1, 2, 2, 1)
                x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, window, "VALID")
        for level in reversed(range(depth)):
            x = x.repeat(2, axis=1).repeat(2, axis=2)
            x = jnp.concatenate([kept[level], conv(p, f"up/{level}/wide", x)], axis=-1)
            for part in "ab":
                x = jax.nn.relu(conv(p, f"up/{level}/{part}", x))
        return {"mask": conv(p, "mask", x)}

    return _exportable(predict, drawn, {"image": ("FP32", [-1, size, size, 3])}, 8)


def vit(scale: int = 1) -> Exportable:
    """ViT-B/16, which splits an image into 196 patches: 86 M parameters, in BF16."""
    size, width, layers, heads = 224 // scale, 768 // scale, 12 // scale, 12 // scale
    drawn, words = Drawn(jnp.bfloat16), (-(-size // 16)) ** 2
    drawn.conv("patches", (16, 16), 3, width)
    drawn.weight("places", words, width)
    for layer in range(layers):
        _draw_block(drawn, str(layer), width, 4 * width)
    drawn.dense("classes", width, 1000)

    def predict(p: Parameters, image: jax.Array) -> Mapping[str, jax.Array]:
        x = conv(p, "patches", image.astype(jnp.bfloat16), 16)
        x = x.reshape(-1, words, width) + p["places"][None]
        for layer in range(layers):
            x = block(p, str(layer), x, heads)
        return {"logits": dense(p, "classes", x.mean(1)).astype(jnp.float32)}

    return _exportable(predict, drawn, {"image": ("FP32", [-1, size, size, 3])}, 32)


# --- Text networks -------------------------------------------------------------------------------


def bert(scale: int = 1) -> Exportable:
    """BERT-base over 128 tokens: 110 M parameters."""
    width, layers, heads, length = 768 // scale, 12 // scale, 12 // scale, 128 // scale
    drawn = Drawn()
    drawn.weight("words", 30_522, width)
    drawn.weight("places", 512, width)
    drawn.norm("first", width)
    for layer in range(layers):
        _draw_block(drawn, str(layer), width, 4 * width)
    drawn.dense("pooled", width, width)

    def predict(p: Parameters, ids: jax.Array) -> Mapping[str, jax.Array]:
        x = layer_norm(p, "first", p["words"][ids] + p["places"][None, :length])
        for layer in range(layers):
            x = block(p, str(layer), x, heads)
        return {"states": x, "pooled": jnp.tanh(dense(p, "pooled", x[:, 0]))}

    return _exportable(predict, drawn, {"ids": ("INT32", [-1, length])}, 32)


def gpt_step(scale: int = 1) -> Exportable:
    """One step of GPT-2 (124 M parameters); its 1024-token cache is an input and output."""
    width, layers, heads, length = 768 // scale, 12 // scale, 12 // scale, 1024 // scale
    drawn = Drawn()
    drawn.weight("words", 50_257, width)
    drawn.weight("places", length, width)
    for layer in range(layers):
        _draw_block(drawn, str(layer), width, 4 * width)
    shape = [-1, layers, 2, length, width]

    def predict(
        p: Parameters, ids: jax.Array, place: jax.Array, cache: jax.Array
    ) -> Mapping[str, jax.Array]:
        x = p["words"][ids] + p["places"][place[:, 0]][:, None]
        here = jax.nn.one_hot(place[:, 0], length, dtype=x.dtype)[:, :, None]
        known = jnp.arange(length, dtype=place.dtype)[None] <= place
        kept = []
        for layer in range(layers):
            name = str(layer)
            normed = layer_norm(p, f"{name}/first", x)
            held = [cache[:, layer, part] * (1 - here) for part in range(2)]
            added = [dense(p, f"{name}/{part}", normed) for part in "kv"]
            key, value = (old + here * new for old, new in zip(held, added, strict=True))
            kept.append(jnp.stack([key, value], axis=1))
            query = _heads(dense(p, f"{name}/q", normed), heads)
            scores = jnp.einsum("bqhd,bkhd->bhqk", query, _heads(key, heads))
            scores = jnp.where(known[:, None, None], scores, jnp.asarray(-1e9, scores.dtype))
            mixed = jnp.einsum(
                "bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), _heads(value, heads)
            )
            x = x + dense(p, f"{name}/o", mixed.reshape(*mixed.shape[:2], -1))
            hidden = jax.nn.gelu(dense(p, f"{name}/up", layer_norm(p, f"{name}/second", x)))
            x = x + dense(p, f"{name}/down", hidden)
        return {"logits": x[:, 0] @ p["words"].T, "cache": jnp.stack(kept, axis=1)}

    inputs = {"ids": ("INT32", [-1, 1]), "place": ("INT32", [-1, 1]), "cache": ("FP32", shape)}
    return _exportable(predict, drawn, inputs, 8)


def lstm(scale: int = 1) -> Exportable:
    """Two LSTM layers over 64 tokens, written as loops."""
    width, length, drawn = 1024 // scale, 64 // scale, Drawn()
    drawn.weight("words", 10_000, width)
    for layer in range(2):
        drawn.dense(str(layer), 2 * width, 4 * width)
    drawn.dense("next", width, 10_000)

    def predict(p: Parameters, ids: jax.Array) -> Mapping[str, jax.Array]:
        x = p["words"][ids].transpose(1, 0, 2)
        for layer in range(2):
            x = _run_lstm(partial(dense, p, str(layer)), x, width)
        return {"logits": dense(p, "next", x[-1])}

    return _exportable(predict, drawn, {"ids": ("INT32", [-1, length])}, 32)


def _run_lstm(gates: Callable[[jax.Array], jax.Array], x: jax.Array, width: int) -> jax.Array:
    def step(
        state: tuple[jax.Array, jax.Array], now: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        hidden, cell = state
        into, forget, new, out = jnp.split(gates(jnp.concatenate([now, hidden], -1)), 4, axis=-1)
        cell = jax.nn.sigmoid(forget) * cell + jax.nn.sigmoid(into) * jnp.tanh(new)
        hidden = jax.nn.sigmoid(out) * jnp.tanh(cell)
        return (hidden, cell), hidden

    nothing = jnp.zeros_like(x[0, :, :width])
    return jax.lax.scan(step, (nothing, nothing), x)[1]


def experts(scale: int = 1) -> Exportable:
    """A 6-layer transformer that computes all 8 experts in each layer, in BF16."""
    width, layers, heads, length, count = 512 // scale, 6 // scale, 8 // scale, 128 // scale, 8
    drawn = Drawn(jnp.bfloat16)
    drawn.weight("words", 32_000, width)
    for layer in range(layers):
        _draw_block(drawn, str(layer), width, width)
        drawn.dense(f"{layer}/gate", width, count)
        drawn.weight(f"{layer}/into", count, width, 4 * width)
        drawn.weight(f"{layer}/out", count, 4 * width, width)

    def predict(p: Parameters, ids: jax.Array) -> Mapping[str, jax.Array]:
        x = p["words"][ids]
        for layer in range(layers):
            x = block(p, str(layer), x, heads)
            gates = jax.nn.softmax(dense(p, f"{layer}/gate", x), axis=-1)
            hidden = jax.nn.relu(jnp.einsum("btd,edf->btef", x, p[f"{layer}/into"]))
            x = x + jnp.einsum("btef,efd,bte->btd", hidden, p[f"{layer}/out"], gates)
        return {"states": x.astype(jnp.float32)}

    return _exportable(predict, drawn, {"ids": ("INT32", [-1, length])}, 16)


# --- Other networks ------------------------------------------------------------------------------


def recommender(scale: int = 1) -> Exportable:
    """DLRM: 26 embedding tables of 100 000 rows, and the dot products of the looked-up vectors."""
    rows, width, tables, drawn = 100_000 // scale, 64, 26, Drawn()
    for table in range(tables):
        drawn.weight(f"table/{table}", rows, width)
    for name, into, out in (("a", 13, 512), ("b", 512, width), ("c", 27 * 27 + width, 512),
                            ("d", 512, 1)):  # fmt: skip
        drawn.dense(name, into, out)

    def predict(p: Parameters, dense_in: jax.Array, ids: jax.Array) -> Mapping[str, jax.Array]:
        x = jax.nn.relu(dense(p, "b", jax.nn.relu(dense(p, "a", dense_in))))
        found = [p[f"table/{table}"][ids[:, table]] for table in range(tables)]
        all_of = jnp.stack([x, *found], axis=1)
        products = jnp.einsum("bid,bjd->bij", all_of, all_of).reshape(-1, 27 * 27)
        hidden = jax.nn.relu(dense(p, "c", jnp.concatenate([x, products], axis=-1)))
        return {"click": jax.nn.sigmoid(dense(p, "d", hidden))}

    inputs = {"dense_in": ("FP32", [-1, 13]), "ids": ("INT32", [-1, tables])}
    return _exportable(predict, drawn, inputs, 256)


def speech(scale: int = 1) -> Exportable:
    """Encoder of Whisper-base for 30 seconds of audio: 20 M parameters."""
    width, layers, heads, frames = 512 // scale, 6 // scale, 8 // scale, 3000 // scale
    drawn = Drawn()
    drawn.conv("first", (3,), 80, width)
    drawn.conv("second", (3,), width, width)
    drawn.weight("places", frames // 2, width)
    for layer in range(layers):
        _draw_block(drawn, str(layer), width, 4 * width)

    def predict(p: Parameters, mel: jax.Array) -> Mapping[str, jax.Array]:
        x = jax.nn.gelu(conv(p, "first", mel))
        x = jax.nn.gelu(conv(p, "second", x, 2)) + p["places"][None]
        for layer in range(layers):
            x = block(p, str(layer), x, heads)
        return {"states": x}

    return _exportable(predict, drawn, {"mel": ("FP32", [-1, frames, 80])}, 8)


def mixer(scale: int = 1) -> Exportable:
    """MLP-Mixer B/16 (the first layer is its only convolution): 60 M parameters."""
    size, width, layers = 224 // scale, 768 // scale, 12 // scale
    drawn, words = Drawn(), (-(-size // 16)) ** 2
    drawn.conv("patches", (16, 16), 3, width)
    for layer in range(layers):
        for part, into, hidden in (("words", words, 384), ("channels", width, 4 * width)):
            drawn.norm(f"{layer}/{part}", width)
            drawn.dense(f"{layer}/{part}/up", into, hidden)
            drawn.dense(f"{layer}/{part}/down", hidden, into)
    drawn.dense("classes", width, 1000)

    def mixed(p: Parameters, name: str, x: jax.Array) -> jax.Array:
        return dense(p, f"{name}/down", jax.nn.gelu(dense(p, f"{name}/up", x)))

    def predict(p: Parameters, image: jax.Array) -> Mapping[str, jax.Array]:
        x = conv(p, "patches", image, 16).reshape(-1, words, width)
        for layer in range(layers):
            normed = layer_norm(p, f"{layer}/words", x).transpose(0, 2, 1)
            x = x + mixed(p, f"{layer}/words", normed).transpose(0, 2, 1)
            x = x + mixed(p, f"{layer}/channels", layer_norm(p, f"{layer}/channels", x))
        return {"logits": dense(p, "classes", x.mean(1))}

    return _exportable(predict, drawn, {"image": ("FP32", [-1, size, size, 3])}, 32)


def wavenet(scale: int = 1) -> Exportable:
    """WaveNet: thirty dilated convolutions over one second of audio."""
    samples, width, drawn = 16_000 // scale, 64, Drawn()
    drawn.conv("first", (1,), 1, width)
    for layer in range(30):
        drawn.conv(f"{layer}/gates", (2,), width, 2 * width)
        drawn.conv(f"{layer}/out", (1,), width, width)
    drawn.conv("last", (1,), width, 256)

    def predict(p: Parameters, sound: jax.Array) -> Mapping[str, jax.Array]:
        x = conv(p, "first", sound)
        total = jnp.zeros_like(x)
        for layer in range(30):
            held = p[f"{layer}/gates/w"]
            both = jax.lax.conv_general_dilated(
                x, held, (1,), "SAME", rhs_dilation=(2 ** (layer % 10),),
                dimension_numbers=("NHC", "HIO", "NHC"),
            )  # fmt: skip
            left, right = jnp.split(_affine(p, f"{layer}/gates", both), 2, axis=-1)
            added = conv(p, f"{layer}/out", jnp.tanh(left) * jax.nn.sigmoid(right))
            x, total = x + added, total + added
        return {"next": conv(p, "last", jax.nn.relu(total))}

    return _exportable(predict, drawn, {"sound": ("FP32", [-1, samples, 1])}, 8)


def linear_algebra(scale: int = 1) -> Exportable:
    """Solve linear systems with Cholesky and QR, for which platforms have their own kernels."""
    size = 64 // scale

    def predict(p: Parameters, a: jax.Array, b: jax.Array) -> Mapping[str, jax.Array]:
        square = a @ a.transpose(0, 2, 1) + jnp.eye(size, dtype=a.dtype)[None]
        lower = jnp.linalg.cholesky(square)
        solved = jax.lax.linalg.triangular_solve(lower, b, left_side=True, lower=True)
        return {"solved": solved, "r": jnp.linalg.qr(a)[1], "values": jnp.linalg.eigvalsh(square)}

    inputs = {"a": ("FP32", [-1, size, size]), "b": ("FP32", [-1, size, 1])}
    return _exportable(predict, Drawn(), inputs, 8)


def _exportable(
    predict: Function, drawn: Drawn, inputs: Mapping[str, tuple[str, Sequence[int]]], batch: int
) -> Exportable:
    return Exportable(
        predict, drawn.arrays, inputs, max_batch_size=batch, platforms=("cpu", "cuda", "tpu")
    )


ARCHITECTURES: Mapping[str, Callable[[int], Exportable]] = {
    function.__name__: function
    for function in (
        resnet50, mobilenet, unet, vit, bert, gpt_step, lstm, experts, recommender, speech, mixer,
        wavenet, linear_algebra,
    )
}  # fmt: skip
