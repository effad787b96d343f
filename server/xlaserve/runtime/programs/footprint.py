"""The memory of a program per device, as reported by XLA. Does not import JAX."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

from xlaserve.runtime.devices.workspace import shared, workspace_bytes


class _Layout(Protocol):
    major_to_minor: tuple[int, ...]
    tiling: tuple[tuple[int, ...], ...] | None
    sub_byte_element_size_in_bits: int


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes per device, from the memory analysis of a compiled program."""

    parameters_bytes: int = 0
    """Size of the parameters."""
    padding_bytes: int = 0
    """Padding of parameters in the device's layout; TPUs use tiles."""
    arguments_bytes: int = 0
    """Size of parameters and inputs in the device's layout."""
    outputs_bytes: int = 0
    aliased_bytes: int = 0
    """Size of outputs that share memory with arguments."""
    temporaries_bytes: int = 0
    constants_bytes: int = 0
    """Permanent memory besides parameters and code: constants."""
    code_bytes: int = 0
    """Size of the code; 0 if unknown, as on the CPU."""
    workspace_bytes: int = 0
    """The part of the temporaries that library calls use as workspace; accelerators only."""
    spared_bytes: int = 0
    """How much less scratch memory is needed with other kernels, which the device may choose; 0 if
    that is unknown or makes no difference.
    """

    @staticmethod
    def of(
        executable: Any, *, accelerated: bool = False, kept_bytes: int | None = None
    ) -> "Footprint":
        """Return the footprint of a `jax.stages.Compiled`; zeros if XLA reports none.

        Parameters are the program's leading arguments, or `kept_bytes` of its arguments.
        `accelerated`: the program is for an accelerator.
        """
        found = executable.memory_analysis()
        if found is None:
            return Footprint()
        arguments, outputs = found.argument_size_in_bytes, found.output_size_in_bytes
        aliased, temporaries = found.alias_size_in_bytes, found.temp_size_in_bytes
        if kept_bytes is None:
            parameters, as_arrays = _parameters(executable)
        else:
            parameters = as_arrays = min(kept_bytes, arguments)
        whole = getattr(found, "total_allocation_bytes", 0)
        return Footprint(
            parameters,
            parameters - as_arrays,
            arguments,
            outputs,
            aliased,
            temporaries,
            max(0, whole - (arguments + outputs - aliased + temporaries)),
            _code(executable, found.generated_code_size_in_bytes) if accelerated else 0,
            _workspace(executable) if accelerated else 0,
        )

    @property
    def scratch_bytes(self) -> int:
        """Return the memory of one execution: inputs, outputs and temporaries.

        Excludes workspace that counts once per device (`workspace.device_bytes`).
        """
        inputs = self.arguments_bytes - self.parameters_bytes
        temporaries = self.temporaries_bytes - shared(self.workspace_bytes, self.temporaries_bytes)
        return max(0, inputs + self.outputs_bytes - self.aliased_bytes + temporaries)

    def or_larger(self, other: "Footprint") -> "Footprint":
        """Combine two footprints of a program: the larger scratch memory, constants and code."""
        larger = max(self, other, key=lambda one: one.scratch_bytes)
        return replace(
            larger,
            constants_bytes=max(self.constants_bytes, other.constants_bytes),
            code_bytes=max(self.code_bytes, other.code_bytes),
            spared_bytes=abs(self.scratch_bytes - other.scratch_bytes),
        )


def _workspace(executable: Any) -> int:
    with suppress(RuntimeError, AttributeError, ValueError):
        return workspace_bytes(executable.as_text() or "")
    return 0


def _code(executable: Any, reported: int) -> int:
    """Return the size of the code, or of the serialized executable if unknown."""
    if reported > 0:
        return reported
    # XLA's GPU compiler does not report the size of programs that were never loaded.
    with suppress(RuntimeError, AttributeError, ValueError):
        return len(executable.runtime_executable().serialize())
    return 0


def _parameters(executable: Any) -> tuple[int, int]:
    """Return the size of the parameters in the device's layout, and as plain arrays."""
    laid_out, as_arrays = 0, 0
    formats, described = executable.input_formats[0][0], executable.args_info[0][0]
    for found, argument in zip(formats, described, strict=True):
        if found.layout is None:  # The program does not use this parameter.
            continue
        shape = found.sharding.shard_shape(argument.shape)
        bits = found.layout.sub_byte_element_size_in_bits or 8 * argument.dtype.itemsize
        laid_out += bits * prod(padded(found.layout, shape)) // 8
        as_arrays += prod(shape) * argument.dtype.itemsize
    return laid_out, as_arrays


def padded(layout: _Layout, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape with each size rounded up to whole tiles."""
    sizes = [shape[dimension] for dimension in layout.major_to_minor]
    # Further tilings only arrange elements within the first tiles.
    tile = next(iter(layout.tiling or ()), ())
    sizes = [1] * (len(tile) - len(sizes)) + sizes
    first = len(sizes) - len(tile)
    whole = (-(-size // of) * of for size, of in zip(sizes[first:], tile, strict=True))
    return (*sizes[:first], *whole)
