"""Passes large inputs in shared memory to a server on the same machine.

A region is made, registered and unlinked at once: the server has it open, so that nothing is left
in /dev/shm whatever ends the program. It is written through its descriptor, so that memory that is
full is an error and no signal.
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
"""Inputs with fewer bytes go over the connection: there it costs less than a region."""
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
    """A region that the server knows; one request has it at a time."""

    name: str
    size: int
    file: int
    """Its descriptor."""

    def close(self) -> None:
        """Forget it here."""
        os.close(self.file)


class SharedInputs:
    """The regions of one client, `most_bytes` of them together. Of the event loop."""

    def __init__(self, client: ServerClient, address: ServerAddress, most_bytes: int) -> None:
        self._client = client
        self._url = address.url
        self._most_bytes = most_bytes
        self._idle: list[Region] = []
        self._held = 0
        """Bytes of all regions, in use or not."""
        self._count = 0
        self.problem = "" if is_local(address) else "the server is not on this machine"
        """Why nothing is shared; empty while it is."""
        if most_bytes and self.problem:
            self._give_up(self.problem)

    async def placed(self, request: InferRequest) -> tuple[InferRequest, Region | None]:
        """Move a request's large inputs to a region; return the request unchanged if it has none.

        The region is to be given back once the request is answered.
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
        """Have a region for the next request."""
        self._idle.append(region)

    async def lost(self, region: Region) -> bool:
        """Tell whether the server lost a region because it restarted; if so, drop all idle ones.

        It is dropped then, with all that are idle.
        """
        if await self._asked(self._client.memory.knows(region.name)) is not False:
            return False
        for each in (region, *self._idle):
            self._drop(each)
        self._idle.clear()
        return True

    async def close(self) -> None:
        """Unregister all regions, as far as the server is reachable."""
        idle, self._idle = self._idle, []
        for region in idle:
            await self._forget(region)

    async def _region(self, size: int) -> Region | None:
        """Return a region of this size, None beyond the limits."""
        fitting = [each for each in self._idle if each.size >= size]
        if fitting:
            region = min(fitting, key=lambda each: each.size)
            self._idle.remove(region)
            return region
        # Smaller ones make place for one that is larger.
        while self._idle and not self._fits(_rounded(size)):
            await self._forget(self._idle.pop(0))
        return await self._new(_rounded(size)) if self._fits(_rounded(size)) else None

    def _fits(self, size: int) -> bool:
        return self._held + size <= self._most_bytes and self._count < _MOST_REGIONS

    async def _forget(self, region: Region) -> None:
        self._drop(region)
        # An unreachable server has forgotten it, or will.
        await self._asked(self._client.memory.unregister(region.name))

    async def _asked(self, asking: Awaitable[T]) -> T | None:
        """Return an answer, None where the server cannot be asked."""
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
                # Memory that is not there is an error here, not at a write.
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
"""Statuses that do not point at shared memory: the request fails with them too."""


def is_local(address: ServerAddress) -> bool:
    """Tell whether an address is surely on this machine."""
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
    """Return the power of two above a size: a region is for later requests too."""
    return 1 << max(size - 1, _LEAST_BYTES).bit_length()
