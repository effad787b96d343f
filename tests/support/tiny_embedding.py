"""A tiny embedding model in plain JAX, and its expected answers, computed with NumPy."""

# Some of the jax functions called here are untyped.
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
"""Special token that the tokenizer prepends to every text."""


def table() -> NDArray[np.float32]:
    return np.random.default_rng(3).normal(0, 1, (VOCAB, SIZE)).astype(np.float32)


def embed(params: Any, input_ids: Any, attention_mask: Any) -> Any:
    """Return the mean embedding of the real tokens; any additional or wrong token changes it."""
    real = attention_mask[..., None].astype(jnp.float32)
    found = (params["table"][input_ids] * real).sum(axis=1)
    return {"embedding": found / real.sum(axis=1)}


def expected(tokens: Sequence[int]) -> NDArray[np.float32]:
    """Return the expected embedding of token ids."""
    found: NDArray[np.float32] = table()[list(tokens)].mean(axis=0)
    return found


def export(path: Path, **declared: Any) -> Path:
    """Export the model into `path`/1, with a tokenizer and the declaring configuration."""
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
    """Return a letter tokenizer that prepends a special token."""
    made = tiny_chat.tokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BEGIN)]
    )
    return made


def tokens_of(text: str) -> list[int]:
    return [BEGIN, *tiny_chat.tokens_of(text)]
