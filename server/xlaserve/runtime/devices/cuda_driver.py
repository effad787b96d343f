"""Access to CUDA memory of other processes, through the CUDA driver API.

Uses each device's primary context, which JAX uses too, so no second context is created. Every call
makes that context current on the calling thread and restores the previous one.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np

from xlaserve.tensors import Buffer, Octets

LIBRARY = "libcuda.so.1"

HANDLE_BYTES = 64
"""Size of CUipcMemHandle (the same as cudaIpcMemHandle_t), in bytes."""

_LAZY_ENABLE_PEER_ACCESS = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag of cuIpcOpenMemHandle."""

_OK = 0

Library: TypeAlias = Any
"""The CUDA library as loaded by ctypes, or a fake with the same functions in tests."""


class CudaFailure(Exception):
    """A driver call failed; carries CUDA's error number and name."""

    def __init__(self, function: str, code: int, name: str) -> None:
        self.code = code
        self.name = name
        super().__init__(f"{function}: {name} ({code})")


class Handle(ctypes.Structure):
    """A CUipcMemHandle. The driver takes it by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class CudaDriver:
    """The CUDA driver API. Thread-safe; methods raise CudaFailure.

    Addresses are valid in this process, between the `open` that returned them and their `close`.
    """

    def __init__(self, library: Library) -> None:
        """Initialise the driver; raises CudaFailure."""
        self._library = library
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._call("cuInit", ctypes.c_uint(0))

    @property
    def device_count(self) -> int:
        """Return the number of visible devices."""
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        return count.value

    def open(self, device: int, handle: bytes) -> int:
        """Map another process's memory by its IPC handle, and return the address."""
        address = ctypes.c_uint64()
        with self._on(device):
            self._call(
                "cuIpcOpenMemHandle_v2",
                ctypes.byref(address),
                Handle.from_buffer_copy(handle),
                ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS),
            )
        return address.value

    def size(self, device: int, address: int) -> int:
        """Return the size in bytes of the mapping at an address."""
        start, size = ctypes.c_uint64(), ctypes.c_size_t()
        with self._on(device):
            self._call(
                "cuMemGetAddressRange_v2",
                ctypes.byref(start),
                ctypes.byref(size),
                ctypes.c_uint64(address),
            )
        return start.value + size.value - address

    def read(self, device: int, address: int, memory: Octets) -> None:
        """Copy device memory to host memory; returns once the copy is complete."""
        if memory.nbytes:
            host = ctypes.c_void_p(memory.ctypes.data)
            with self._on(device):
                size = ctypes.c_size_t(memory.nbytes)
                self._call("cuMemcpyDtoH_v2", host, ctypes.c_uint64(address), size)

    def write(self, device: int, address: int, data: Buffer) -> None:
        """Copy host memory to device memory; returns once the copy is complete."""
        source = np.frombuffer(data, np.uint8)
        if source.nbytes:
            host = ctypes.c_void_p(source.ctypes.data)
            with self._on(device):
                size = ctypes.c_size_t(source.nbytes)
                self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), host, size)
                # A copy from pageable memory may return before all data has reached the device.
                self._call("cuCtxSynchronize")

    def close(self, device: int, address: int) -> None:
        """Unmap memory mapped by `open`."""
        with self._on(device):
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    @contextmanager
    def _on(self, device: int) -> Iterator[None]:
        """Make the device's context current within the block, then restore the previous one."""
        self._call("cuCtxPushCurrent_v2", self._context(device))
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _context(self, device: int) -> ctypes.c_void_p:
        """Return the device's primary context, retained until the process exits."""
        known = self._contexts.get(device)
        if known is None:
            number, known = ctypes.c_int(), ctypes.c_void_p()
            self._call("cuDeviceGet", ctypes.byref(number), ctypes.c_int(device))
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(known), number)
            self._contexts[device] = known
        return known

    def _call(self, function: str, *arguments: Any) -> None:
        code = int(getattr(self._library, function)(*arguments))
        if code != _OK:
            raise CudaFailure(function, code, self._name(code))

    def _name(self, code: int) -> str:
        name = ctypes.c_char_p()
        found = int(self._library.cuGetErrorName(ctypes.c_int(code), ctypes.byref(name)))
        return name.value.decode() if found == _OK and name.value else "an unknown error"


def open_driver(load: Callable[[str], Library] = ctypes.CDLL) -> CudaDriver | None:
    """Return the CUDA driver, or None if it is missing or unusable."""
    try:
        return CudaDriver(load(LIBRARY))
    except (OSError, CudaFailure):
        return None
