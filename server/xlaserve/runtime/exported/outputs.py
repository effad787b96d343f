"""The outputs of an execution: copied to the host, or kept for the next model."""

# Much of jax is typed, but not all that is called here.
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
    """An output on its device (a Resident), with the padding of its bucket."""

    array: jax.Array
    batch: int | None
    """Number of real rows; None where the first dimension is not a batch."""
    model: str
    """Name of the model whose output it is."""

    @property
    def rows(self) -> int:
        """Return the number of real rows."""
        if self.batch is not None:
            return self.batch
        return self.array.shape[0] if self.array.ndim else 1

    @property
    def shape(self) -> Shape:
        """Return its shape, with the real rows."""
        shape = self.array.shape
        return shape if self.batch is None else (self.batch, *shape[1:])

    def numpy(self) -> Tensor:
        """Fetch the real rows to the host. Blocks until they are computed; raises OutOfMemory."""
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
    """Kept alive as long as they may be read: copies to the device are asynchronous."""
    rows: int | None
    """Real rows of the outputs; None where all are, and without a batch dimension."""
    resident: bool

    def fetch(self) -> Mapping[str, Value]:
        """Wait for the outputs, and free device memory. Blocks; raises OutOfMemory."""
        # On completion others may use the memory at once, and this may live a little longer.
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
    """Return the outputs as device arrays; the arguments may change afterwards. May block."""
    if any(isinstance(argument, np.ndarray) for argument in arguments):
        # XLA may read host arrays in place, and they are the caller's to change again.
        jax.block_until_ready(outputs)
    return [DeviceTensor(output, rows, model) for output in outputs]
