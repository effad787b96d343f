"""Exports batched functions for tests of the row-independence proof."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export
from jax.export import Exported

from xlaserve.row_proofs import Verdict, program, proof, prove, refining, size_arithmetic
from xlaserve.row_proofs.findings import Finding, Unfollowed

Inputs = Sequence[tuple[Sequence[int], str]]
"""Shapes without the batch dimension, and dtypes."""


def exported(
    fn: Callable[..., Any], inputs: Inputs, *, platforms: Sequence[str] = ("cpu",)
) -> Exported:
    """Export a function with a symbolic batch size; its outputs become a list."""
    (batch,) = jax.export.symbolic_shape("b")
    arguments = [jax.ShapeDtypeStruct((batch, *shape), dtype) for shape, dtype in inputs]

    def flat(*arrays: Any) -> list[Any]:
        return jax.tree.leaves(fn(*arrays))

    # Models are plain JAX, without the strict promotion rules of our own tests.
    with (
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        return jax.export.export(jax.jit(flat), platforms=list(platforms))(*arguments)


def verdict_of(
    fn: Callable[..., Any], inputs: Inputs, *, platforms: Sequence[str] = ("cpu",)
) -> Verdict:
    """Return the analysis verdict for a function."""
    found = exported(fn, inputs, platforms=platforms)
    return prove(found, 0, [f"y{number}" for number in range(len(found.out_avals))])


def findings_of(found: Exported) -> list[Finding | None]:
    """Return, for each output, why it is not proved, or None if it is."""
    with jax.enable_x64(True), refining.parsing():
        return findings_in(refining.Refinery(found, {}, "b"), found)


def findings_in(refinery: refining.Refinery, found: Exported) -> list[Finding | None]:
    """Return the same for an artifact's refinery; call it within `refining.parsing()`."""
    asked = proof.ProofTask(found, 0, [str(n) for n in range(len(found.out_avals))], {}, ())
    reason = "is not the same at both sizes"
    for rows in proof.PAIRS:
        modules = [refinery.open_module(size, "cpu") for size in rows]
        parsed = [refining.parse(refinery.refined(module)) for module in modules]
        try:
            read = program.read(parsed[0], parsed[1], rows)
            _, values = proof.followed(read, asked.batched)
            return [
                proof.not_proved(value)
                or size_arithmetic.question(modules[0], asked.batched, number)
                for number, value in enumerate(values)
            ]
        except program.Mismatch:
            continue
        except Unfollowed as unfollowed:
            reason = str(unfollowed)
            break
    return [Finding(False, "", reason)] * len(found.out_avals)
