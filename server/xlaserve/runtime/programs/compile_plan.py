"""Plans the compilations of a load, from the artifact's proof and the configuration."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from xlaserve.artifact import shapes
from xlaserve.artifact.bytecode import names_in
from xlaserve.artifact.shapes import OpenDimensions
from xlaserve.artifact.signature import Signature
from xlaserve.artifact.training_layers import said_of_module
from xlaserve.model_config import buckets
from xlaserve.model_config.buckets import FIXED, BucketPlan
from xlaserve.model_config.config import ModelConfig
from xlaserve.row_proofs.neighbours import Difference
from xlaserve.row_proofs.verdict import Independence, Verdict
from xlaserve.runtime.programs.proving import Prover, digest_of
from xlaserve.runtime.programs.served_rows import ServedRows, refused_rows, served_rows
from xlaserve.runtime.programs.shared_programs import Lease

_LOOP = b"while_v"
"""Name of the loop operation in a serialized module, in any version of the operation."""


@dataclass(frozen=True, slots=True)
class CompilePlan:
    """How the rows of a model are served, and the programs to compile."""

    rows: ServedRows
    verdict: Verdict | None
    """Whether rows are independent; None if the first dimension is fixed."""
    loops_follow_inputs: bool
    """Whether the number of loop iterations depends on inputs. A warm-up with zeros might never
    end, so nothing is executed before the first request.
    """
    buckets: BucketPlan
    dimensions: OpenDimensions
    training: str
    """Why the model seems to be in training mode and how to fix it; or empty."""

    @property
    def is_proved(self) -> bool:
        """Tell whether rows are proved to be independent."""
        return self.verdict is not None and self.verdict.independence is Independence.PROVED

    @staticmethod
    def of(
        lease: Lease,
        signature: Signature,
        config: ModelConfig,
        prover: Prover,
        find_difference: Callable[[OpenDimensions], Difference | None],
        *,
        refuse: Callable[[Verdict], Verdict] | None = None,
    ) -> "CompilePlan":
        """Prove or decide whether rows are independent, and plan the programs; raises InvalidModel.

        A verdict for another model with the same module is reused: the proof depends on the module
        alone, and the memo's key contains its bytes.

        Raises the exceptions of `prover`.

        `find_difference` tries rows that are only declared independent, at the given sizes.
        `refuse` changes the verdict of a proof that a trial has contradicted.
        """
        inputs, exported = signature.inputs, lease.exported
        avals = exported.in_avals[len(exported.in_avals) - len(inputs) :]
        sizes, tried = shapes.tried(config, inputs, avals)
        rows, verdict = ServedRows(signature.max_batch_size), None
        if signature.is_open:
            outputs = [spec.name for spec in signature.outputs]
            count = len(exported.in_avals) - len(inputs)
            platform = prover.site.platform
            key = "rows", digest_of(exported), count, tuple(outputs), _known(sizes), platform
            verdict = lease.fact(
                key, lambda: prover.prove(lease.key, exported, count, outputs, sizes)
            )
            if refuse is not None:
                verdict = refuse(verdict)
                rows = refused_rows(config, verdict)
            else:
                rows = served_rows(signature, config, verdict, lambda: find_difference(tried))
        # Skip the analysis for the majority of models, which have no loop.
        follows = _LOOP in names_in(exported.mlir_module_serialized) and (
            verdict.loops_follow_inputs
            if verdict
            else lease.fact(
                ("loops", digest_of(exported), _known(sizes)),
                lambda: prover.loops_follow_inputs(lease.key, exported, sizes),
            )
        )
        plan, numbers = _buckets(rows, config)
        dimensions = shapes.read(config, inputs, avals, numbers)
        takes_integers = any(spec.datatype.dtype.kind in "iu" for spec in inputs)
        training = lease.fact(
            ("training", digest_of(exported), takes_integers),
            lambda: said_of_module(exported.mlir_module_serialized, takes_integers=takes_integers),
        )
        return CompilePlan(rows, verdict, follows, plan, dimensions, training)


def _known(sizes: Mapping[str, int]) -> Hashable:
    return tuple(sorted(sizes.items()))


def _buckets(rows: ServedRows, config: ModelConfig) -> tuple[BucketPlan, Sequence[int]]:
    """Return the batch sizes to compile, and the row counts that get their own programs."""
    if rows.is_exact:
        return BucketPlan((FIXED,), independent=False), buckets.exact(rows.max_batch_size, config)
    return buckets.plan(rows.max_batch_size, config), ()
