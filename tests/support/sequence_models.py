"""Models that serve sequences, and what their states should be."""

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
    """Return the state of a sequence behind these inputs: it depends on their order."""
    for value in values:
        state = state * FACTOR + value
        state = (state + 2**63) % 2**64 - 2**63
    return state


def fold(params: Any, x: Any, start: Any, ready: Any, end: Any, corrid: Any, h: Any) -> Any:
    """Fold an input into the state, and tell what the controls were."""
    following = h * jnp.int64(FACTOR) + x.astype(jnp.int64)
    told = jnp.concatenate([start, ready.astype(jnp.int32), end.astype(jnp.int32)], axis=1)
    return {"y": following, "told": told, "id": corrid, "h_next": following}


def export_fold(root: Path, name: str = "fold", *, max_batch_size: int = 8) -> Path:
    """Write the model that folds its inputs, without a configuration."""
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
    """Write the configuration of a model that folds."""
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
    """Return an input of one row."""
    return np.array([[value]], np.int32)
