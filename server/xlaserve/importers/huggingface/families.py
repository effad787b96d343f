"""Differences between decoder families, keyed by the name in `architectures`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from xlaserve.importers.huggingface.form import Layout, Stored

_NORMS = (
    Stored("input_norm", "input_layernorm.weight", ("hidden",)),
    Stored("feed_forward_norm", "post_attention_layernorm.weight", ("hidden",)),
)
_GEMMA_NORMS = (
    Stored("input_norm", "input_layernorm.weight", ("hidden",)),
    Stored("attention_post_norm", "post_attention_layernorm.weight", ("hidden",)),
    Stored("feed_forward_norm", "pre_feedforward_layernorm.weight", ("hidden",)),
    Stored("feed_forward_post_norm", "post_feedforward_layernorm.weight", ("hidden",)),
)
_NORMS_BEHIND = (
    Stored("attention_post_norm", "post_attention_layernorm.weight", ("hidden",)),
    Stored("feed_forward_post_norm", "post_feedforward_layernorm.weight", ("hidden",)),
)
_OUTPUTS = (
    Stored("o", "self_attn.o_proj.weight", ("hidden", "queries")),
    Stored("down", "mlp.down_proj.weight", ("hidden", "intermediate")),
)
_ATTENTION = (
    Stored("q", "self_attn.q_proj.weight", ("queries", "hidden")),
    Stored("k", "self_attn.k_proj.weight", ("keys", "hidden")),
    Stored("v", "self_attn.v_proj.weight", ("keys", "hidden")),
    _OUTPUTS[0],
)
_FEED_FORWARD = (
    Stored("gate", "mlp.gate_proj.weight", ("intermediate", "hidden")),
    Stored("up", "mlp.up_proj.weight", ("intermediate", "hidden")),
    _OUTPUTS[1],
)
_PROJECTIONS = (*_ATTENTION, *_FEED_FORWARD)
_FUSED = (
    Stored(
        "qkv",
        "self_attn.qkv_proj.weight",
        ("queries+keys+values", "hidden"),
        (("q", "queries"), ("k", "keys"), ("v", "keys")),
    ),
    Stored(
        "gate_up",
        "mlp.gate_up_proj.weight",
        ("gate+up", "hidden"),
        (("gate", "intermediate"), ("up", "intermediate")),
    ),
    *_OUTPUTS,
)
_HEAD_NORMS = (
    Stored("q_norm", "self_attn.q_norm.weight", ("head_dim",)),
    Stored("k_norm", "self_attn.k_norm.weight", ("head_dim",)),
)
_PROJECTION_NORMS = (
    Stored("q_norm", "self_attn.q_norm.weight", ("queries",)),
    Stored("k_norm", "self_attn.k_norm.weight", ("keys",)),
)
"""Norms over all heads together (OLMo 2)."""
QKV_BIAS = (
    Stored("q_bias", "self_attn.q_proj.bias", ("queries",)),
    Stored("k_bias", "self_attn.k_proj.bias", ("keys",)),
    Stored("v_bias", "self_attn.v_proj.bias", ("keys",)),
)
OUTPUT_BIAS = (Stored("o_bias", "self_attn.o_proj.bias", ("hidden",)),)
MLP_BIAS = (
    Stored("gate_bias", "mlp.gate_proj.bias", ("intermediate",)),
    Stored("up_bias", "mlp.up_proj.bias", ("intermediate",)),
    Stored("down_bias", "mlp.down_proj.bias", ("hidden",)),
)


def _experts(place: str, *names: str) -> tuple[Stored, ...]:
    """Return the tensors of a layer with one gate, up and down matrix per expert."""
    gate, up, down = (f"{place}.experts.*.{name}.weight" for name in names)
    return (
        Stored("router", f"{place}.gate.weight", ("experts", "hidden")),
        Stored("expert_gate", gate, ("experts", "of_expert", "hidden")),
        Stored("expert_up", up, ("experts", "of_expert", "hidden")),
        Stored("expert_down", down, ("experts", "hidden", "of_expert")),
    )


_STACKED_EXPERTS = (
    Stored("router", "mlp.gate.weight", ("experts", "hidden")),
    Stored(
        "expert_gate_up",
        "mlp.experts.gate_up_proj",
        ("experts", "gates+ups", "hidden"),
        (("expert_gate", "of_expert"), ("expert_up", "of_expert")),
        fused_at=1,
    ),
    Stored("expert_down", "mlp.experts.down_proj", ("experts", "hidden", "of_expert")),
)
"""Experts stacked into one tensor, the form that transformers 5 may save."""
_QWEN_EXPERTS = _experts("mlp", "gate_proj", "up_proj", "down_proj")
_SHARED_EXPERT = (
    Stored("shared_router", "mlp.shared_expert_gate.weight", ("one", "hidden")),
    Stored("shared_gate", "mlp.shared_expert.gate_proj.weight", ("of_shared", "hidden")),
    Stored("shared_up", "mlp.shared_expert.up_proj.weight", ("of_shared", "hidden")),
    Stored("shared_down", "mlp.shared_expert.down_proj.weight", ("hidden", "of_shared")),
)

_ENDS = (
    Stored("embedding", "model.embed_tokens.weight", ("vocab", "hidden")),
    Stored("norm", "model.norm.weight", ("hidden",)),
)


def _decoder(*layer: Stored) -> Layout:
    return Layout(layer, _ENDS, "model.layers", (".rotary_emb.inv_freq",))


def _mixture(layer: tuple[Stored, ...], *experts: tuple[Stored, ...]) -> Layout:
    return replace(_decoder(*_NORMS, *layer), feed_forward=_FEED_FORWARD, experts=experts)


_GPT2 = Layout(
    (
        Stored("input_norm", "ln_1.weight", ("hidden",)),
        Stored("input_norm_bias", "ln_1.bias", ("hidden",)),
        Stored(
            "qkv",
            "attn.c_attn.weight",
            ("queries+keys+values", "hidden"),
            (("q", "queries"), ("k", "keys"), ("v", "keys")),
            transposed=True,
        ),
        Stored(
            "qkv_bias",
            "attn.c_attn.bias",
            ("queries+keys+values",),
            (("q_bias", "queries"), ("k_bias", "keys"), ("v_bias", "keys")),
        ),
        Stored("o", "attn.c_proj.weight", ("hidden", "queries"), transposed=True),
        Stored("o_bias", "attn.c_proj.bias", ("hidden",)),
        Stored("feed_forward_norm", "ln_2.weight", ("hidden",)),
        Stored("feed_forward_norm_bias", "ln_2.bias", ("hidden",)),
        Stored("up", "mlp.c_fc.weight", ("intermediate", "hidden"), transposed=True),
        Stored("up_bias", "mlp.c_fc.bias", ("intermediate",)),
        Stored("down", "mlp.c_proj.weight", ("hidden", "intermediate"), transposed=True),
        Stored("down_bias", "mlp.c_proj.bias", ("hidden",)),
    ),
    (
        Stored("embedding", "transformer.wte.weight", ("vocab", "hidden")),
        Stored("positions", "transformer.wpe.weight", ("length", "hidden")),
        Stored("norm", "transformer.ln_f.weight", ("hidden",)),
        Stored("norm_bias", "transformer.ln_f.bias", ("hidden",)),
    ),
    "transformer.h",
    (".attn.bias", ".attn.masked_bias"),
    "transformer.",
)


def keys_of(text: str) -> frozenset[str]:
    """Split a text of keys at its spaces."""
    return frozenset(text.split())


_ROTARY = keys_of("num_key_value_heads head_dim rope_theta rope_scaling rope_parameters")


@dataclass(frozen=True, slots=True)
class Family:
    """The switches and tensor layout of one architecture."""

    layout: Layout
    keys: frozenset[str]
    """Keys of config.json that this family supports in addition to the common ones."""
    renamed: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """The family's names for common keys of config.json."""
    tied: bool = False
    """Default of `tie_word_embeddings`."""
    optional_kv_heads: bool = False
    """Whether `num_key_value_heads` defaults to the number of heads."""
    optional_head_dim: bool = True
    """Whether `head_dim` defaults to the hidden size divided by the number of heads."""
    default_widening: int | None = None
    """Default intermediate size as a multiple of the hidden size; None if config.json must have it.
    """
    gemma: bool = False
    """Whether norm weights are stored minus 1 and embeddings are scaled, as in Gemma."""
    centred: bool = False
    """Whether norms subtract the mean (LayerNorm)."""
    rotary: bool = True
    """True for rotary positions, False for learned position embeddings."""
    full_every: int = 1
    """Every n-th layer has full attention, if config.json has a window but no layer types."""
    unrotated_every: int | None = None
    """Every n-th layer has no rotary positions, unless config.json lists them; None if all have."""
    local_rope: bool = False
    """Whether layers with a window have rotary parameters of their own."""
    window_everywhere: bool = False
    """Whether all layers have the window of config.json."""
    named_windows: bool = False
    """Whether `layer_types` is required for a window, because releases of transformers differ in
    their default."""
    experts: tuple[str, ...] = ()
    """Alternative keys for the number of experts; empty for families without experts."""
    unused: frozenset[str] = frozenset()
    """Keys that occur in checkpoints of this family but have no effect."""

    def key(self, name: str) -> str:
        """Return this family's name for a common key of config.json."""
        return self.renamed.get(name, name)

    def obeyed(self, common: frozenset[str]) -> frozenset[str]:
        """Return all keys of config.json that this family supports."""
        rotary = _ROTARY if self.rotary else frozenset[str]()
        own = {*self.renamed.values(), *rotary, *self.keys, *self.unused}
        return (common - self.renamed.keys()) | own


