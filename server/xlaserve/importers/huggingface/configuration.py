"""Reads a decoder's form from config.json; unsupported keys and values are errors."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from xlaserve.importers.huggingface import config_json, rope
from xlaserve.importers.huggingface.config_json import check_keys, one_of, positive, refused, size
from xlaserve.importers.huggingface.families import (
    FAMILIES,
    MLP_BIAS,
    OUTPUT_BIAS,
    QKV_BIAS,
    Family,
    keys_of,
)
from xlaserve.importers.huggingface.form import Experts, Form, Rope, Stored

_MAX_LAYERS = 1024
_MAX_EXPERTS = 4096

_OBEYED = keys_of(
    "architectures vocab_size hidden_size num_attention_heads intermediate_size num_hidden_layers "
    "max_position_embeddings rms_norm_eps hidden_act tie_word_embeddings eos_token_id"
)
_WITHOUT_EFFECT = keys_of(
    # Keys without effect: metadata, training options, and settings that the server replaces.
    "model_type dtype torch_dtype transformers_version use_cache bos_token_id pad_token_id "
    "initializer_range attention_dropout resid_pdrop embd_pdrop _name_or_path cache_implementation "
    "output_attentions output_hidden_states return_dict id2label label2id problem_type "
    "chunk_size_feed_forward _attn_implementation"
)
_ONLY: Mapping[str, tuple[object, ...]] = {
    "is_encoder_decoder": (False,),
    "quantization_config": (None,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
    "add_cross_attention": (False,),
    "pretraining_tp": (1, None),
    "use_bidirectional_attention": (False, None),
}
"""Keys that must have one of these values, if present."""
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


def read(directory: Path) -> Form:
    """Return the form of the decoder in a directory. Raises InvalidModel."""
    return form_of(config_json.read(directory))


def form_of(config: Mapping[str, object]) -> Form:
    """Return the form that a decoded config.json describes. Raises InvalidModel."""
    family = _family(config)
    check_keys(config, family.obeyed(_OBEYED) | _WITHOUT_EFFECT, _ONLY, family.unused)
    key = family.key
    hidden, heads = size(config, key("hidden_size")), size(config, key("num_attention_heads"))
    kv_heads = size(config, "num_key_value_heads", heads if family.optional_kv_heads else None)
    head_dim = size(config, "head_dim", hidden // heads if family.optional_head_dim else None)
    if heads % kv_heads:
        raise refused("num_key_value_heads", f"a divisor of {heads} heads", kv_heads)
    widened = family.default_widening and family.default_widening * hidden
    layers = size(config, key("num_hidden_layers"), most=_MAX_LAYERS)
    kinds = _kinds(config, family, layers)
    return Form(
        vocab=size(config, "vocab_size"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=size(config, key("intermediate_size"), widened),
        max_length=size(config, key("max_position_embeddings")),
        windows=tuple(size(config, "sliding_window") if slides else None for slides in kinds),
        ropes=_ropes(config, family, head_dim, kinds),
        norm_epsilon=positive(config, key("rms_norm_eps")),
        centred=family.centred,
        norm_offset=1.0 if family.gemma else 0.0,
        attention_scale=_attention_scale(config, family, head_dim),
        attention_cap=_cap(config, "attn_logit_softcapping"),
        logit_cap=_cap(config, "final_logit_softcapping"),
        embedding_scale=math.sqrt(hidden)
        if family.gemma
        else _factor(config, "embedding_multiplier"),
        activation=one_of(config, key("hidden_act"), _ACTIVATIONS),
        post_norms=any(one.role == "attention_post_norm" for one in family.layout.layer),
        tied=_flag(config, "tie_word_embeddings", default=family.tied),
        stop_tokens=_stop_tokens(config),
        layout=replace(family.layout, layer=_layer(config, family)),
        experts=_experts(config, family, layers) if family.experts else None,
        residual_scale=_factor(config, "residual_multiplier"),
        logit_divisor=_factor(config, "logits_scaling"),
    )


def _family(config: Mapping[str, object]) -> Family:
    named = config.get("architectures")
    if isinstance(named, list) and len(named) == 1 and str(named[0]) in FAMILIES:
        return FAMILIES[str(named[0])]
    raise refused("architectures", f"one of {', '.join(FAMILIES)}", named)


def _attention_scale(config: Mapping[str, object], family: Family, head_dim: int) -> float:
    if "attention_multiplier" in family.keys:
        return _factor(config, "attention_multiplier")
    scalar = positive(config, "query_pre_attn_scalar") if family.gemma else head_dim
    return float(scalar**-0.5)


def _layer(config: Mapping[str, object], family: Family) -> tuple[Stored, ...]:
    tensors = list(family.layout.layer)
    if _flag(config, "qkv_bias", default="qkv_bias" in family.keys):
        tensors += QKV_BIAS
    if _flag(config, "attention_bias"):
        tensors += [*QKV_BIAS, *OUTPUT_BIAS]
    if _flag(config, "mlp_bias"):
        tensors += MLP_BIAS
    return tuple(tensors)


def _experts(config: Mapping[str, object], family: Family, layers: int) -> Experts:
    """Return the mixture of experts.

    Settings for which a family has no key are the same in all its models.
    """
    count, keys = _count_of_experts(config, family), family.keys
    step = size(config, "decoder_sparse_step", 1)
    dense = _layers_named(config, "mlp_only_layers", layers)
    has_sizes = "moe_intermediate_size" in keys
    return Experts(
        count,
        size(config, "num_experts_per_tok", most=count),
        _flag(config, "norm_topk_prob", default="norm_topk_prob" not in keys),
        size(config, "moe_intermediate_size" if has_sizes else "intermediate_size"),
        size(config, "shared_expert_intermediate_size")
        if "shared_expert_intermediate_size" in keys
        else 0,
        tuple((layer + 1) % step == 0 and layer not in dense for layer in range(layers)),
    )


def _count_of_experts(config: Mapping[str, object], family: Family) -> int:
    given = [name for name in family.experts if config.get(name) is not None]
    counts = {size(config, name, most=_MAX_EXPERTS) for name in given or family.experts[:1]}
    if len(counts) > 1:
        raise refused(given[1], f"{config[given[0]]} as in {given[0]}", config[given[1]])
    return counts.pop()


def _layers_named(config: Mapping[str, object], name: str, layers: int) -> frozenset[int]:
    found = config.get(name)
    try:
        named = frozenset(msgspec.convert([] if found is None else found, list[int]))
    except msgspec.ValidationError:
        named = frozenset({-1})
    if not named <= set(range(layers)):
        raise refused(name, f"numbers of layers from 0 to {layers - 1}", found)
    return named


def _kinds(config: Mapping[str, object], family: Family, layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it has a sliding window."""
    # With local_rope, layers with and without a window have different frequencies, so the kinds of
    # layers matter even if the window is missing.
    is_off = config.get("sliding_window") is None and not family.local_rope
    if is_off or not _flag(config, "use_sliding_window", default=not _switched(family)):
        return (False,) * layers
    kinds = config.get("layer_types")
    if kinds is None and not family.named_windows:
        return tuple(_slides(config, family, layer) for layer in range(layers))
    known = {"sliding_attention": True, "full_attention": False}
    if (
        not isinstance(kinds, list)
        or len(kinds) != layers
        or not known.keys() >= set(map(str, kinds))
    ):
        raise refused("layer_types", f"{layers} times one of {', '.join(known)}", kinds)
    return tuple(known[str(kind)] for kind in kinds)


