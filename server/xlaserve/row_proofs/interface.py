"""Runs the proof for an artifact, and returns a verdict even if the analysis fails."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from jax.export import Exported

from xlaserve.row_proofs import proof
from xlaserve.row_proofs.findings import Unfollowed
from xlaserve.row_proofs.proof import ProofTask
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
    """Tell whether each output row depends only on the same row of the inputs.

    The first `parameters` arguments are not inputs. `sizes` gives the sizes of the symbolic
    dimensions other than the batch; the verdict holds only for these. `platforms` selects platforms
    of the artifact; by default all of them count. Never raises: if the analysis fails, the verdict
    is `unknown`.
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
    """Return the verdict for each platform, since kernels differ; arguments as for `prove`."""
    wanted = tuple(platforms) or tuple(exported.platforms)
    task = ProofTask(exported, parameters, tuple(outputs), sizes or {}, wanted)
    if not task.batch:
        return dict.fromkeys(wanted, _unknown("its inputs do not share a batch dimension"))
    if len(wanted) > 1:
        with suppress(Exception):
            return proof.verdicts(task)
    # If one platform cannot be analysed, the others may still be.
    return {name: _on(replace(task, platforms=(name,))) for name in wanted}


def _on(task: ProofTask) -> Verdict:
    try:
        (found,) = proof.verdicts(task).values()
    except Unfollowed as reason:
        return _unknown(f"the computation {reason}")
    # A hostile artifact may raise any exception inside JAX or MLIR.
    except Exception as error:
        return _unknown(f"the computation cannot be analysed ({type(error).__name__})")
    return found


def loops_follow_inputs(
    exported: Exported,
    sizes: Mapping[str, int] | None = None,
    *,
    platforms: Sequence[str] = (),
) -> bool:
    """Tell whether the trip count of some loop is not known to be constant; True if unsure."""
    task = ProofTask(exported, 0, (), sizes or {}, tuple(platforms))
    try:
        return proof.has_open_loops(task)
    # Any exception, for the same reason as above.
    except Exception:
        return True


def _unknown(reason: str) -> Verdict:
    return Verdict(
        Independence.UNKNOWN, reason=reason, loops_follow_rows=True, loops_follow_inputs=True
    )
