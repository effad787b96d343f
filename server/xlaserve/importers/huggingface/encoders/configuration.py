"""Reads an encoder's form from config.json; unsupported keys and values are errors."""

from collections.abc import Mapping
from pathlib import Path

from xlaserve.errors import InvalidModel
from xlaserve.importers.huggingface import config_json
from xlaserve.importers.huggingface.config_json import (
    CONFIG,
    check_keys,
    one_of,
    positive,
    refused,
    size,
)
from xlaserve.importers.huggingface.encoders import sentences
from xlaserve.importers.huggingface.encoders.families import ENCODERS, EncoderFamily
from xlaserve.importers.huggingface.encoders.form import EncoderForm
from xlaserve.importers.huggingface.families import keys_of

_MOST_LAYERS = 1024

_OBEYED = (
    "architectures",
    *("vocab_size", "hidden_size", "num_attention_heads", "num_hidden_layers"),
    *("intermediate_size", "hidden_act", "max_position_embeddings", "pad_token_id"),
)
_WITHOUT_EFFECT = keys_of(
    # Keys without effect: training options, heads that are not imported, and settings that the
    # server replaces.
    "model_type dtype torch_dtype transformers_version use_cache bos_token_id eos_token_id "
    "sep_token_id cls_token_id mask_token_id decoder_start_token_id initializer_range "
    "attention_probs_dropout_prob hidden_dropout_prob classifier_dropout dropout attention_dropout "
    "qa_dropout seq_classif_dropout gradient_checkpointing _name_or_path output_past "
    "output_attentions output_hidden_states return_dict id2label label2id problem_type "
    "tie_word_embeddings tie_weights_ sinusoidal_pos_embds directionality "
    "chunk_size_feed_forward _attn_implementation"
)
_ONLY: Mapping[str, tuple[object, ...]] = {
    "is_encoder_decoder": (False,),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "position_embedding_type": ("absolute",),
    "quantization_config": (None,),
    "embedding_size": (None,),
}
"""Keys that must have one of these values, if present."""
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def is_encoder(directory: Path) -> bool:
    """Tell whether a directory's config.json names an encoder; raises InvalidModel."""
    named = config_json.read(directory).get("architectures")
    return isinstance(named, list) and len(named) == 1 and str(named[0]) in ENCODERS


def read(directory: Path) -> tuple[EncoderForm, EncoderFamily]:
    """Return the form and the family of the encoder in a directory. Raises InvalidModel."""
    config = config_json.read(directory)
    family = ENCODERS[str(config["architectures"][0])]  # type: ignore[index]
    check_keys(config, {*map(family.key, _OBEYED), *family.more, *_WITHOUT_EFFECT}, _ONLY)
    key = family.key
    hidden, heads = size(config, key("hidden_size")), size(config, key("num_attention_heads"))
    if hidden % heads:
        raise refused(key("num_attention_heads"), f"a divisor of {hidden}", heads)
    positions, pad = size(config, "max_position_embeddings"), size(config, "pad_token_id", least=0)
    before = pad if family.padding_position is None else family.padding_position
    first = before + 1 if family.is_offset else 0
    found = sentences.read(directory, hidden)
    most = positions - first
    if most < 1 or (found.max_tokens or 1) > most:
        raise InvalidModel(
            f"max_seq_length of {sentences.TRANSFORMER}, or model_max_length of "
            f"{sentences.TOKENIZER}: expected at most {most}, the positions of {CONFIG}, got"
            f" {found.max_tokens}"
        )
    has_types = "type_vocab_size" in family.more
    has_distances = "relative_attention_num_buckets" in family.more
    return (
        EncoderForm(
            vocab=size(config, "vocab_size"),
            hidden=hidden,
            heads=heads,
            intermediate=size(config, key("intermediate_size")),
            layers=size(config, key("num_hidden_layers"), most=_MOST_LAYERS),
            positions=positions,
            first_position=first,
            types=size(config, "type_vocab_size") if has_types else 0,
            relative=_buckets(config) if has_distances else 0,
            norm_epsilon=family.epsilon or positive(config, "layer_norm_eps"),
            activation=one_of(config, key("hidden_act"), _ACTIVATIONS),
            poolings=found.poolings,
            is_normalised=found.is_normalised,
            max_tokens=found.max_tokens or most,
            pad=pad,
            prompt=found.prompt,
            ends=family.ends,
            layer=family.layer,
            layer_name=family.layer_name,
        ),
        family,
    )


def _buckets(config: Mapping[str, object]) -> int:
    name = "relative_attention_num_buckets"
    found = size(config, name, least=4)
    if found % 4:
        raise refused(name, "a multiple of 4", found)
    return found
