"""Passes large inputs in shared memory to a server on the same machine.

A region is created, registered and unlinked immediately. The server has it open, so nothing is left
in /dev/shm even if this program crashes. Regions are written through their file descriptor, so that
a full file system is an error instead of a SIGBUS.
"""

import ipaddress
import logging
import os
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

from xlaserve.dialing.address import ServerAddress
from xlaserve.dialing.interface import CallFailed, ServerClient
from xlaserve.serving.inference import InferInput, InferRequest, SharedInput
from xlaserve.tensors import Parameter, to_bytes

T = TypeVar("T")

_DIRECTORY = Path("/dev/shm")
_LEAST_BYTES = 1 << 16
"""Smaller inputs are sent over the connection, which is cheaper than a region."""
_ALIGNMENT = 64
_MOST_REGIONS = 16
_REGION, _OFFSET, _SIZE = (
    "shared_memory_region",
    "shared_memory_offset",
    "shared_memory_byte_size",
)
_LOG = logging.getLogger("xlaserve.client")


@dataclass(eq=False)
class Region:
    """A region registered with the server; used by one request at a time."""

    name: str
    size: int
    file: int
    """File descriptor of the shared memory."""

    def close(self) -> None:
        """Close the file descriptor."""
        os.close(self.file)


class SharedInputs:
    """The regions of one client, of at most `most_bytes` in total. Used on the event loop only."""

    def __init__(self, client: ServerClient, address: ServerAddress, most_bytes: int) -> None:
        self._client = client
        self._url = address.url
        self._most_bytes = most_bytes
        self._idle: list[Region] = []
        self._held = 0
        """Total bytes of all regions, idle or in use."""
        self._count = 0
        self.problem = "" if is_local(address) else "the server is not on this machine"
        """Why shared memory is not used, or an empty string if it is."""
        if most_bytes and self.problem:
            self._give_up(self.problem)

    async def placed(self, request: InferRequest) -> tuple[InferRequest, Region | None]:
        """Move a request's large inputs to a region; return the request unchanged if it has none.

        The caller has to call `give_back` once the request is answered, unless the region is lost.
        """
        if self.problem:
            return request, None
        data = {
            place: memoryview(to_bytes(each.datatype, each.data)).cast("B")
            for place, each in enumerate(request.inputs)
            if each.data.nbytes >= _LEAST_BYTES
        }
        size = sum(_aligned(len(part)) for part in data.values())
        if not size or (region := await self._region(size)) is None:
            return request, None
        inputs: list[InferInput] = list(request.inputs)
        offset = 0
        for place, part in data.items():
            _write(region.file, offset, part)
            inputs[place] = _shared(inputs[place], region.name, offset, len(part))
            offset += _aligned(len(part))
        made = InferRequest(
            request.model_name,
            request.model_version,
            request.id,
            tuple(inputs),
            request.outputs,
            request.parameters,
        )
        return made, region

    def give_back(self, region: Region) -> None:
        """Make a region available for the next request."""
        self._idle.append(region)

    async def lost(self, region: Region) -> bool:
        """Tell whether the server lost a region because it restarted.

        If so, the region and all idle ones are dropped.
        """
        if await self._result_or_none(self._client.memory.knows(region.name)) is not False:
            return False
        for each in (region, *self._idle):
            self._drop(each)
        self._idle.clear()
        return True

    async def close(self) -> None:
        """Close all idle regions, and unregister them if the server is reachable."""
        idle, self._idle = self._idle, []
        for region in idle:
            await self._forget(region)

    async def _region(self, size: int) -> Region | None:
        """Return a region of at least `size` bytes; None if the limits do not allow it."""
        fitting = [each for each in self._idle if each.size >= size]
        if fitting:
            region = min(fitting, key=lambda each: each.size)
            self._idle.remove(region)
            return region
        # Drop idle regions, which are all too small, until a larger one fits.
        while self._idle and not self._fits(_rounded(size)):
            await self._forget(self._idle.pop(0))
        return await self._new(_rounded(size)) if self._fits(_rounded(size)) else None

    def _fits(self, size: int) -> bool:
        return self._held + size <= self._most_bytes and self._count < _MOST_REGIONS

    async def _forget(self, region: Region) -> None:
        self._drop(region)
        # Ignore an unreachable server: it will not keep the region after a restart.
        await self._result_or_none(self._client.memory.unregister(region.name))

    async def _result_or_none(self, asking: Awaitable[T]) -> T | None:
        """Return the result of a call to the server; None if the call fails."""
        try:
            return await asking
        except Exception as error:
            if not isinstance(error, CallFailed) and self._client.failure(error) is None:
                raise
            return None

    async def _new(self, size: int) -> Region | None:
        name = f"xlaserve-client-{os.getpid()}-{uuid4().hex}"
        path = _DIRECTORY / name
        self._held += size
        self._count += 1
        region: Region | None = None
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            region = Region(name, size, file)
            try:
                # Allocate now, so that a lack of memory is reported here and not while writing.
                os.posix_fallocate(file, 0, size)
                await self._client.memory.register(name, f"/{name}", size)
            finally:
                path.unlink(missing_ok=True)
        except BaseException as error:
            self._held -= size
            self._count -= 1
            if region is not None:
                region.close()
            failure = error if isinstance(error, CallFailed) else self._client.failure(error)
            if isinstance(error, OSError) and failure is None:
                self._give_up(f"{path}: {error.strerror}")
            elif failure is None:
                raise
            elif failure.status not in _NOBODY_THERE:
                self._give_up(failure.problem)
            return None
        return region

    def _drop(self, region: Region) -> None:
        self._held -= region.size
        self._count -= 1
        region.close()

    def _give_up(self, problem: str) -> None:
        self.problem = problem
        _LOG.warning("%s: shared memory is not used for inputs: %s", self._url, problem)


_NOBODY_THERE = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED", "UNAUTHENTICATED"})
"""Statuses unrelated to shared memory: the request itself will fail with them too."""


def is_local(address: ServerAddress) -> bool:
    """Tell whether an address is certainly on this machine."""
    if address.socket_path or address.host == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.host).is_loopback
    except ValueError:
        return False


def _shared(tensor: InferInput, region: str, offset: int, size: int) -> SharedInput:
    places: dict[str, Parameter] = {_REGION: region, _OFFSET: offset, _SIZE: size}
    return SharedInput(
        tensor.name,
        tensor.datatype,
        tensor.data[:0] if tensor.data.ndim else tensor.data,
        {**tensor.parameters, **places},
        tensor.data.shape,
    )


def _write(file: int, offset: int, part: memoryview) -> None:
    done = 0
    while done < len(part):
        done += os.pwrite(file, part[done:], offset + done)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _rounded(size: int) -> int:
    """Round a size up to a power of two, so that later requests can reuse the region."""
    return 1 << max(size - 1, _LEAST_BYTES).bit_length()
