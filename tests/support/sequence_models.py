"""Models that serve sequences, and their expected states."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import xlaserve

FACTOR = 31

CONTROLS = """
  control_input [
    { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] },
    { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY fp32_false_true: [ 0, 1 ] } ] },
    { name: "END" control [ { kind: CONTROL_SEQUENCE_END bool_false_true: [ false, true ] } ] },
    { name: "CORRID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] }
  ]
"""

STATE = """
  state [ {
    input_name: "h" output_name: "h_next" data_type: TYPE_INT64 dims: [ 1 ] INITIAL
  } ]
"""


def folded(values: Iterable[int], state: int = 0) -> int:
    """Return the state of a sequence after these inputs; it depends on their order."""
    for value in values:
        state = state * FACTOR + value
        state = (state + 2**63) % 2**64 - 2**63
    return state


def fold(params: Any, x: Any, start: Any, ready: Any, end: Any, corrid: Any, h: Any) -> Any:
    """Fold an input into the state, and return the control inputs as well."""
    following = h * jnp.int64(FACTOR) + x.astype(jnp.int64)
    told = jnp.concatenate([start, ready.astype(jnp.int32), end.astype(jnp.int32)], axis=1)
    return {"y": following, "told": told, "id": corrid, "h_next": following}


def export_fold(root: Path, name: str = "fold", *, max_batch_size: int = 8) -> Path:
    """Export the folding model without a configuration."""
    return xlaserve.export_model(
        fold,
        {},
        {
            "x": ("INT32", [-1, 1]),
            "START": ("INT32", [-1, 1]),
            "READY": ("FP32", [-1, 1]),
            "END": ("BOOL", [-1, 1]),
            "CORRID": ("UINT64", [-1, 1]),
            "h": ("INT64", [-1, 1]),
        },
        root / name / "1",
        max_batch_size=max_batch_size,
    )


def configure(
    root: Path,
    name: str = "fold",
    *,
    strategy: str = "oldest { max_candidate_sequences: 64 }",
    idle_microseconds: int = 60_000_000,
    initial: str = "",
    more: str = "",
    max_batch_size: int = 8,
) -> None:
    """Write the configuration of a folding model."""
    text = f"""
max_batch_size: {max_batch_size}
sequence_batching {{
  max_sequence_idle_microseconds: {idle_microseconds}
  {strategy}
  {CONTROLS}
  {STATE.replace("INITIAL", initial)}
}}
{more}
"""
    (root / name / "config.pbtxt").write_text(text)


def x(value: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return an input with one row."""
    return np.array([[value]], np.int32)


KEEPER = '''
"""Adds up the inputs of each sequence, which it tells apart by their ids."""

import numpy as np

from xlaserve import PythonModel


class Keeper(PythonModel):
    inputs = {"INPUT": ("INT32", [1])}
    outputs = {"OUTPUT": ("INT32", [1])}
    max_batch_size = 8
    batched = BATCHED

    def load(self, context):
        self.sums = {}

    def infer(self, inputs):
        rows = zip(*(inputs[name][:, 0] for name in ("INPUT", "START", "END", "CORRID")))
        return {"OUTPUT": np.array([[self.follow(*row)] for row in rows], np.int32)}

    def follow(self, value, start, end, sequence):
        if value == 1000:
            raise ValueError("it cannot be added")
        total = value + (0 if start else self.sums.pop(sequence))
        if not end:
            self.sums[sequence] = total
        # As Triton's example does.
        return total + int(sequence) if end else total
'''

KEEPER_CONFIG = """
backend: "python"
max_batch_size: 8
sequence_batching {
  max_sequence_idle_microseconds: 60000000
  STRATEGY
  control_input [
    { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] },
    { name: "END" control [ { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } ] },
    { name: "CORRID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING } ] }
  ]
}
"""


def write_keeper(root: Path, name: str, strategy: str, *, batched: bool) -> None:
    """Write a Python model that keeps the state of sequences itself."""
    directory = root / name / "1"
    directory.mkdir(parents=True)
    code = directory / "model.py"
    code.write_text(KEEPER.replace("BATCHED", str(batched)))
    code.chmod(0o644)
    (root / name / "config.pbtxt").write_text(KEEPER_CONFIG.replace("STRATEGY", strategy))
