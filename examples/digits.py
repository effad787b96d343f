"""Handwritten digits: a small convolutional network, trained on real 8x8 images.

    python examples/digits.py models/digits/1

The images ship with scikit-learn (1797 of them, from the UCI repository); a fifth is held out and
never trained on.
"""

import sys
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

from xlaserve import Exportable

SEED = 7
STEPS = 3000
BATCH = 64
LEARNING_RATE = 4e-3

Parameters = dict[str, jax.Array]


@dataclass(frozen=True)
class Images:
    """Images of 8x8 values between 0 and 1, and the digit that each shows."""

    pixels: np.ndarray
    digits: np.ndarray


def split() -> tuple[Images, Images]:
    """Return the images to train on, and those held out: always the same fifth."""
    flat, digits = load_digits(return_X_y=True)
    pixels = (flat.reshape(-1, 8, 8) / 16).astype(np.float32)
    order = np.random.default_rng(SEED).permutation(len(digits))
    held_out, training = np.split(order, [len(order) // 5])
    return (
        Images(pixels[training], digits[training]),
        Images(pixels[held_out], digits[held_out]),
    )


def initial_parameters() -> Parameters:
    """Return random weights, scaled so that activations keep their size, and zero biases."""
    shapes = {"conv1": (3, 3, 1, 16), "conv2": (3, 3, 16, 32), "dense": (4 * 4 * 32, 10)}
    keys = jax.random.split(jax.random.key(SEED), len(shapes))
    parameters: Parameters = {}
    for key, (name, shape) in zip(keys, shapes.items(), strict=True):
        scale = np.sqrt(2 / np.prod(shape[:-1]))
        parameters[f"{name}/weight"] = scale * jax.random.normal(key, shape)
        parameters[f"{name}/bias"] = jnp.zeros(shape[-1])
    return parameters


def logits(parameters: Parameters, image: jax.Array) -> jax.Array:
    """Return ten scores per image of [batch, 8, 8]."""
    x = image[..., None]
    for name, stride in (("conv1", 1), ("conv2", 2)):
        x = jax.lax.conv_general_dilated(
            x,
            parameters[f"{name}/weight"],
            window_strides=(stride, stride),
            padding="SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        x = jax.nn.relu(x + parameters[f"{name}/bias"][None, None, None])
    x = x.reshape(x.shape[0], -1)
    return x @ parameters["dense/weight"] + parameters["dense/bias"][None]


def predict(parameters: Parameters, image: jax.Array) -> jax.Array:
    """Return the probability of each digit."""
    return jax.nn.softmax(logits(parameters, image))


def loss(parameters: Parameters, image: jax.Array, digit: jax.Array) -> jax.Array:
    """Return the mean cross-entropy."""
    scores = jax.nn.log_softmax(logits(parameters, image))
    return -jnp.take_along_axis(scores, digit[:, None], axis=1).mean()


@dataclass(frozen=True)
class Adam:
    """Parameters in training, with running means of their gradients and squared gradients."""

    parameters: Parameters
    mean: Parameters
    square: Parameters


jax.tree_util.register_dataclass(Adam)


@jax.jit
def step(state: Adam, number: jax.Array, image: jax.Array, digit: jax.Array) -> Adam:
    """Take a step of Adam (Kingma and Ba, 2015), with a decreasing learning rate."""
    parameters, mean, square = state.parameters, state.mean, state.square
    gradient = jax.grad(loss)(parameters, image, digit)
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, gradient)
    square = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g**2, square, gradient)
    rate = LEARNING_RATE * (1 - number / (STEPS + 1))
    rate *= jnp.sqrt(1 - 0.999**number) / (1 - 0.9**number)
    parameters = jax.tree.map(
        lambda p, m, s: p - rate * m / (jnp.sqrt(s) + 1e-8), parameters, mean, square
    )
    return Adam(parameters, mean, square)


def shifted(random: np.random.Generator, pixels: np.ndarray) -> np.ndarray:
    """Shift images by up to one pixel each way, so that the network does not memorise positions."""
    padded = np.pad(pixels, ((0, 0), (1, 1), (1, 1)))
    row, column = random.integers(0, 3, 2)
    return padded[:, row : row + 8, column : column + 8]


def train(images: Images) -> Parameters:
    """Return parameters that were trained on these images."""
    parameters = initial_parameters()
    zeros = jax.tree.map(jnp.zeros_like, parameters)
    state = Adam(parameters, zeros, zeros)
    random = np.random.default_rng(SEED)
    for number in range(1, STEPS + 1):
        chosen = random.integers(0, len(images.digits), BATCH)
        pixels = shifted(random, images.pixels[chosen])
        state = step(state, np.float32(number), pixels, images.digits[chosen])
    return state.parameters


def accuracy(parameters: Parameters, images: Images) -> float:
    """Return the fraction of images that are classified correctly."""
    found = np.argmax(predict(parameters, jnp.asarray(images.pixels)), axis=1)
    return float(np.mean(found == images.digits))


def model() -> Exportable:
    """Train, and print the accuracy on held-out images."""
    training, held_out = split()
    parameters = train(training)
    print(f"held-out accuracy: {accuracy(parameters, held_out):.2%} of {len(held_out.digits)}")
    return Exportable(
        predict,
        parameters,
        {"image": ("FP32", [-1, 8, 8])},
        outputs=["probabilities"],
        max_batch_size=64,
    )


if __name__ == "__main__":
    print(model().write(sys.argv[1]))
