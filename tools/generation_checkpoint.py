"""Checkpoints of Llamas with random weights, for tools/compare_generation.py."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

VOCAB = 32_000
LENGTH = 1280
SIZES = {"tiny": (64, 2, 4, 2, 128), "125m": (768, 12, 12, 4, 2048), "1b": (2048, 16, 32, 8, 8192)}
"""By name: hidden size, layers, heads, key/value heads, and feed-forward size."""


def write_checkpoint(directory: Path, size: str) -> int:
    """Write a Llama with random weights in Hugging Face's format; return its parameter count."""
    hidden, layers, heads, keys, wide = SIZES[size]
    directory.mkdir()
    draw = np.random.default_rng(0).standard_normal

    def matrix(*shape: int) -> Any:
        return draw(shape, np.float32) * np.float32(0.02)

    kv = keys * hidden // heads
    tensors: dict[str, Any] = {
        "model.embed_tokens.weight": matrix(VOCAB, hidden),
        "model.norm.weight": np.ones(hidden, np.float32),
        "lm_head.weight": matrix(VOCAB, hidden),
    }
    for number in range(layers):
        place = f"model.layers.{number}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{place}{name}.weight"] = np.ones(hidden, np.float32)
        for name, out in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden)):
            tensors[f"{place}self_attn.{name}_proj.weight"] = matrix(out, hidden)
        for name, shape in (
            ("gate", (wide, hidden)),
            ("up", (wide, hidden)),
            ("down", (hidden, wide)),
        ):
            tensors[f"{place}mlp.{name}_proj.weight"] = matrix(*shape)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "max_position_embeddings": LENGTH,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return sum(int(array.size) for array in tensors.values())
