"""A fake libcuda in one process: memory "of other processes" is local, found by handle."""

import ctypes
from typing import Any

import numpy as np

from xlaserve.runtime.devices.cuda_driver import HANDLE_BYTES
from xlaserve.tensors import Octets

NAMES = {1: b"CUDA_ERROR_INVALID_VALUE", 400: b"CUDA_ERROR_INVALID_HANDLE"}
INVALID_HANDLE = 400


class FakeCuda:
    """Implements the driver functions with ctypes arguments; each returns a CUresult."""

    def __init__(self, devices: int = 2) -> None:
        self.devices = devices
        self.memory: dict[bytes, Octets] = {}
        """Memory shared by "other processes", by handle."""
        self.opened: dict[int, bytes] = {}
        """Open handles, by address."""
        self.failing: dict[str, int] = {}
        """Error code that a function returns, by its name."""
        self.stack: list[int] = []
        """Stack of pushed contexts."""
        self.calls: list[str] = []

    def share(self, count: int, fill: int) -> bytes:
        """Share `count` bytes and return their handle."""
        handle = bytes([fill]) * HANDLE_BYTES
        self.memory[handle] = np.full(count, fill, np.uint8)
        return handle

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name in self.failing:
                return self.failing[name]
            code = getattr(self, f"_{name}")(*arguments)
            return 0 if code is None else int(code)

        return call

    def _cuInit(self, flags: Any) -> None:
        assert 0 == flags.value

    def _cuGetErrorName(self, code: Any, name: Any) -> int:
        if code.value not in NAMES:
            return 1
        _at(name, ctypes.c_char_p).value = NAMES[code.value]
        return 0

    def _cuDeviceGetCount(self, count: Any) -> None:
        _at(count, ctypes.c_int).value = self.devices

    def _cuDeviceGet(self, device: Any, ordinal: Any) -> None:
        _at(device, ctypes.c_int).value = ordinal.value

    def _cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> None:
        _at(context, ctypes.c_void_p).value = device.value + 1

    def _cuCtxPushCurrent_v2(self, context: Any) -> None:
        self.stack.append(context.value)

    def _cuCtxPopCurrent_v2(self, context: Any) -> None:
        self.stack.pop()

    def _cuCtxSynchronize(self) -> None:
        assert self.stack

    def _cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: Any) -> int:
        assert self.stack
        assert 1 == flags.value
        memory = self.memory.get(bytes(handle))
        if memory is None:
            return INVALID_HANDLE
        _at(address, ctypes.c_uint64).value = memory.ctypes.data
        self.opened[memory.ctypes.data] = bytes(handle)
        return 0

    def _cuMemGetAddressRange_v2(self, start: Any, size: Any, address: Any) -> None:
        memory = self.memory[self.opened[address.value]]
        _at(start, ctypes.c_uint64).value = memory.ctypes.data
        _at(size, ctypes.c_size_t).value = memory.nbytes

    def _cuIpcCloseMemHandle(self, address: Any) -> None:
        assert self.stack
        del self.opened[address.value]

    def _cuMemcpyDtoH_v2(self, host: Any, address: Any, size: Any) -> None:
        assert self.stack
        ctypes.memmove(host.value, address.value, size.value)

    def _cuMemcpyHtoD_v2(self, address: Any, host: Any, size: Any) -> None:
        assert self.stack
        ctypes.memmove(address.value, host.value, size.value)


def _at(reference: Any, kind: Any) -> Any:
    """Return the object that a `byref` points to."""
    return ctypes.cast(reference, ctypes.POINTER(kind)).contents
