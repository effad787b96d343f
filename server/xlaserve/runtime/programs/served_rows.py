"""Decides how a model's rows are served: batched with other requests, or alone.

Rows of different clients share a computation only where that is proved to change no answer, or
where somebody declared so and a trial found nothing against it.

What a manifest says was proved is not believed: clients may send manifests, and a hash in one would
be theirs as well. The proof costs milliseconds beside a compilation, so every load makes its own.
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
"""Parameter of a served configuration that reports the proof's verdict; ignored when a client sends
it back.
"""


@dataclass(frozen=True, slots=True)
class ServedRows:
    """A server's decision about the rows of a model."""

    max_batch_size: int = 0
    """The most rows of one request; 0 for any number, and where the first dimension is fixed."""
    is_exact: bool = False
    """Whether each number of rows has a program of its own, most of them compiled on demand: no row
    is added to a request."""
    notice: str = ""
    """Why requests are not batched, if the log should say; else empty."""


def served_rows(
    signature: Signature,
    config: ModelConfig,
    verdict: Verdict,
    find_difference: Callable[[], Difference | None],
) -> ServedRows:
    """Decide it for a model whose first dimension is open; raises InvalidModel.

    `signature` is the one that the configuration agreed to, `find_difference` makes the trial.
    """
    says = declared(config)
    refuse_declared(f"parameter '{BATCH_INDEPENDENT}'", verdict, find_difference, says=says)
    if config.is_unbatched:
        return ServedRows(is_exact=True)
    if says is False:
        # A list of sizes that are all compiled with the load, where there is a largest one.
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
    """Decide it for a model whose proof a trial contradicts, whatever is declared of it."""
    return ServedRows(config.max_batch_size, is_exact=True, notice=_notice(verdict, config))


def refuse_declared(
    place: str,
    verdict: Verdict,
    find_difference: Callable[[], Difference | None],
    *,
    says: bool | None,
) -> None:
    """Raise InvalidModel where rows are declared independent, and are not.

    Nobody's word counts against a proof, nor against a trial that saw the contrary.
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
    said = f"rows are {verdict}"
    if not verdict.is_contradicted:
        said += f"; {verdict.advice}"
    if verdict.independence is Independence.UNKNOWN and not verdict.is_contradicted:
        said += f"; parameter '{BATCH_INDEPENDENT}' \"true\" declares them independent"
    if config.message is not None:
        scheduling, _ = betterproto.which_one_of(config.message, "scheduling_choice")
        if scheduling == "dynamic_batching":
            said += "; dynamic_batching has no effect"
    return said
