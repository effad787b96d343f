"""The form of a decoder: the sizes and switches that its arithmetic needs."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor as checkpoints store it."""

    role: str
    """The key of its array among the parameters."""
    name: str
    """Its name in a checkpoint, relative to its layer if it has one."""
    shape: tuple[str, ...]
    """The names of its sizes, see `Form.sizes`."""
    parts: tuple[tuple[str, str], ...] = ()
    """Role and size of each of the parts that are fused along one dimension, in order."""
    transposed: bool = False
    """Whether it is stored with its two dimensions the other way round than `shape` says."""
    fused_at: int = 0
    """The dimension along which `parts` are fused."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The names that a family of checkpoints has for its tensors."""

    layer: tuple[Stored, ...]
    """The tensors of every layer."""
    ends: tuple[Stored, ...]
    """Tensors outside of layers, the embedding first, without the head."""
    layers: str
    """The name of a layer, before its number."""
    derived: tuple[str, ...]
    """Ends of names of what config.json says already: older checkpoints store it too."""
    optional_prefix: str = ""
    """The beginning of all names but the head's, which older checkpoints leave out."""
    feed_forward: tuple[Stored, ...] = ()
    """More tensors of a layer without experts."""
    experts: tuple[tuple[Stored, ...], ...] = ()
    """The ways in which checkpoints store the feed-forward of a layer with experts. One whose name
    has a * is stored once for each expert, by its number, without the first dimension."""


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotary positions of a layer."""

    frequencies: tuple[float, ...] = ()
    """Radians per position of each rotated pair; the others are unchanged."""
    scale: float = 1.0
    """The factor of what is rotated."""
    original: int = 0
    """With `long_frequencies`: the longest cache with `frequencies`."""
    long_frequencies: tuple[float, ...] = ()
    """Frequencies of a cache with more positions; empty where all caches have the same."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture of experts of some layers."""

    count: int
    chosen: int
    """The experts that each token is given to."""
    normalised: bool
    """Whether the shares of those experts are made to sum to 1."""
    intermediate: int
    """The intermediate size of one expert."""
    shared: int
    """Size of the shared expert; 0 for none."""
    layers: tuple[bool, ...]
    """For each layer: whether it has experts."""


@dataclass(frozen=True, slots=True)
class Form:
    """The computation of `forward`, without its numbers."""

    vocab: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    max_length: int
    """The most positions that the model was made for."""
    windows: tuple[int | None, ...]
    """For each layer: its attention window, the token itself included; None is all."""
    ropes: tuple[Rope, ...]
    """For each layer; one without frequencies does not rotate."""
    norm_epsilon: float
    centred: bool
    """True where norms subtract the mean (LayerNorm), False where they do not (RMSNorm)."""
    norm_offset: float
    """Added to the weights of norms: Gemma stores them around 0."""
    attention_scale: float
    attention_cap: float | None
    logit_cap: float | None
    embedding_scale: float
    activation: str
    post_norms: bool
    """True where what attention and the feed-forward return is normalised before it is added."""
    tied: bool
    """True where the embedding is the matrix of the logits too."""
    stop_tokens: tuple[int, ...]
    layout: Layout
    experts: Experts | None = None
    residual_scale: float = 1.0
    """The factor of what attention and the feed-forward return, before it is added."""
    logit_divisor: float = 1.0

    @property
    def sizes(self) -> dict[str, int]:
        """Return the sizes that shapes of tensors are made of, by name."""
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
