"""Decides whether requests to a model may share a batch.

Rows of different clients share an execution only if a proof shows that this changes no answer, or
if the author declares it and a trial finds no contradiction.

A proof recorded in a manifest is ignored: clients may upload manifests, and could forge a hash,
too. A proof takes milliseconds, much less than a compilation, so every load makes its own.
"""

from collections.abc import Callable
from dataclasses import dataclass

import betterproto

from xlaserve.artifact.signature import Signature
from xlaserve.errors import InvalidModel
from xlaserve.model_config.buckets import BATCH_INDEPENDENT, DEFAULT_MAX_BATCH_SIZE, declared
from xlaserve.model_config.config import ModelConfig
from xlaserve.row_proofs.neighbours import Difference
from xlaserve.row_proofs.verdict import Independence, Verdict

BATCH_ROWS = "batch_rows"
"""Parameter in the served configuration that reports the proof's verdict; ignored in configurations
that clients send.
"""


@dataclass(frozen=True, slots=True)
class ServedRows:
    """How the server batches the rows of a model."""

    max_batch_size: int = 0
    """Maximum number of rows per request; 0 for any number, or if the first dimension is fixed."""
    is_exact: bool = False
    """Whether every number of rows has its own program, mostly compiled on demand, so that requests
    are never padded.
    """
    notice: str = ""
    """Why requests are not batched, for the log; or an empty string."""


def served_rows(
    signature: Signature,
    config: ModelConfig,
    verdict: Verdict,
    find_difference: Callable[[], Difference | None],
) -> ServedRows:
    """Decide how to batch a model with a dynamic first dimension; raises InvalidModel.

    `signature` is the signature as configured; `find_difference` runs the trial.
    """
    says = declared(config)
    refuse_declared(f"parameter '{BATCH_INDEPENDENT}'", verdict, find_difference, says=says)
    if config.is_unbatched:
        return ServedRows(is_exact=True)
    if says is False:
        # With a maximum batch size, all sizes in a list are compiled at load.
        return ServedRows(signature.max_batch_size, is_exact=not signature.max_batch_size)
    if says:
        return ServedRows(signature.max_batch_size or DEFAULT_MAX_BATCH_SIZE)
    if verdict.independence is Independence.PROVED:
        notice = "" if signature.max_batch_size else _COULD_BE
        return ServedRows(
            signature.max_batch_size, is_exact=not signature.max_batch_size, notice=notice
        )
    return ServedRows(config.max_batch_size, is_exact=True, notice=_notice(verdict, config))


def refused_rows(config: ModelConfig, verdict: Verdict) -> ServedRows:
    """Decide for a model whose proof a trial has contradicted; ignores the author's declaration."""
    return ServedRows(config.max_batch_size, is_exact=True, notice=_notice(verdict, config))


def refuse_declared(
    place: str,
    verdict: Verdict,
    find_difference: Callable[[], Difference | None],
    *,
    says: bool | None,
) -> None:
    """Raise InvalidModel if rows are declared independent but are not.

    A proof or a trial takes precedence over the author's declaration.
    """
    if not says or verdict.independence is Independence.PROVED:
        return
    because: object = verdict
    if verdict.independence is Independence.UNKNOWN:
        because = find_difference()
    if because is not None:
        raise InvalidModel(f"{place}: rows are declared independent, but they are not: {because}")


_COULD_BE = (
    "rows are proved independent, but max_batch_size is 0: set it in the configuration to batch"
    " requests"
)


def _notice(verdict: Verdict, config: ModelConfig) -> str:
    text = f"rows are {verdict}"
    if not verdict.is_contradicted:
        text += f"; {verdict.advice}"
    if verdict.independence is Independence.UNKNOWN and not verdict.is_contradicted:
        text += f"; parameter '{BATCH_INDEPENDENT}' \"true\" declares them independent"
    if config.message is not None:
        scheduling, _ = betterproto.which_one_of(config.message, "scheduling_choice")
        if scheduling == "dynamic_batching":
            text += "; dynamic_batching has no effect"
    return text
