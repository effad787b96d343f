"""A tiny model of embeddings in plain JAX, and what it answers, computed by NumPy."""

# Much of jax is typed, but not all that is called here.
# mypy: disallow-untyped-calls=False

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, processors

from support import tiny_chat
from xlaserve import export_model

VOCAB, SIZE = 32, 8
LENGTHS = (4, 8)
BEGIN = 1
"""The special token that the tokenizer puts before a text."""


def table() -> NDArray[np.float32]:
    return np.random.default_rng(3).normal(0, 1, (VOCAB, SIZE)).astype(np.float32)


def embed(params: Any, input_ids: Any, attention_mask: Any) -> Any:
    """Return the mean of the rows of the real tokens: one more, or one other, changes it."""
    real = attention_mask[..., None].astype(jnp.float32)
    found = (params["table"][input_ids] * real).sum(axis=1)
    return {"embedding": found / real.sum(axis=1)}


def expected(tokens: Sequence[int]) -> NDArray[np.float32]:
    """Return the embedding of token ids."""
    found: NDArray[np.float32] = table()[list(tokens)].mean(axis=0)
    return found


def export(path: Path, **declared: Any) -> Path:
    """Export the model into `path`/1, with a tokenizer and a configuration that declares it."""
    ids = ("INT32", [-1, "s"])
    export_model(
        embed,
        {"table": table()},
        {"input_ids": ids, "attention_mask": ids},
        path / "1",
        max_batch_size=4,
        compiled_shapes={"s": list(LENGTHS)},
        platforms=["cpu"],
    )
    tokenizer().save(str(path / "1" / "tokenizer.json"))
    said = json.dumps({"vocab": VOCAB, **declared})
    parameters = {"embeddings": said, "batch_sizes": "1,4"}
    written = {name: {"string_value": value} for name, value in parameters.items()}
    (path / "config.json").write_text(json.dumps({"parameters": written}))
    return path


def tokenizer() -> Tokenizer:
    """Return a tokenizer of letters that begins every text with a special token."""
    made = tiny_chat.tokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BEGIN)]
    )
    return made


def tokens_of(text: str) -> list[int]:
    return [BEGIN, *tiny_chat.tokens_of(text)]
