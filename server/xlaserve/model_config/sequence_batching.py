"""The sequences of a model as its configuration describes them (ModelSequenceBatching)."""

from dataclasses import dataclass
from enum import Enum
from math import prod

from xlaserve.tensors import Datatype, Shape

DEFAULT_IDLE_MICROSECONDS = 1_000_000
"""Triton's, where a configuration does not say."""


class ControlKind(Enum):
    """The fact that a control input tells the model (ModelSequenceBatching.Control.Kind)."""

    START = "CONTROL_SEQUENCE_START"
    READY = "CONTROL_SEQUENCE_READY"
    END = "CONTROL_SEQUENCE_END"
    CORRID = "CONTROL_SEQUENCE_CORRID"


@dataclass(frozen=True, slots=True)
class Control:
    """An input of the model that the server fills, one element for each row."""

    name: str
    kind: ControlKind
    datatype: Datatype
    false_true: tuple[float, ...] = ()
    """Its values for no and yes; empty for CORRID, which is the id itself."""


@dataclass(frozen=True, slots=True)
class State:
    """A tensor that the server keeps between two requests of a sequence (implicit state)."""

    input_name: str
    output_name: str
    datatype: Datatype
    dims: Shape
    """Its shape for one sequence, without a batch dimension."""
    data_file: str = ""
    """File below `initial_state` with the initial state; empty for zeros."""


@dataclass(frozen=True, slots=True)
class SequenceBatching:
    """Batching, controls and states of sequences."""

    idle_microseconds: int = DEFAULT_IDLE_MICROSECONDS
    """Idle time after which a sequence ends."""
    controls: tuple[Control, ...] = ()
    states: tuple[State, ...] = ()
    is_direct: bool = False
    """Whether a sequence keeps its row of the batch (StrategyDirect)."""
    max_candidates: int = 0
    """Sequences with a slot on each replica (StrategyOldest); 0 for one for each row."""
    preferred_batch_size: tuple[int, ...] = ()
    """Ascending; a batch of one of these sizes does not wait for the delay (StrategyOldest)."""
    max_queue_delay_microseconds: int = 0
    minimum_slot_utilization: float = 0.0
    """Share of slots that must be ready before a batch starts early (StrategyDirect)."""
    is_iterative: bool = False
    """Whether one request is a sequence, rescheduled until it is done."""

    def slots(self, max_batch_size: int) -> int:
        """Return the sequence slots per replica."""
        rows = max(1, max_batch_size)
        return rows if self.is_direct else self.max_candidates or rows

    def states_bytes(self, max_batch_size: int) -> int:
        """Return the state bytes of all slots of one replica."""
        each = sum(state.datatype.itemsize * prod(state.dims) for state in self.states)
        return self.slots(max_batch_size) * each
