"""Differences between encoder families, keyed by the name in `architectures`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from xlaserve.importers.huggingface.families import keys_of
from xlaserve.importers.huggingface.form import Stored


def _pair(role: str, name: str, out: str, into: str) -> tuple[Stored, ...]:
    return (
        Stored(role, f"{name}.weight", (out, into)),
        Stored(f"{role}_bias", f"{name}.bias", (out,)),
    )


def _norm(role: str, name: str) -> tuple[Stored, ...]:
    return (
        Stored(role, f"{name}.weight", ("hidden",)),
        Stored(f"{role}_bias", f"{name}.bias", ("hidden",)),
    )


def _layer(*names: str) -> tuple[Stored, ...]:
    """Return the tensors of a layer, given the names of q, k, v, o, up, down and both norms."""
    q, k, v, o, up, down, first, second = names
    return (
        *_pair("q", q, "hidden", "hidden"),
        *_pair("k", k, "hidden", "hidden"),
        *_pair("v", v, "hidden", "hidden"),
        *_pair("o", o, "hidden", "hidden"),
        *_norm("attention_norm", first),
        *_pair("up", up, "intermediate", "hidden"),
        *_pair("down", down, "hidden", "intermediate"),
        *_norm("feed_forward_norm", second),
    )


_TABLES = (
    Stored("embedding", "embeddings.word_embeddings.weight", ("vocab", "hidden")),
    Stored("positions", "embeddings.position_embeddings.weight", ("positions", "hidden")),
    *_norm("norm", "embeddings.LayerNorm"),
)
_TYPES = (Stored("types", "embeddings.token_type_embeddings.weight", ("types", "hidden")),)
_DISTANCES = (Stored("distances", "encoder.relative_attention_bias.weight", ("buckets", "heads")),)
_FEED_FORWARD = ("intermediate.dense", "output.dense")
_BERT_LAYER = _layer(
    *(f"attention.self.{name}" for name in ("query", "key", "value")),
    *("attention.output.dense", *_FEED_FORWARD),
    *("attention.output.LayerNorm", "output.LayerNorm"),
)
_MPNET_LAYER = _layer(
    *(f"attention.attn.{name}" for name in ("q", "k", "v", "o")),
    *(*_FEED_FORWARD, "attention.LayerNorm", "output.LayerNorm"),
)
_DISTIL_LAYER = _layer(
    *(f"attention.{name}_lin" for name in ("q", "k", "v", "out")),
    *("ffn.lin1", "ffn.lin2", "sa_layer_norm", "output_layer_norm"),
)
_DISTIL_KEYS = {
    "hidden_size": "dim",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
}


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """The keys and tensor names of one encoder architecture."""

    prefix: str
    """Prefix of the encoder's tensor names in checkpoints that include a head."""
    ends: tuple[Stored, ...]
    layer: tuple[Stored, ...]
    layer_name: str = "encoder.layer"
    heads: tuple[str, ...] = ("pooler.", "cls.", "lm_head.", "vocab_")
    """Name prefixes of heads, which do not contribute to embeddings."""
    keys: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """The family's names for keys of config.json, by the common name."""
    is_offset: bool = False
    """Whether position ids start after the padding position, as in RoBERTa."""
    padding_position: int | None = None
    """The padding position; by default `pad_token_id`."""
    epsilon: float | None = None
    """The epsilon of norms, for families whose config.json has none."""
    more: frozenset[str] = frozenset()
    """Additional keys of config.json that this family supports."""

    def key(self, name: str) -> str:
        """Return this family's name for a key of config.json."""
        return self.keys.get(name, name)


_BERT = EncoderFamily(
    "bert.", (*_TABLES, *_TYPES), _BERT_LAYER, more=keys_of("type_vocab_size layer_norm_eps")
)
_ROBERTA = EncoderFamily(
    "roberta.",
    (*_TABLES, *_TYPES),
    _BERT_LAYER,
    is_offset=True,
    more=keys_of("type_vocab_size layer_norm_eps"),
)
_MPNET = EncoderFamily(
    "mpnet.",
    (*_TABLES, *_DISTANCES),
    _MPNET_LAYER,
    is_offset=True,
    padding_position=1,
    more=keys_of("relative_attention_num_buckets layer_norm_eps"),
)
_DISTIL = EncoderFamily(
    "distilbert.",
    _TABLES,
    _DISTIL_LAYER,
    "transformer.layer",
    keys=MappingProxyType(_DISTIL_KEYS),
    epsilon=1e-12,
)

ENCODERS: Mapping[str, EncoderFamily] = MappingProxyType(
    {
        f"{name}{kind}": family
        for name, family in {
            "Bert": _BERT,
            "Roberta": _ROBERTA,
            "XLMRoberta": _ROBERTA,
            "MPNet": _MPNET,
            "DistilBert": _DISTIL,
        }.items()
        for kind in ("Model", "ForMaskedLM")
    }
)
"""Encoder families by their name in `architectures`."""
