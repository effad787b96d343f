"""The memory of a model on a kind of device, as its manifest records it.

It is what a load reserves before it begins, where it is known, instead of an estimate. What the
load then measures counts, so that a wrong number does no more than a wrong estimate.
"""

from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from xlaserve.errors import InvalidModel
from xlaserve.model_config.compiled_shapes import COMPILED_SHAPES, MAX_ON_DEMAND_SHAPES
from xlaserve.model_config.config import ModelConfig

IN_FLIGHT = 2
"""The most executions that each replica on an accelerator has begun and not ended: while it
computes one, the inputs of the next are copied to it. A third would only wait there, and hold
memory."""

MAX_TARGETS = 32
"""Limit of targets per manifest."""

_MAX_BYTES = 1 << 50
_MAX_NAME_LENGTH = 32

_CHANGE_PROGRAMS = frozenset(
    {"batch_sizes", "batch_independent", COMPILED_SHAPES, MAX_ON_DEMAND_SHAPES, "placement"}
)
"""Configuration parameters that change the compiled programs."""


class TargetSizes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes of one copy on one device, with the programs of all batch sizes."""

    parameters_bytes: int
    """Bytes of the parameters in the device's layout."""
    scratch_bytes: int
    """Temporaries, inputs and outputs of the largest program: for each execution in flight."""
    programs_bytes: int
    """Code and constants of all programs."""

    def on_device(self, replicas: int) -> int:
        """Return the bytes per device for replicas that share one copy."""
        flights = replicas * IN_FLIGHT
        return self.parameters_bytes + flights * self.scratch_bytes + self.programs_bytes


Recorded: TypeAlias = Mapping[str, TargetSizes]
"""Sizes by the name of the target."""


def check(recorded: Recorded, parameters_bytes: int) -> None:
    """Raise InvalidModel for sizes that no model of these parameters has."""
    if len(recorded) > MAX_TARGETS:
        raise InvalidModel(
            f"it has sizes for {len(recorded)} targets, expected {MAX_TARGETS} at most"
        )
    for target, sizes in recorded.items():
        if not 0 < len(target) <= _MAX_NAME_LENGTH or not target.isprintable():
            raise InvalidModel("it has sizes for a target with a name that no target has")
        found = (sizes.parameters_bytes, sizes.scratch_bytes, sizes.programs_bytes)
        if not all(0 <= size <= _MAX_BYTES for size in found) or (
            # Small ones are part of the programs.
            sizes.parameters_bytes + sizes.programs_bytes < parameters_bytes
        ):
            raise InvalidModel(
                f"its sizes for '{target}' are none of {parameters_bytes} parameters"
            )


def holds(config: ModelConfig, max_batch_size: int) -> bool:
    """Tell whether a load with this configuration compiles what was recorded.

    `max_batch_size` is the manifest's.
    """
    return not (
        config.max_batch_size not in (0, max_batch_size)
        or config.is_unbatched
        or config.dynamic_batching.preferred_batch_size
        or _CHANGE_PROGRAMS & set(config.parameters)
    )
