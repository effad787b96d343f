"""The internal tensors of a stepped model, which gives one answer per execution."""

import msgspec

from xlaserve.errors import InvalidModel
from xlaserve.tensors import TensorSpec

_MAX_STATE = 4096
"""Maximum number of state tensors."""

RESERVED = "stream."
"""Name prefix of a stepped model's internal tensors, which clients never see."""
FIRST = f"{RESERVED}first"
"""Input that marks the first step, BOOL[]; it follows the clients' inputs."""
DONE = f"{RESERVED}done"
"""Output that marks the last step, BOOL[]; it follows the clients' outputs."""


def state_name(index: int) -> str:
    """Return the name of a state tensor, which is an input and an output; states come last."""
    return f"{RESERVED}state.{index}"


class Steps(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A stepped model, which is executed repeatedly and gives one answer per step.

    If the first dimension of all its tensors is -1, each row of an execution is a separate request.
    """

    state: int
    """Number of state tensors."""
    max_steps: int
    """Maximum number of steps per request."""

    @property
    def state_names(self) -> tuple[str, ...]:
        """Return the names of the state tensors, in order."""
        return tuple(map(state_name, range(self.state)))

    def known(self, tensors: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        """Return the inputs or outputs that clients see, in the shapes of one request."""
        found = tensors[: max(0, len(tensors) - self.state - 1)]
        return tuple(_of_row(spec) for spec in found) if _is_open(tensors) else found

    def check(
        self,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
        max_batch_size: int,
    ) -> None:
        """Raise InvalidModel unless these are valid inputs and outputs of a stepped model."""
        is_open = _is_open((*inputs, *outputs))
        unbatched = max_batch_size and not is_open
        if not 1 <= self.state <= _MAX_STATE or self.max_steps < 1 or unbatched:
            raise InvalidModel("its description of steps is invalid")
        if is_open:
            inputs, outputs = tuple(map(_of_row, inputs)), tuple(map(_of_row, outputs))
        if not self.known(inputs) or not self.known(outputs):
            raise InvalidModel("it has no inputs or no outputs besides the stepping tensors")
        first, done = inputs[-1 - self.state :], outputs[-1 - self.state :]
        for kind, name, found in (("input", FIRST, first), ("output", DONE, done)):
            if [name, *self.state_names] != [spec.name for spec in found]:
                raise InvalidModel(f"its last {kind}s are not the stepping {kind}s")
            if found[0].datatype.name != "BOOL" or found[0].shape:
                raise InvalidModel(f"{kind} '{name}' is {found[0]}, expected BOOL[]")
        for before, after in zip(first[1:], done[1:], strict=True):
            if before != after:
                raise InvalidModel(f"'{before.name}' is {before} as input, {after} as output")
        if any(-1 in spec.shape for spec in inputs):
            raise InvalidModel("a stepped model has an input with a dynamic dimension")


def _is_open(tensors: tuple[TensorSpec, ...]) -> bool:
    """Tell whether several requests can share an execution, one per row."""
    return bool(tensors) and all(spec.shape[:1] == (-1,) for spec in tensors)


def _of_row(spec: TensorSpec) -> TensorSpec:
    return TensorSpec(spec.name, spec.datatype, spec.shape[1:])
