"""Proves that the rows of a batch do not affect one another.

README.md in this directory explains the method, its soundness, and how to add an operation.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from xlaserve.row_proofs.verdict import Independence, Verdict

if TYPE_CHECKING:
    from xlaserve.row_proofs.interface import loops_follow_inputs, prove, prove_each

__all__ = ["Independence", "Verdict", "loops_follow_inputs", "prove", "prove_each"]


def __getattr__(name: str) -> object:
    # The proof needs JAX, which takes a second to import; showing a verdict does not.
    if name in ("loops_follow_inputs", "prove", "prove_each"):
        return getattr(import_module("xlaserve.row_proofs.interface"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
