"""Write config.json and reference logits of small decoders, computed by transformers and torch.

Needs both: python tools/huggingface_references.py tests/data/huggingface [NAME ...]

Tensors have the names and shapes that transformers itself writes into a checkpoint, and it loads
them from there.
"""

import importlib
import json
import sys
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

PROMPT = 24
CONTINUED = 20
_SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
_GEMMA2 = {
    "head_dim": 24,
    "sliding_window": 8,
    "query_pre_attn_scalar": 20,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 2.0,
}
_PHI3 = {
    "sliding_window": 10,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.1, 1.3, 1.6],
    "long_factor": [1.0, 1.5, 4.0, 9.0],
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
_DEEPSEEK = {**_YARN, "mscale": 1.4, "mscale_all_dim": 0.7, "beta_fast": 8, "truncate": False}
_GEMMA3 = {
    "head_dim": 24,
    # With more layers or sharper attention, transformers' own rounding would exceed the tests'
    # tolerance.
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 8,
    "query_pre_attn_scalar": 256,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
    },
}
_MIXTURE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
_QWEN2_MOE = {**_MIXTURE, "shared_expert_intermediate_size": 80, "norm_topk_prob": False}
_QWEN3_MOE = {
    **_MIXTURE,
    "head_dim": 24,
    "num_hidden_layers": 4,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [3],
    "norm_topk_prob": True,
}
_SMOLLM3 = {
    "num_hidden_layers": 4,
    "no_rope_layers": [1, 0, 1, 0],
    "use_sliding_window": True,
    "sliding_window": 8,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}
_GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
    "logits_scaling": 4.0,
    "tie_word_embeddings": True,
}
_GPT2 = {
    "vocab_size": 128,
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": _LLAMA3, "attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("Llama", {"rope_parameters": _LINEAR, "head_dim": 24}),
    "mistral": ("Mistral", {"sliding_window": 8}),
    "smollm3": ("SmolLM3", _SMOLLM3),
    "granite": ("Granite", _GRANITE),
    "olmo2": ("Olmo2", {"attention_bias": True}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": (
        "Qwen3",
        {
            "head_dim": 24,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 1,
        },
    ),
    "phi3": ("Phi3", _PHI3),
    "gemma2": ("Gemma2", _GEMMA2),
    "gpt2": ("GPT2", _GPT2),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": _YARN}),
    "llama-yarn": ("Llama", {"rope_parameters": _DEEPSEEK}),
    "gemma3": ("Gemma3", _GEMMA3),
    "phi3-long": ("Phi3", {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 16}),
    "phi3-short": ("Phi3", {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 64}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": 16}),
    "qwen2-moe": ("Qwen2Moe", _QWEN2_MOE),
    "qwen3-moe": ("Qwen3Moe", _QWEN3_MOE),
}
"""The family and the fields of config.json besides the sizes, by directory name."""
_CLASSES = {
    "GPT2": ("GPT2Config", "GPT2LMHeadModel"),
    "Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
}
"""The names of both classes where they cannot be derived from the family."""
_NORMS = ("norm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight")


def seeded(name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Return a tensor's values, derived from its name and shape."""
    numbers = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    around = 1.0 if len(shape) == 1 and name.endswith(_NORMS) else 0.0
    return (around + 0.12 * numbers).astype(np.float32)


def main(place: Path, names: Sequence[str]) -> None:
    """Write a directory for each case, or only for the named ones."""
    for name in names or CASES:
        _write(place / name, *CASES[name])


def _write(directory: Path, family: str, stated: Mapping[str, Any]) -> None:
    torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    config_class, model_class = _CLASSES.get(family, (f"{family}Config", f"{family}ForCausalLM"))
    sizes = {} if "n_embd" in stated else _SMALL
    config = getattr(transformers, config_class)(**{**sizes, **stated})
    kind = getattr(transformers, model_class)
    with tempfile.TemporaryDirectory() as checkpoint:
        shapes = _write_checkpoint(kind(config), Path(checkpoint))
        model = kind.from_pretrained(
            checkpoint, attn_implementation="eager", dtype=torch.float32
        ).eval()
    with torch.no_grad():
        prompt = np.random.default_rng(1).integers(3, 128, PROMPT)
        asked = torch.from_numpy(prompt[None])
        model.generation_config.eos_token_id = None
        tokens = model.generate(
            asked, attention_mask=torch.ones_like(asked), max_new_tokens=CONTINUED, do_sample=False
        )
        logits = model(tokens).logits[0, PROMPT - 1 : -1].numpy()
    directory.mkdir(parents=True, exist_ok=True)
    model.config.architectures = [model_class]
    (directory / "config.json").write_text(model.config.to_json_string(), encoding="utf-8")
    text = json.dumps(shapes, indent=0)
    (directory / "shapes.json").write_text(text + "\n", encoding="utf-8")
    found = tokens[0].numpy().astype(np.int32)
    np.savez_compressed(directory / "references.npz", tokens=found, logits=logits)


def _write_checkpoint(model: Any, directory: Path) -> dict[str, list[int]]:
    """Write a model with values derived from its tensors' names; return the shapes by name."""
    safetensors = importlib.import_module("safetensors.numpy")
    model.float().save_pretrained(directory)
    file = directory / "model.safetensors"
    shapes = {name: list(array.shape) for name, array in safetensors.load_file(file).items()}
    numbers = {name: seeded(name, tuple(shape)) for name, shape in shapes.items()}
    safetensors.save_file(numbers, file, metadata={"format": "pt"})
    return shapes


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
