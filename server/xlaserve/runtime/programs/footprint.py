"""The memory of one program per device, as XLA's compiler reports it. Needs no JAX."""

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
    """Bytes on each device, as the memory analysis of a compiled program has them."""

    parameters_bytes: int = 0
    """Bytes of the parameters among the arguments."""
    padding_bytes: int = 0
    """Bytes that the layout of parameters adds to their arrays: TPUs use tiles."""
    arguments_bytes: int = 0
    """Parameters and inputs, in the layout of the device."""
    outputs_bytes: int = 0
    aliased_bytes: int = 0
    """Bytes of the outputs that lie in the memory of arguments."""
    temporaries_bytes: int = 0
    constants_bytes: int = 0
    """Permanent bytes besides the code."""
    code_bytes: int = 0
    """0 if unknown, as on the CPU."""
    workspace_bytes: int = 0
    """Bytes among the temporaries that a library takes for a call, on accelerators."""
    spared_bytes: int = 0
    """Bytes of scratch less with other kernels, which the device may choose; 0 where that was not
    asked, or is the same."""

    @staticmethod
    def of(
        executable: Any, *, accelerated: bool = False, kept_bytes: int | None = None
    ) -> "Footprint":
        """Return the compiler's figures for a `jax.stages.Compiled`; zeros without any.

        It is one that takes parameters, and then inputs; or `kept_bytes` of its arguments stay.
        `accelerated`: not for the host.
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

        Without the workspace that counts once for the device (`workspace.device_bytes`).
        """
        inputs = self.arguments_bytes - self.parameters_bytes
        temporaries = self.temporaries_bytes - shared(self.workspace_bytes, self.temporaries_bytes)
        return max(0, inputs + self.outputs_bytes - self.aliased_bytes + temporaries)

    def or_larger(self, other: "Footprint") -> "Footprint":
        """Combine two footprints: the larger scratch and code."""
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


def _code(executable: Any, said: int) -> int:
    """Return the size of the code, or of the whole executable if unknown."""
    if said > 0:
        return said
    # A GPU's compiler does not say it of what was never loaded.
    with suppress(RuntimeError, AttributeError, ValueError):
        return len(executable.runtime_executable().serialize())
    return 0


def _parameters(executable: Any) -> tuple[int, int]:
    """Return the size of the parameters on a device, and as plain arrays."""
    laid_out, as_arrays = 0, 0
    formats, described = executable.input_formats[0][0], executable.args_info[0][0]
    for found, argument in zip(formats, described, strict=True):
        if found.layout is None:  # the module does not use it
            continue
        shape = found.sharding.shard_shape(argument.shape)
        bits = found.layout.sub_byte_element_size_in_bits or 8 * argument.dtype.itemsize
        laid_out += bits * prod(padded(found.layout, shape)) // 8
        as_arrays += prod(shape) * argument.dtype.itemsize
    return laid_out, as_arrays


def padded(layout: _Layout, shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape in its tiled layout, with sizes rounded up to whole tiles."""
    sizes = [shape[dimension] for dimension in layout.major_to_minor]
    # Further tilings order what is in the tiles of the first.
    tile = next(iter(layout.tiling or ()), ())
    sizes = [1] * (len(tile) - len(sizes)) + sizes
    first = len(sizes) - len(tile)
    whole = (-(-size // of) * of for size, of in zip(sizes[first:], tile, strict=True))
    return (*sizes[:first], *whole)
