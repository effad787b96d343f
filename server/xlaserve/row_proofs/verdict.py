"""The verdict on whether the rows of a batch affect one another."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType


class Independence(StrEnum):
    """Whether each row of every output depends only on the same row of the inputs."""

    PROVED = "proved"
    """Proved, for every batch size and every position in a batch."""
    MIXED = "mixed"
    """Refuted: a trial found a row whose answer changes with the other rows. The analysis itself
    never returns this, since operations that it cannot follow may be harmless."""
    UNKNOWN = "unknown"
    """Not proved: an operation has no rule, or seems to combine rows."""


CONTRADICTED = "a trial contradicts the proof, please report this: "
"""Prefix of the reason if a trial contradicts the proof."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of the analysis of one computation."""

    independence: Independence
    output: str = ""
    """Name of the first output that is not proved."""
    operation: str = ""
    """The StableHLO operation that prevents the proof, such as `stablehlo.reduce`."""
    reason: str = ""
    """A clause such as `reduces over the rows`."""
    location: str = ""
    """The author's source line, such as `model.py:12`; empty if it is unknown."""
    loops_follow_rows: bool = False
    """Whether the trip count of a loop depends on rows. Padding must then repeat a real row, since
    a row of zeros may never terminate."""
    loops_follow_inputs: bool = False
    """Whether the trip count of some loop is not known to be a constant."""

    @property
    def is_contradicted(self) -> bool:
        """Tell whether a trial contradicted the proof."""
        return self.reason.startswith(CONTRADICTED)

    @property
    def advice(self) -> str:
        """Return how to change the model, in a clause; empty if everything is proved."""
        if self.independence is Independence.PROVED:
            return ""
        return _ADVICE.get(self.operation, _FOR_EACH)

    def __str__(self) -> str:
        """Return the verdict in one line, for a log or a terminal."""
        place = f" ({self.location})" if self.location else ""
        operation = f": {self.operation} {self.reason}{place}" if self.operation else ""
        reason = f": {self.reason}" if self.reason and not self.operation else ""
        output = f", in output '{self.output}'" if self.output else ""
        return f"{self.independence}{operation}{reason}{output}"


_FOR_EACH = "write the function for one row and apply jax.vmap"
_AXIS = "reduce over another axis than the first: x.max(axis=-1) instead of x.max()"
_LOOP = "apply jax.vmap to a loop over one row, instead of one loop for all rows"
_PLACES = "index only other axes than the first, or apply jax.vmap to the function for one row"
_NOISE = "take one seed per row as an input, and apply jax.vmap over it"
_NUMBER = "use a constant or another dimension's size instead of the batch size"

_ADVICE: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            ("stablehlo.reduce", "stablehlo.reduce_window", "stablehlo.sort", "chlo.top_k"), _AXIS
        ),
        **dict.fromkeys(
            (
                "stablehlo.gather",
                "stablehlo.scatter",
                "stablehlo.dynamic_slice",
                "stablehlo.dynamic_update_slice",
                "stablehlo.slice",
                "stablehlo.concatenate",
                "stablehlo.pad",
                "stablehlo.reverse",
                "stablehlo.reshape",
                "stablehlo.transpose",
            ),
            _PLACES,
        ),
        "stablehlo.while": _LOOP,
        "stablehlo.case": "use jnp.where, or jax.vmap over lax.cond",
        "stablehlo.if": "use jnp.where, or jax.vmap over lax.cond",
        "stablehlo.rng_bit_generator": _NOISE,
        "stablehlo.constant": _NUMBER,
        "stablehlo.batch_norm_training": "normalize by learned statistics",
    }
)
"""How to change the model, by the operation that prevents the proof."""


_WORST_FIRST = (Independence.MIXED, Independence.UNKNOWN, Independence.PROVED)


def worst(by_platform: Mapping[str, Verdict]) -> Verdict:
    """Return the verdict that holds on all platforms; names a platform if they differ."""
    verdicts = list(by_platform.values())
    name, found = min(
        by_platform.items(), key=lambda item: _WORST_FIRST.index(item[1].independence)
    )
    differ = any(one.independence is not found.independence for one in verdicts)
    return replace(
        found,
        reason=f"{found.reason}, on {name}" if differ else found.reason,
        loops_follow_rows=any(one.loops_follow_rows for one in verdicts),
        loops_follow_inputs=any(one.loops_follow_inputs for one in verdicts),
    )
