"""A model's memory per kind of device, as recorded in its manifest.

The sizes come from compiling for the target. A load reserves this much memory if it is recorded,
and an estimate otherwise. After the load the measured size counts, so a wrong record does no more
harm than a wrong estimate.
"""

from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from xlaserve.errors import InvalidModel
from xlaserve.model_config.compiled_shapes import COMPILED_SHAPES, MAX_ON_DEMAND_SHAPES
from xlaserve.model_config.config import ModelConfig

IN_FLIGHT = 2
"""Maximum number of executions in flight per replica on an accelerator: while one is computed, the
inputs of the next are copied to the device. A third would only wait and hold memory."""

MAX_TARGETS = 32
"""Maximum number of targets in a manifest."""

_MAX_BYTES = 1 << 50
_MAX_NAME_LENGTH = 32

_CHANGE_PROGRAMS = frozenset(
    {"batch_sizes", "batch_independent", COMPILED_SHAPES, MAX_ON_DEMAND_SHAPES, "placement"}
)
"""Configuration parameters that change which programs are compiled."""


class TargetSizes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Memory of one copy of a model on one device, with the programs of all batch sizes."""

    parameters_bytes: int
    """Size of the parameters in the device's layout."""
    scratch_bytes: int
    """Temporaries, inputs and outputs of the largest program, per execution in flight."""
    programs_bytes: int
    """Code and constants of all programs."""

    def on_device(self, replicas: int) -> int:
        """Return the bytes per device for replicas that share parameters and programs."""
        flights = replicas * IN_FLIGHT
        return self.parameters_bytes + flights * self.scratch_bytes + self.programs_bytes


Recorded: TypeAlias = Mapping[str, TargetSizes]
"""Sizes by target name."""


def check(recorded: Recorded, parameters_bytes: int) -> None:
    """Raise InvalidModel for sizes that are impossible for this size of parameters."""
    if len(recorded) > MAX_TARGETS:
        raise InvalidModel(
            f"it has sizes for {len(recorded)} targets, expected at most {MAX_TARGETS}"
        )
    for target, sizes in recorded.items():
        if not 0 < len(target) <= _MAX_NAME_LENGTH or not target.isprintable():
            raise InvalidModel("it has sizes for a target with an invalid name")
        found = (sizes.parameters_bytes, sizes.scratch_bytes, sizes.programs_bytes)
        if not all(0 <= size <= _MAX_BYTES for size in found) or (
            # Small parameters are stored in the programs.
            sizes.parameters_bytes + sizes.programs_bytes < parameters_bytes
        ):
            raise InvalidModel(
                f"its sizes for '{target}' are too small for {parameters_bytes} bytes of"
                " parameters, or above the limit"
            )


def holds(config: ModelConfig, max_batch_size: int) -> bool:
    """Tell whether a load with this configuration compiles the recorded programs.

    `max_batch_size` is the manifest's.
    """
    return not (
        config.max_batch_size not in (0, max_batch_size)
        or config.is_unbatched
        or config.dynamic_batching.preferred_batch_size
        or _CHANGE_PROGRAMS & set(config.parameters)
    )
