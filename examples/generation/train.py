"""Train a small GPT on the text that ships with Python, export it, and complete a sentence.

    python examples/generation/train.py build/story models/story/1
    python examples/generation/train.py build/story models/story/1 --steps 50   # sooner, but worse

The text is `pydoc_data.topics`, half a million characters about the language. Afterwards
`build/story` contains the parameters (model.safetensors) and the tokenizer (tokenizer.json).
"""

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics
from typing import Any

import cached
import export
import gpt
import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SEED = 7
STEPS = 600
BATCH = 8
LENGTH = 256
"""Context length of the model: prompt and answer together."""
VOCAB = 1024
LEARNING_RATE = 3e-3
WARM_UP = 12
"""The learning rate warms up during the first 1/12 of the steps."""


def texts() -> tuple[list[str], list[str]]:
    """Return the topics to train on, and those held out: always the same twentieth."""
    found = [topics.topics[name].strip() for name in sorted(topics.topics)]
    held_out = [text for index, text in enumerate(found) if index % 20 == 10]
    return [text for text in found if text not in held_out], held_out


def trained_tokenizer(found: list[str]) -> Tokenizer:
    """Return a byte-level BPE tokenizer: it has a token for every byte, so no text is unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[export.END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(found, trainer)
    return tokenizer


def tokens_of(tokenizer: Tokenizer, found: list[str]) -> np.ndarray:
    """Return all texts as tokens, each followed by the end token."""
    end = tokenizer.token_to_id(export.END)
    return np.concatenate([[*one.ids, end] for one in tokenizer.encode_batch(found)]).astype("i4")


def batches(tokens: np.ndarray, steps: int) -> Iterator[np.ndarray]:
    """Yield rows of tokens, one longer than the context: each token's target is the next one."""
    random = np.random.default_rng(SEED)
    for _ in range(steps):
        starts = random.integers(0, len(tokens) - LENGTH, BATCH)
        yield tokens[starts[:, None] + np.arange(LENGTH + 1)]


def loss(params: gpt.Parameters, batch: jax.Array) -> jax.Array:
    """Return the mean cross-entropy of the next token, in nats."""
    scores = jax.nn.log_softmax(cached.whole(gpt.logits, params, batch[:, :-1]))
    return -jnp.take_along_axis(scores, batch[:, 1:, None], axis=2).mean()


@dataclass(frozen=True)
class Adam:
    """Parameters in training, with running means of their gradients and squared gradients."""

    params: gpt.Parameters
    mean: gpt.Parameters
    square: gpt.Parameters


jax.tree_util.register_dataclass(Adam)


@jax.jit
def step(state: Adam, number: jax.Array, rate: jax.Array, batch: jax.Array) -> tuple[Adam, Any]:
    """Take a step of Adam (Kingma and Ba, 2015); return the new state and the loss before it."""
    value, gradient = jax.value_and_grad(loss)(state.params, batch)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradient)))
    gradient = jax.tree.map(lambda g: g / jnp.maximum(norm, 1.0), gradient)
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.mean, gradient)
    square = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g**2, state.square, gradient)
    rate *= jnp.sqrt(1 - 0.99**number) / (1 - 0.9**number)
    params = jax.tree.map(
        lambda p, m, s: p - rate * m / (jnp.sqrt(s) + 1e-8), state.params, mean, square
    )
    return Adam(params, mean, square), value


def rate_at(number: int, steps: int) -> float:
    """Return the learning rate of a step: linear warm-up, then a cosine decay to a tenth."""
    rise = min(1.0, WARM_UP * number / steps)
    return LEARNING_RATE * rise * (0.55 + 0.45 * math.cos(math.pi * number / steps))


def train(params: gpt.Parameters, tokens: np.ndarray, steps: int) -> gpt.Parameters:
    """Return the parameters after `steps` steps, and print the loss meanwhile."""
    zeros = jax.tree.map(jnp.zeros_like, params)
    state = Adam(params, zeros, zeros)
    begin = time.monotonic()
    for number, batch in enumerate(batches(tokens, steps), 1):
        state, value = step(state, np.float32(number), np.float32(rate_at(number, steps)), batch)
        if number % 50 == 0 or number in (1, steps):
            print(
                f"step {number:4}: loss {value:.3f}, {time.monotonic() - begin:4.0f} s", flush=True
            )
    return state.params


def held_out_loss(params: gpt.Parameters, tokens: np.ndarray) -> float:
    """Return the mean loss on the held-out texts."""
    count = (len(tokens) - 1) // LENGTH
    starts = np.arange(count) * LENGTH
    rows = tokens[starts[:, None] + np.arange(LENGTH + 1)]
    return float(np.mean([loss(params, row[None]) for row in rows]))


def save(checkpoint: Path, params: gpt.Parameters, tokenizer: Tokenizer) -> None:
    """Write parameters and tokenizer to a directory."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    arrays = {name: np.asarray(array) for name, array in params.items()}
    save_file(arrays, checkpoint / export.PARAMETERS)
    tokenizer.save(str(checkpoint / export.TOKENIZER))


def main(checkpoint: Path, version: Path, steps: int) -> None:
    """Train, save, and export to a version directory."""
    training, held_out = texts()
    tokenizer = trained_tokenizer(training)
    tokens = tokens_of(tokenizer, training)
    params = gpt.initial(tokenizer.get_vocab_size(), LENGTH, seed=SEED)
    count = sum(array.size for array in params.values())
    print(f"{len(tokens)} tokens, {count / 1e6:.2f} million parameters", flush=True)
    params = train(params, tokens, steps)
    print(f"loss on topics held out: {held_out_loss(params, tokens_of(tokenizer, held_out)):.3f}")
    save(checkpoint, params, tokenizer)
    print(export.export(checkpoint, version))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small GPT, and export it.")
    parser.add_argument("checkpoint", type=Path, help="directory for parameters and tokenizer")
    parser.add_argument("version", type=Path, help="version directory, such as models/story/1")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps (%(default)s)")
    main(**vars(parser.parse_args()))
