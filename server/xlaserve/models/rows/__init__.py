"""Proves that the rows of a batch do not see one another, from the computation that is served."""

from collections.abc import Mapping, Sequence

from jax.export import Exported

from xlaserve.models.rows.verdict import Independence, Verdict

__all__ = ["Independence", "Verdict", "loops_follow_inputs", "prove"]


def prove(
    exported: Exported,
    parameters: int,
    outputs: Sequence[str],
    sizes: Mapping[str, int] | None = None,
) -> Verdict:
    """Tell whether the rows of the outputs depend on the same row of the inputs alone.

    The first `parameters` arguments are no inputs. `sizes` has those of the open dimensions other
    than the batch. Whatever the artifact is, nothing is raised: what cannot be told is unknown.
    """
    del exported, parameters, sizes
    return Verdict(
        Independence.UNKNOWN,
        output=next(iter(outputs), ""),
        reason="no analysis was made",
        loops_follow_rows=True,
        loops_follow_inputs=True,
    )


def loops_follow_inputs(exported: Exported, sizes: Mapping[str, int] | None = None) -> bool:
    """Tell whether some loop of a computation has a trip count that is not a constant."""
    del exported, sizes
    return True
