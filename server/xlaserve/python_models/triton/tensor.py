"""`pb_utils.Tensor`: a named array."""

from typing import Any

import numpy as np

from xlaserve.python_models.triton.errors import TritonModelException
from xlaserve.python_models.triton.types import numpy_to_triton_type
from xlaserve.tensors import Tensor as Array

_CPU_DEVICES = frozenset((1, 3))
"""DLPack device types whose memory the host can read: kDLCPU and kDLCUDAHost."""


class Tensor:
    """A tensor of a request or a response."""

    __slots__ = ("_array", "_name")

    def __init__(self, name: str, numpy_array: Any) -> None:
        array = numpy_array
        if type(array) is not np.ndarray or not array.flags.c_contiguous:
            array = np.ascontiguousarray(array).reshape(np.shape(array))
        if array.dtype.kind in "SU":
            array = array.astype(np.object_)
        self._name = name
        self._array: Array = array

    def name(self) -> str:
        """Return the name."""
        return self._name

    def as_numpy(self) -> Array:
        """Return the array."""
        return self._array

    def shape(self) -> list[int]:
        """Return the shape."""
        return list(self._array.shape)

    def triton_dtype(self) -> int | None:
        """Return Triton's number of the datatype."""
        return numpy_to_triton_type(self._array.dtype)

    def is_cpu(self) -> bool:
        """Return True: tensors are always in host memory."""
        return True

    def to_dlpack(self) -> object:
        """Return a DLPack capsule that shares the tensor's memory and can be consumed once."""
        return self.__dlpack__()

    def __dlpack__(self, *, stream: object = None, **more: object) -> object:
        if not self._array.flags.writeable:
            # A bare capsule cannot be marked read-only.
            self._array = self._array.copy()
        return self._array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> "Tensor":
        """Create a tensor from a DLPack capsule, or from an object that exports one; no copy.

        Raises TritonModelException if the memory is on a device or not C-contiguous.
        """
        offered: Any = tensor if hasattr(tensor, "__dlpack__") else _Capsule(tensor)
        device, _ = offered.__dlpack_device__()
        if int(device) not in _CPU_DEVICES:
            raise TritonModelException(f"tensor '{name}' is on a device, expected one on the host")
        try:
            array = np.from_dlpack(offered)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise TritonModelException(f"tensor '{name}': {error}") from error
        if not array.flags.c_contiguous:
            raise TritonModelException(f"tensor '{name}': expected a C-contiguous array")
        return Tensor(name, array)


class _Capsule:
    """Wraps a bare capsule in the DLPack methods; bare capsules are assumed to be on the host."""

    def __init__(self, capsule: object) -> None:
        self._capsule = capsule

    def __dlpack__(self, **more: object) -> object:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)
