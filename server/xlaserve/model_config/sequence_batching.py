"""The sequence batching settings of a model (ModelSequenceBatching)."""

from dataclasses import dataclass
from enum import Enum
from math import prod

from xlaserve.tensors import Datatype, Shape

DEFAULT_IDLE_MICROSECONDS = 1_000_000
"""Triton's default idle time of a sequence."""


class ControlKind(Enum):
    """Kinds of control inputs (ModelSequenceBatching.Control.Kind)."""

    START = "CONTROL_SEQUENCE_START"
    READY = "CONTROL_SEQUENCE_READY"
    END = "CONTROL_SEQUENCE_END"
    CORRID = "CONTROL_SEQUENCE_CORRID"


@dataclass(frozen=True, slots=True)
class Control:
    """A model input that the server fills, with one element per row."""

    name: str
    kind: ControlKind
    datatype: Datatype
    false_true: tuple[float, ...] = ()
    """Values for false and true; empty for CORRID, whose value is the sequence id."""


@dataclass(frozen=True, slots=True)
class State:
    """A tensor that the server keeps between requests of a sequence (implicit state)."""

    input_name: str
    output_name: str
    datatype: Datatype
    dims: Shape
    """Shape for one sequence, without the batch dimension."""
    data_file: str = ""
    """File name of the initial state, in the directory `initial_state`; empty for zeros."""


@dataclass(frozen=True, slots=True)
class SequenceBatching:
    """Settings for batching, controls and states of sequences."""

    idle_microseconds: int = DEFAULT_IDLE_MICROSECONDS
    """Time without requests after which a sequence ends."""
    controls: tuple[Control, ...] = ()
    states: tuple[State, ...] = ()
    is_direct: bool = False
    """Whether each sequence keeps a fixed row in the batch (StrategyDirect)."""
    max_candidates: int = 0
    """Number of sequence slots per replica (StrategyOldest); 0 for one per row."""
    preferred_batch_size: tuple[int, ...] = ()
    """Batch sizes that are executed without waiting for the delay, in ascending order
    (StrategyOldest)."""
    max_queue_delay_microseconds: int = 0
    minimum_slot_utilization: float = 0.0
    """Minimum fraction of slots with requests to start a batch before the delay ends
    (StrategyDirect)."""
    is_iterative: bool = False
    """Whether each request is a sequence that is rescheduled until the model ends it."""

    def slots(self, max_batch_size: int) -> int:
        """Return the number of sequence slots per replica."""
        rows = max(1, max_batch_size)
        return rows if self.is_direct else self.max_candidates or rows

    def states_bytes(self, max_batch_size: int) -> int:
        """Return the size of the states in all slots of a replica, in bytes."""
        each = sum(state.datatype.itemsize * prod(state.dims) for state in self.states)
        return self.slots(max_batch_size) * each
