"""Proves from the served computation that rows of a batch are independent.

README.md beside this file says how, why it can be believed, and how to add an operation.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from xlaserve.row_proofs.verdict import Independence, Verdict

if TYPE_CHECKING:
    from xlaserve.row_proofs.interface import loops_follow_inputs, prove, prove_each

__all__ = ["Independence", "Verdict", "loops_follow_inputs", "prove", "prove_each"]


def __getattr__(name: str) -> object:
    # A verdict is shown without JAX, which the proof needs and which takes a second to import.
    if name in ("loops_follow_inputs", "prove", "prove_each"):
        return getattr(import_module("xlaserve.row_proofs.interface"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
