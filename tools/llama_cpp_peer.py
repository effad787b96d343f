"""Serves a checkpoint of `write_checkpoint` with llama.cpp, for tools/compare_generation.py.

    python tools/llama_cpp_peer.py DIRECTORY GGUF SLOTS LENGTH THREADS

Run by a Python with the packages xllamacpp (llama.cpp in a wheel), gguf and safetensors. The
checkpoint is written as GGUF with the same FP32 weights; keys and values are FP32, too. Prints a
line with the name of the server and its port, and serves until stdin ends.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

ROPE_BASE = 10000.0
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Tensor names of a layer: Hugging Face's, and llama.cpp's."""


def gguf_name(name: str) -> str:
    """Return llama.cpp's name for a tensor; raises KeyError if it has none."""
    if name in NAMES:
        return NAMES[name]
    number, _, rest = name.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{LAYER_NAMES[rest.removesuffix('.weight')]}.weight"


def turned(matrix: Any, heads: int) -> Any:
    """Return the rows of q or k, [heads * dim, hidden], permuted for llama.cpp's rotation.

    Hugging Face rotates element i of a head with element i + dim / 2, llama.cpp 2 i with 2 i + 1.
    """
    rows, columns = matrix.shape
    halves = matrix.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def write_gguf(directory: Path, target: Path) -> None:
    """Write a checkpoint as a GGUF file, in FP32."""
    gguf, safetensors = map(importlib.import_module, ("gguf", "safetensors"))
    config = json.loads((directory / "config.json").read_text())
    heads, keys = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(str(target), "llama", use_temp_file=False)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(keys)
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    _add_words(writer, gguf.TokenType, config)
    with safetensors.safe_open(directory / "model.safetensors", "numpy") as stored:
        for name in stored.keys():  # noqa: SIM118 - it is no dictionary
            array = stored.get_tensor(name)
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                array = turned(array, heads if name.endswith("q_proj.weight") else keys)
            writer.add_tensor(gguf_name(name), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_words(writer: Any, kinds: Any, config: dict[str, Any]) -> None:
    """Add a vocabulary: prompts are token ids, but the server requires a word for each id."""
    special = {0: "<unk>", config["bos_token_id"]: "<s>", config["eos_token_id"]: "</s>"}
    numbers = range(config["vocab_size"])
    writer.add_tokenizer_model("llama")
    writer.add_token_list([special.get(number, f"▁w{number}") for number in numbers])
    writer.add_token_scores([-float(number) for number in numbers])
    found = [kinds.CONTROL if number in special else kinds.NORMAL for number in numbers]
    writer.add_token_types([kinds.UNKNOWN, *found[1:]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def main(directory: Path, target: Path, slots: int, length: int, threads: int) -> None:
    """Serve until standard input ends."""
    xllamacpp = importlib.import_module("xllamacpp")
    write_gguf(directory, target)
    asked = xllamacpp.CommonParams()
    asked.model.path = str(target)
    # Each slot has as many positions as one of ours; n_ctx is the total of all slots.
    asked.n_parallel, asked.n_ctx = slots, slots * length
    asked.cpuparams.n_threads = asked.cpuparams_batch.n_threads = threads
    asked.cache_type_k = asked.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    # Disable the prompt cache, which would keep copies for repeated prompts.
    asked.cache_ram_mib, asked.verbosity = 0, 0
    server = xllamacpp.Server(asked)
    made = importlib.import_module("importlib.metadata").version("xllamacpp")
    print(json.dumps({"name": f"llama.cpp (xllamacpp {made})", "url": server.listening_address}))
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:6]))