def _ropes(
    config: Mapping[str, object], family: Family, head_dim: int, kinds: tuple[bool, ...]
) -> tuple[Rope, ...]:
    if not family.rotary:
        return (Rope(),) * len(kinds)
    if not family.local_rope:
        one = rope.read(config, head_dim)
        rotated = _rotated(config, family, len(kinds))
        return tuple(one if turns else Rope() for turns in rotated)
    local, full = rope.read_both(config, head_dim)
    return tuple(local if slides else full for slides in kinds)


def _rotated(config: Mapping[str, object], family: Family, layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it rotates queries and keys."""
    if family.unrotated_every is None:
        return (True,) * layers
    found = config.get("no_rope_layers")
    if found is None:
        every = size(config, "no_rope_layer_interval", family.unrotated_every)
        return tuple((layer + 1) % every != 0 for layer in range(layers))
    # transformers accepts a list that is longer than the number of layers.
    if (
        not isinstance(found, list)
        or len(found) < layers
        or not set(map(repr, found)) <= {"0", "1"}
    ):
        raise refused("no_rope_layers", f"{layers} times 1 (rotated) or 0", found)
    return tuple(map(bool, found[:layers]))


def _switched(family: Family) -> bool:
    return "use_sliding_window" in family.keys


def _slides(config: Mapping[str, object], family: Family, layer: int) -> bool:
    """Tell whether a layer has a sliding window, where config.json has no layer types."""
    if family.window_everywhere:
        first = config.get("max_window_layers")
        if first:
            raise refused("max_window_layers", "0 or none with a sliding window", first)
        return True
    if family.full_every > 1:
        # transformers 5 writes the key with a leading underscore.
        key = "_" * ("sliding_window_pattern" not in config) + "sliding_window_pattern"
        return (layer + 1) % size(config, key, family.full_every) != 0
    if family.unrotated_every is not None:
        return not _rotated(config, family, layer + 1)[layer]
    return not _switched(family) or layer >= size(config, "max_window_layers", least=0)


def _stop_tokens(config: Mapping[str, object]) -> tuple[int, ...]:
    found = config.get("eos_token_id")
    if found is None:
        return ()
    try:
        return tuple(msgspec.convert(found if isinstance(found, list) else [found], list[int]))
    except msgspec.ValidationError:
        raise refused("eos_token_id", "token numbers", found) from None


def _factor(config: Mapping[str, object], name: str) -> float:
    return 1.0 if config.get(name) is None else positive(config, name)


def _cap(config: Mapping[str, object], name: str) -> float | None:
    return None if config.get(name) is None else positive(config, name)


def _flag(config: Mapping[str, object], name: str, *, default: bool = False) -> bool:
    value = config.get(name, default)
    if not isinstance(value, bool):
        raise refused(name, "true or false", value)
    return value
