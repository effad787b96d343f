"""The interface of models that serve sequences of requests.

The core knows which sequence has which slot of which replica; the model knows what that means.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from xlaserve.model_config.sequence_batching import SequenceBatching
from xlaserve.runtime.handling import Handling
from xlaserve.runtime.loaded import InFlight, LoadedModel, Value
from xlaserve.tensors import Tensor

SequenceId: TypeAlias = int | str
"""The id of a sequence, as its client gave it."""


@dataclass(frozen=True, slots=True)
class Step:
    """One row of a batch: which sequence it is of, and what that tells the model."""

    slot: int
    is_start: bool = False
    is_end: bool = False
    id: SequenceId = 0
    is_ready: bool = True
    """Whether it is a request; otherwise the row is padding, and changes no state."""
    is_expired: bool = False
    """Whether it tells the model, with its READY for false, that its sequence has expired."""


@runtime_checkable
class Sequential(Protocol):
    """A LoadedModel that serves sequences. Thread-safe.

    The steps of one replica are taken one after the other.
    """

    @property
    def batching(self) -> SequenceBatching:
        """Return the batching strategy of its sequences."""
        ...

    @property
    def slots(self) -> int:
        """Return the number of sequence slots per replica."""
        ...

    @property
    def handling(self) -> Handling | None:
        """Return the handler of its requests and controls; None for a stepped model."""
        ...

    def controls(self, steps: Sequence[Step]) -> Mapping[str, Tensor]:
        """Return the inputs that carry sequence controls."""
        ...

    def check_id(self, sequence: SequenceId) -> None:
        """Raise InvalidParameter for an id that the model cannot receive."""
        ...

    def step(
        self, inputs: Mapping[str, Value], steps: Sequence[Step], *, replica: int = 0
    ) -> Mapping[str, Tensor]:
        """Execute one step of several sequences, one row each. Blocks.

        States change where this returns, and nowhere where it raises; but StatesLost means that the
        replica has none of them any longer. Raises OutOfMemory.
        """
        ...

    def dispatch_step(
        self, inputs: Mapping[str, Value], steps: Sequence[Step], *, replica: int = 0
    ) -> InFlight:
        """Start a step on an accelerator; its `fetch` raises what `step` would."""
        ...


class SequentialModel(Sequential, LoadedModel, Protocol):
    """A loaded model that serves sequences."""
