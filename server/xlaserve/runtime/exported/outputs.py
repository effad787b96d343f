"""Outputs of an execution, copied to the host or kept on the device."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.errors import JaxRuntimeError

from xlaserve.runtime.failures import raise_if_exhausted
from xlaserve.runtime.loaded import Value
from xlaserve.runtime.programs.program_table import Arrays
from xlaserve.tensors import Shape, Tensor


@dataclass(frozen=True, slots=True)
class DeviceTensor:
    """An output on its device (a Resident), including the padding rows of its bucket."""

    array: jax.Array
    batch: int | None
    """Number of rows without padding, or None if the first dimension is not a batch."""
    model: str
    """Name of the model that computed the output."""

    @property
    def rows(self) -> int:
        """Return the number of real rows."""
        if self.batch is not None:
            return self.batch
        return self.array.shape[0] if self.array.ndim else 1

    @property
    def shape(self) -> Shape:
        """Return the shape, without padding rows."""
        shape = self.array.shape
        return shape if self.batch is None else (self.batch, *shape[1:])

    def numpy(self) -> Tensor:
        """Copy the real rows to the host. Blocks until they are computed; raises OutOfMemory."""
        try:
            return to_host(self.array, self.batch)
        except (JaxRuntimeError, MemoryError) as error:
            raise_if_exhausted(self.model, error)
            raise


def to_host(array: jax.Array, rows: int | None = None) -> Tensor:
    """Return the first rows, or all, as a read-only array; on the CPU a view. Blocks."""
    host = np.asarray(array)
    return host if rows is None else host[:rows]


@dataclass(slots=True, eq=False)
class JaxInFlight:
    """An execution in flight on a device (an InFlight)."""

    model: str
    names: Sequence[str]
    outputs: Sequence[jax.Array]
    arguments: Arrays
    """Kept alive while the device may still read them: copies are asynchronous."""
    rows: int | None
    """Number of rows without padding, or None if the outputs have no padding."""
    resident: bool

    def fetch(self) -> Mapping[str, Value]:
        """Wait for the outputs, and free device memory. Blocks; raises OutOfMemory."""
        # Drop the references first: others may use the device memory once the outputs are complete,
        # and this object may live a little longer.
        outputs, self.outputs = self.outputs, ()
        arguments, self.arguments = self.arguments, []
        try:
            found: Sequence[Value] = (
                left_there(self.model, outputs, arguments, self.rows)
                if self.resident
                else [to_host(output, self.rows) for output in outputs]
            )
        except (JaxRuntimeError, MemoryError) as error:
            raise_if_exhausted(self.model, error)
            raise
        return dict(zip(self.names, found, strict=True))


def left_there(
    model: str, outputs: Sequence[jax.Array], arguments: Arrays, rows: int | None
) -> Sequence[DeviceTensor]:
    """Return the outputs as device arrays. May block.

    The caller may modify the arguments afterwards.
    """
    if any(isinstance(argument, np.ndarray) for argument in arguments):
        # XLA may read host arrays in place, and the caller may modify them after this returns.
        jax.block_until_ready(outputs)
    return [DeviceTensor(output, rows, model) for output in outputs]
