"""Asks for the proof of one artifact: whatever it is, there is an answer."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from jax.export import Exported

from xlaserve.row_proofs import proof
from xlaserve.row_proofs.findings import Unfollowed
from xlaserve.row_proofs.proof import Asked
from xlaserve.row_proofs.verdict import Independence, Verdict, worst

__all__ = ["Independence", "Verdict", "loops_follow_inputs", "prove", "prove_each"]


def prove(
    exported: Exported,
    parameters: int,
    outputs: Sequence[str],
    sizes: Mapping[str, int] | None = None,
    *,
    platforms: Sequence[str] = (),
) -> Verdict:
    """Tell whether the rows of the outputs depend on the same row of the inputs alone.

    The first `parameters` arguments are no inputs. `sizes` has those of the open dimensions other
    than the batch, for which alone the verdict is. `platforms` are those of the artifact that
    count; all of them where none is given. Whatever the artifact is, nothing is raised: what cannot
    be told is unknown.
    """
    return worst(prove_each(exported, parameters, outputs, sizes, platforms=platforms))


def prove_each(
    exported: Exported,
    parameters: int,
    outputs: Sequence[str],
    sizes: Mapping[str, int] | None = None,
    *,
    platforms: Sequence[str] = (),
) -> Mapping[str, Verdict]:
    """Tell it of each platform, whose kernels differ; what is asked is as for `prove`."""
    wanted = tuple(platforms) or tuple(exported.platforms)
    asked = Asked(exported, parameters, tuple(outputs), sizes or {}, wanted)
    if not asked.batch:
        return dict.fromkeys(wanted, _unknown("its inputs do not share a batch dimension"))
    if len(wanted) > 1:
        with suppress(Exception):
            return proof.verdicts(asked)
    # Where one of them cannot be analysed, the others may be.
    return {name: _on(replace(asked, platforms=(name,))) for name in wanted}


def _on(asked: Asked) -> Verdict:
    try:
        (found,) = proof.verdicts(asked).values()
    except Unfollowed as reason:
        return _unknown(f"the computation {reason}")
    # What a hostile artifact meets on its way through JAX and MLIR has no class of its own.
    except Exception as error:
        return _unknown(f"the computation cannot be analysed ({type(error).__name__})")
    return found


def loops_follow_inputs(
    exported: Exported,
    sizes: Mapping[str, int] | None = None,
    *,
    platforms: Sequence[str] = (),
) -> bool:
    """Tell whether some loop of a computation is not known to have a constant trip count."""
    asked = Asked(exported, 0, (), sizes or {}, tuple(platforms))
    try:
        return proof.has_open_loops(asked)
    # As above.
    except Exception:
        return True


def _unknown(reason: str) -> Verdict:
    return Verdict(
        Independence.UNKNOWN, reason=reason, loops_follow_rows=True, loops_follow_inputs=True
    )