_GEMMA_KEYS = keys_of(
    "sliding_window layer_types query_pre_attn_scalar attn_logit_softcapping attention_bias "
    "final_logit_softcapping use_bidirectional_attention"
)
_GEMMA = MappingProxyType({"hidden_act": "hidden_activation"})
_QWEN_WINDOW = keys_of("use_sliding_window sliding_window max_window_layers layer_types")
_OF_ROUTER = keys_of("num_experts_per_tok output_router_logits router_aux_loss_coef")
"""Keys of the router. Only `num_experts_per_tok` affects inference."""
_QWEN_ROUTER = keys_of(
    "num_experts num_local_experts moe_intermediate_size norm_topk_prob decoder_sparse_step "
    "mlp_only_layers"
)
_GPT2_NAMES = MappingProxyType(
    {
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "max_position_embeddings": "n_positions",
        "intermediate_size": "n_inner",
        "hidden_act": "activation_function",
        "rms_norm_eps": "layer_norm_epsilon",
    }
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": Family(
            _decoder(*_NORMS, *_PROJECTIONS),
            keys_of("attention_bias mlp_bias pretraining_tp"),
            optional_kv_heads=True,
        ),
        "MistralForCausalLM": Family(
            _decoder(*_NORMS, *_PROJECTIONS), keys_of("sliding_window layer_types")
        ),
        "SmolLM3ForCausalLM": Family(
            _decoder(*_NORMS, *_PROJECTIONS),
            keys_of(
                "no_rope_layers no_rope_layer_interval use_sliding_window sliding_window "
                "layer_types attention_bias mlp_bias"
            ),
            tied=True,
            optional_kv_heads=True,
            unrotated_every=4,
            unused=keys_of("max_window_layers pretraining_tp"),
        ),
        "GraniteForCausalLM": Family(
            _decoder(*_NORMS, *_PROJECTIONS),
            keys_of(
                "embedding_multiplier residual_multiplier attention_multiplier logits_scaling "
                "attention_bias mlp_bias"
            ),
            optional_kv_heads=True,
        ),
        "Olmo2ForCausalLM": Family(
            _decoder(*_NORMS_BEHIND, *_PROJECTIONS, *_PROJECTION_NORMS),
            keys_of("attention_bias"),
            optional_kv_heads=True,
        ),
        "Qwen2ForCausalLM": Family(_decoder(*_NORMS, *_PROJECTIONS, *QKV_BIAS), _QWEN_WINDOW),
        "Qwen3ForCausalLM": Family(
            _decoder(*_NORMS, *_PROJECTIONS, *_HEAD_NORMS),
            _QWEN_WINDOW | {"attention_bias"},
            optional_head_dim=False,
        ),
        "MixtralForCausalLM": Family(
            _mixture(_ATTENTION, _experts("block_sparse_moe", "w1", "w3", "w2"), _STACKED_EXPERTS),
            keys_of("sliding_window num_local_experts router_jitter_noise") | _OF_ROUTER,
            experts=("num_local_experts",),
        ),
        "Qwen2MoeForCausalLM": Family(
            _mixture(
                _ATTENTION,
                (*_QWEN_EXPERTS, *_SHARED_EXPERT),
                (*_STACKED_EXPERTS, *_SHARED_EXPERT),
            ),
            keys_of("qkv_bias shared_expert_intermediate_size")
            | _QWEN_WINDOW
            | _QWEN_ROUTER
            | _OF_ROUTER,
            named_windows=True,
            experts=("num_experts", "num_local_experts"),
        ),
        "Qwen3MoeForCausalLM": Family(
            _mixture((*_ATTENTION, *_HEAD_NORMS), _QWEN_EXPERTS, _STACKED_EXPERTS),
            keys_of("use_sliding_window sliding_window max_window_layers attention_bias")
            | _QWEN_ROUTER
            | _OF_ROUTER,
            window_everywhere=True,
            experts=("num_experts", "num_local_experts"),
        ),
        "Phi3ForCausalLM": Family(
            _decoder(*_NORMS, *_FUSED),
            keys_of(
                "sliding_window layer_types original_max_position_embeddings partial_rotary_factor"
            ),
            optional_kv_heads=True,
        ),
        "Gemma2ForCausalLM": Family(
            _decoder(*_GEMMA_NORMS, *_PROJECTIONS),
            _GEMMA_KEYS,
            _GEMMA,
            tied=True,
            optional_head_dim=False,
            gemma=True,
            full_every=2,
        ),
        "Gemma3ForCausalLM": Family(
            _decoder(*_GEMMA_NORMS, *_PROJECTIONS, *_HEAD_NORMS),
            _GEMMA_KEYS
            | keys_of("rope_local_base_freq sliding_window_pattern _sliding_window_pattern"),
            _GEMMA,
            tied=True,
            optional_head_dim=False,
            gemma=True,
            full_every=6,
            local_rope=True,
        ),
        "GPT2LMHeadModel": Family(
            _GPT2,
            # The keys from attn_pdrop on are for training and classification, or unused (n_ctx).
            keys_of(
                "scale_attn_weights scale_attn_by_inverse_layer_idx reorder_and_upcast_attn "
                "add_cross_attention attn_pdrop n_ctx task_specific_params summary_type "
                "summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout"
            ),
            _GPT2_NAMES,
            tied=True,
            optional_kv_heads=True,
            default_widening=4,
            centred=True,
            rotary=False,
        ),
    }
)
"""Supported decoder families by their name in `architectures`."""
