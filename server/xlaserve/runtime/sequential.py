"""The interface of models that serve sequences of requests.

The core assigns each sequence to a slot of a replica; the model keeps the states of the slots.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from xlaserve.model_config.sequence_batching import SequenceBatching
from xlaserve.runtime.handling import Handling
from xlaserve.runtime.loaded import InFlight, LoadedModel, Value
from xlaserve.tensors import Tensor

SequenceId: TypeAlias = int | str
"""A sequence id as sent by the client."""


@dataclass(frozen=True, slots=True)
class Step:
    """One row of a batch: its sequence, and the sequence controls for the model."""

    slot: int
    is_start: bool = False
    is_end: bool = False
    id: SequenceId = 0
    is_ready: bool = True
    """Whether the row is a request. Otherwise it is padding and changes no state."""
    is_expired: bool = False
    """Whether the row notifies the model, with READY false, that its sequence has expired."""


@runtime_checkable
class Sequential(Protocol):
    """A LoadedModel that serves sequences. Thread-safe.

    Steps of one replica do not overlap.
    """

    @property
    def batching(self) -> SequenceBatching:
        """Return the batching strategy for sequences."""
        ...

    @property
    def slots(self) -> int:
        """Return the number of sequence slots per replica."""
        ...

    @property
    def handling(self) -> Handling | None:
        """Return the handler for requests and controls, or None for a stepped model."""
        ...

    def controls(self, steps: Sequence[Step]) -> Mapping[str, Tensor]:
        """Return the inputs that carry sequence controls."""
        ...

    def check_id(self, sequence: SequenceId) -> None:
        """Raise InvalidParameter for a sequence id that the model cannot represent."""
        ...

    def step(
        self, inputs: Mapping[str, Value], steps: Sequence[Step], *, replica: int = 0
    ) -> Mapping[str, Tensor]:
        """Execute one step of several sequences, one row per sequence. Blocks.

        After an exception no state has changed, except after StatesLost: then all states of the
        replica are lost. Raises OutOfMemory.
        """
        ...

    def dispatch_step(
        self, inputs: Mapping[str, Value], steps: Sequence[Step], *, replica: int = 0
    ) -> InFlight:
        """Start a step on an accelerator; its `fetch` raises the errors of `step`."""
        ...


class SequentialModel(Sequential, LoadedModel, Protocol):
    """A loaded model that serves sequences."""
