"""The form of a decoder: its sizes, switches and tensor layout."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stored:
    """Name and shape of a tensor in a checkpoint."""

    role: str
    """Key of the array in the parameters."""
    name: str
    """Name in the checkpoint, without the prefix of the layer."""
    shape: tuple[str, ...]
    """The dimensions, as keys of `Form.sizes`."""
    parts: tuple[tuple[str, str], ...] = ()
    """Roles and sizes of the tensors that are fused into this one, in order."""
    transposed: bool = False
    """Whether the checkpoint stores the transpose of `shape`."""
    fused_at: int = 0
    """The dimension along which `parts` are fused."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The tensor names that a family's checkpoints use."""

    layer: tuple[Stored, ...]
    """The tensors of every layer, without its feed-forward if `experts` is set."""
    ends: tuple[Stored, ...]
    """Tensors outside the layers except the head; the embedding is first."""
    layers: str
    """Prefix of a layer's tensor names, before the layer number."""
    derived: tuple[str, ...]
    """Suffixes of tensors in older checkpoints that can be derived from config.json."""
    optional_prefix: str = ""
    """Prefix of all names except the head's; older checkpoints omit it."""
    feed_forward: tuple[Stored, ...] = ()
    """The feed-forward of layers without experts, if it is not in `layer`."""
    experts: tuple[tuple[Stored, ...], ...] = ()
    """Alternative layouts of a feed-forward with experts. A name with `*` is stored once per
    expert, with the expert's number, and without the first dimension."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position parameters of a layer."""

    frequencies: tuple[float, ...] = ()
    """Radians per position for each rotated pair of elements; further elements are not rotated."""
    scale: float = 1.0
    """Factor for rotated elements."""
    original: int = 0
    """Longest cache that uses `frequencies`, if `long_frequencies` is set."""
    long_frequencies: tuple[float, ...] = ()
    """Frequencies for caches longer than `original`; empty if longer caches use `frequencies`."""


@dataclass(frozen=True, slots=True)
class Experts:
    """Parameters of the mixture of experts."""

    count: int
    chosen: int
    """Experts per token."""
    normalised: bool
    """Whether the weights of a token's experts are normalised to sum to 1."""
    intermediate: int
    """Intermediate size of each expert."""
    shared: int
    """Intermediate size of the shared expert; 0 if there is none."""
    layers: tuple[bool, ...]
    """Whether each layer has experts."""


@dataclass(frozen=True, slots=True)
class Form:
    """The sizes and switches that `forward` needs besides the parameters."""

    vocab: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    max_length: int
    """Context length of the model."""
    windows: tuple[int | None, ...]
    """Attention window of each layer in tokens, including the current one; None for full attention.
    """
    ropes: tuple[Rope, ...]
    """Rotary parameters of each layer; without frequencies it has no rotary positions."""
    norm_epsilon: float
    centred: bool
    """True for LayerNorm, False for RMSNorm."""
    norm_offset: float
    """Added to the weights of norms; 1 for Gemma."""
    attention_scale: float
    attention_cap: float | None
    logit_cap: float | None
    embedding_scale: float
    activation: str
    post_norms: bool
    """Whether the outputs of attention and feed-forward are normalised before they are added."""
    tied: bool
    """Whether the embedding matrix is used for the logits too."""
    stop_tokens: tuple[int, ...]
    layout: Layout
    experts: Experts | None = None
    residual_scale: float = 1.0
    """Factor for the outputs of attention and feed-forward before they are added."""
    logit_divisor: float = 1.0

    @property
    def sizes(self) -> dict[str, int]:
        """Return the sizes that `Stored.shape` refers to, by name."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        experts = self.experts
        of_experts = (
            {}
            if experts is None
            else {
                "experts": experts.count,
                "of_expert": experts.intermediate,
                "gates+ups": 2 * experts.intermediate,
                "of_shared": experts.shared,
                "one": 1,
            }
        )
        return {
            "vocab": self.vocab,
            "length": self.max_length,
            "hidden": self.hidden,
            "queries": queries,
            "keys": keys,
            "queries+keys+values": queries + 2 * keys,
            "head_dim": self.head_dim,
            "intermediate": self.intermediate,
            "gate+up": 2 * self.intermediate,
            **of_experts,
        }
