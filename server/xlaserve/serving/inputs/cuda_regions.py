"""CUDA memory that clients register by IPC handle, used like system shared memory.

Tensors are copied to and from the host: models get host arrays.
"""

import weakref
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Protocol

from xlaserve.errors import InvalidRegion, Unsupported
from xlaserve.runtime.devices.cuda_driver import HANDLE_BYTES, CudaFailure
from xlaserve.serving.access.sight import require_all_seen
from xlaserve.serving.call import Peer
from xlaserve.serving.inputs.shared_memory import Regions, check_within, shown
from xlaserve.tensors import Buffer, Octets, Tensor

KIND = "cuda"

CLIENT_FAULTS: Mapping[int, str] = MappingProxyType(
    {
        1: "a valid CUDA handle",
        101: "the device_id of the memory's owner process",
        201: "a handle of another process than the server",
        205: "memory that can be mapped into the server",
        208: "memory that is not mapped yet",
        217: "memory of a device with peer access from the server's device",
        400: "a handle of memory that is still allocated",
    }
)
"""Driver errors caused by a client's handle, with the expectation named in the error. All others
are internal errors."""


class Driver(Protocol):
    """The CUDA driver; methods raise CudaFailure."""

    @property
    def device_count(self) -> int:
        """Return the number of devices."""
        ...

    def open(self, device: int, handle: bytes) -> int:
        """Map the memory of a handle, and return its address."""
        ...

    def size(self, device: int, address: int) -> int:
        """Return the size of the mapping at an address."""
        ...

    def read(self, device: int, address: int, memory: Octets) -> None:
        """Copy device memory to the host, filling `memory`."""
        ...

    def write(self, device: int, address: int, data: Buffer) -> None:
        """Copy host bytes to the device."""
        ...

    def close(self, device: int, address: int) -> None:
        """Unmap memory."""
        ...


class CudaRegion:
    """Mapped device memory, unmapped with the last reference."""

    kind = KIND
    can_map = False
    owner: str = ""

    def __init__(
        self, name: str, device: int, byte_size: int, driver: Driver, address: int
    ) -> None:
        """`address` is mapped memory, which the region unmaps when it is garbage collected."""
        self.name = name
        self.device = device
        self.byte_size = byte_size
        self._driver = driver
        self._address = address
        weakref.finalize(self, driver.close, device, address).atexit = False

    def check(self, offset: int, size: int) -> None:
        """Raise InvalidRegion if the range exceeds the region."""
        check_within(self.name, self.byte_size, offset, size)

    def read(self, offset: int, memory: Octets) -> None:
        """Copy bytes at an offset to `memory`; raises InvalidRegion."""
        self.check(offset, memory.nbytes)
        self._driver.read(self.device, self._address + offset, memory)

    def view(self, offset: int, size: int) -> Octets:
        """Raise NotImplementedError: the host cannot view device memory."""
        raise NotImplementedError

    def write(self, offset: int, parts: Iterable[Buffer]) -> None:
        """Write bytes at an offset; raises InvalidRegion."""
        views = [memoryview(part).cast("B") for part in parts if len(part)]
        self.check(offset, sum(map(len, views)))
        at = self._address + offset
        for view in views:
            self._driver.write(self.device, at, view)
            at += len(view)

    def shares_memory_with(self, array: Tensor) -> bool:
        """Return False, because arrays are on the host."""
        return False


class CudaRegions:
    """Registers, lists and unregisters CUDA memory of clients.

    `regions` stores these regions together with those in system shared memory.
    """

    def __init__(self, regions: Regions) -> None:
        self._regions = regions

    def register(
        self, peer: Peer, name: str, raw_handle: bytes, device: int, byte_size: int
    ) -> None:
        """Map an IPC handle (cudaIpcMemHandle_t), and register its memory under a name.

        Raises Unsupported if JAX does not run on CUDA; other errors are as for system shared
        memory.
        """
        require_all_seen()
        driver = self._regions.driver
        if driver is None:
            raise Unsupported("CUDA shared memory")
        self._regions.admit(peer, name, byte_size=byte_size)
        self._regions.keep(self._opened(driver, name, raw_handle, device, byte_size), name)

    def status(self, name: str = "") -> list[CudaRegion]:
        """Return the region with a name, or all if the name is empty; raises RegionNotFound."""
        return [r for r in self._regions.of_kind(KIND, name) if isinstance(r, CudaRegion)]

    def unregister(self, peer: Peer, name: str = "") -> None:
        """Unregister the region with a name, or all if it is empty; unknown names are ignored."""
        self._regions.drop(peer, KIND, name)

    def _opened(
        self, driver: Driver, name: str, raw_handle: bytes, device: int, byte_size: int
    ) -> CudaRegion:
        if len(raw_handle) != HANDLE_BYTES:
            expected = f"a raw_handle of {HANDLE_BYTES} bytes (cudaIpcMemHandle_t)"
            raise InvalidRegion(shown(name), expected, f"{len(raw_handle)}")
        count = driver.device_count
        if not 0 <= device < count:
            raise InvalidRegion(shown(name), f"a device_id of 0 to {count - 1}", str(device))
        try:
            address = driver.open(device, raw_handle)
        except CudaFailure as error:
            expected = CLIENT_FAULTS.get(error.code, "")
            if not expected:
                raise
            raise InvalidRegion(shown(name), expected, error.name) from error
        region = CudaRegion(name, device, byte_size, driver, address)  # unmaps it when collected
        there = driver.size(device, address)
        if byte_size > there:
            raise InvalidRegion(shown(name), f"{byte_size} bytes of CUDA memory", f"{there}")
        return region
