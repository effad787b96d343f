"""System shared memory that clients registered: named regions, read and written within bounds.

Touching a mapped page of a truncated file raises SIGBUS, which kills the process; a check before
the access cannot prevent that, and POSIX shared memory cannot be sealed. So the server reads and
writes through the file descriptor, where truncation only causes a short count. For trusted clients,
`in_place` maps inputs instead.
"""

import ipaddress
import mmap
import os
import stat
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from xlaserve.concurrency.control_plane import Change, ChangeKind, ControlPlane, OneProcess
from xlaserve.errors import (
    InvalidRegion,
    NotLocal,
    RegionExists,
    RegionNotFound,
    SwitchedOff,
    TooManyRegions,
)
from xlaserve.net.bounded_cache import BoundedCache
from xlaserve.serving.access.sight import Sees, everything, require_all_seen
from xlaserve.serving.call import UNIX, Call, Operation, Peer, current_call, owner_now
from xlaserve.serving.inference import Form
from xlaserve.serving.proxies import came_through_a_proxy
from xlaserve.settings import Settings
from xlaserve.settings.choices import SharedMemoryClients
from xlaserve.tensors import Buffer, Octets, Tensor

KIND = "system"

DIRECTORY = Path("/dev/shm")
"""Directory of POSIX shared memory files."""

_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""Do not follow links; open special files without blocking, to refuse them afterwards."""
_LONGEST_NAME = 255
_SEMAPHORE = "sem."
"""Name prefix of POSIX semaphores, which are in the same directory."""
_SHOWN_CHARACTERS = 80
_LARGEST = 2**63 - 1
"""The largest file offset."""
_LOOPBACK = "127."
_THE_SERVER = Peer(address=UNIX)
"""Peer of requests that another server process has already admitted."""
MOST_KNOWN = 1024
"""Number of request forms whose tensor locations are cached."""
_MOST_BUFFERS = 512
"""Buffers per system call; Linux allows 1024."""


@dataclass(frozen=True, slots=True)
class SharedMemoryPolicy:
    """Settings of shared memory."""

    clients: SharedMemoryClients = SharedMemoryClients.LOCAL
    in_place: bool = False
    """Whether inputs are used in place, without a copy."""
    max_regions: int = 256
    max_bytes: int = 64 << 30
    """Maximum size of all regions together."""
    directory: Path = DIRECTORY

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Return the policy from the settings."""
        return cls(
            settings.shared_memory,
            settings.shared_memory_in_place,
            settings.max_shared_memory_regions,
            settings.max_shared_memory_bytes,
        )


class SharedRegion(Protocol):
    """A region of client memory of any kind."""

    name: str
    byte_size: int
    owner: str
    """The principal that registered it; empty for anonymous callers."""

    @property
    def kind(self) -> str:
        """Return the kind of memory, as in the protocol."""
        ...

    @property
    def can_map(self) -> bool:
        """Tell whether `view` is supported."""
        ...

    def check(self, offset: int, size: int) -> None:
        """Raise InvalidRegion if the range exceeds the region."""
        ...

    def read(self, offset: int, memory: Octets) -> None:
        """Copy bytes at an offset to `memory`; raises InvalidRegion."""
        ...

    def view(self, offset: int, size: int) -> Octets:
        """Return a view of the bytes without a copy; raises InvalidRegion."""
        ...

    def write(self, offset: int, parts: Iterable[Buffer]) -> None:
        """Write bytes at an offset; raises InvalidRegion."""
        ...

    def shares_memory_with(self, array: Tensor) -> bool:
        """Tell whether an array may be a view of this region."""
        ...


class Region:
    """A part of a shared memory file, closed with the last reference."""

    kind = KIND
    can_map = True
    owner: str = ""

    def __init__(self, name: str, key: str, offset: int, byte_size: int, file: int) -> None:
        """`file` is a descriptor, which the region closes when it is garbage collected."""
        self.name = name
        self.key = key
        """The file's key, as the client gave it."""
        self.offset = offset
        self.byte_size = byte_size
        self._file = file
        self._mapped: Octets | None = None
        weakref.finalize(self, os.close, file).atexit = False

    def check(self, offset: int, size: int) -> None:
        """Raise InvalidRegion if the range exceeds the region."""
        if offset + size > self.byte_size:
            check_within(self.name, self.byte_size, offset, size)

    def read(self, offset: int, memory: Octets) -> None:
        """Copy bytes at an offset to `memory`; raises InvalidRegion if the file was truncated."""
        view, done = memory.data, 0
        while done < len(view):
            count = os.preadv(self._file, [view[done:]], self.offset + offset + done)
            if not count:
                raise self._truncated(offset, len(view))
            done += count

    def view(self, offset: int, size: int) -> Octets:
        """Return a read-only view of the mapped file.

        Raises InvalidRegion if the file has been truncated. If it is truncated later, reading the
        view kills the process (SIGBUS).
        """
        if os.fstat(self._file).st_size < self.offset + offset + size:
            raise self._truncated(offset, size)
        if self._mapped is None:
            whole = self.offset + self.byte_size
            pages = mmap.mmap(self._file, whole, access=mmap.ACCESS_READ)
            self._mapped = np.frombuffer(pages, np.uint8)[self.offset :]
        return self._mapped[offset : offset + size]

    def write(self, offset: int, parts: Iterable[Buffer]) -> None:
        """Write bytes at an offset; raises InvalidRegion if the file was truncated."""
        views = [memoryview(part).cast("B") for part in parts if len(part)]
        size = sum(map(len, views))
        self.check(offset, size)
        # Writing beyond the end would extend the file.
        if os.fstat(self._file).st_size < self.offset + offset + size:
            raise self._truncated(offset, size)
        at = self.offset + offset
        while views:
            try:
                count = os.pwritev(self._file, views[:_MOST_BUFFERS], at)
            except OSError as error:
                raise InvalidRegion(
                    self.name, f"memory for {size} bytes at {offset}", str(error.strerror)
                ) from None
            at += count
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if count:
                views[0] = views[0][count:]

    def shares_memory_with(self, array: Tensor) -> bool:
        """Tell whether an array may be a view of this region."""
        return self._mapped is not None and bool(np.may_share_memory(self._mapped, array))

    def _truncated(self, offset: int, size: int) -> InvalidRegion:
        there = max(0, os.fstat(self._file).st_size - self.offset - offset)
        return InvalidRegion(
            self.name,
            f"{size} bytes at {offset}",
            f"a file with {there} bytes, truncated after registration",
        )


class Regions:
    """The registered regions by name. Belongs to the event loop."""

    def __init__(
        self,
        policy: SharedMemoryPolicy | None = None,
        plane: ControlPlane | None = None,
        sees: Callable[[Call, Operation], Sees] = lambda call, operation: everything,
    ) -> None:
        """`sees` returns the models on which a call's client may perform an operation."""
        self._sees = sees
        self.policy = policy or SharedMemoryPolicy()
        self._plane = plane or OneProcess()
        self._plane.handle(ChangeKind.REGISTER, self._register_change)
        self._plane.handle(ChangeKind.UNREGISTER, self._unregister_change)
        self.driver: Any = None
        """The CUDA driver (a `cuda_regions.Driver`); None if JAX does not run on CUDA."""
        self._regions: dict[str, SharedRegion] = {}
        self._leaving: weakref.WeakSet[SharedRegion] = weakref.WeakSet()
        """Unregistered regions that calls in progress keep alive. As in Triton, they stay in the
        status, so that clients see when their memory is free, and requests may still name them.
        """
        self.known: BoundedCache[Form, Any] = BoundedCache(MOST_KNOWN)
        """Cached tensor locations (`KnownPlaces`) by request form; cleared whenever regions
        change.
        """

    @property
    def is_on(self) -> bool:
        """Tell whether any client may register a region."""
        return self.policy.clients is not SharedMemoryClients.NONE

    async def register_everywhere(
        self, peer: Peer, name: str, key: str, offset: int, byte_size: int
    ) -> None:
        """Register a region in every process of the server."""

        async def here() -> None:
            self.register(peer, name, key, offset, byte_size)

        arguments = {"key": key, "offset": offset, "byte_size": byte_size, "owner": owner_now()}
        await self._plane.apply(Change(ChangeKind.REGISTER, name, arguments), here)

    async def unregister_everywhere(self, peer: Peer, name: str = "") -> None:
        """Unregister a region, or all, in every process of the server."""

        async def here() -> None:
            self.unregister(peer, name)

        await self._plane.apply(Change(ChangeKind.UNREGISTER, name), here)

    async def _register_change(self, change: Change) -> None:
        arguments = dict(change.arguments)
        owner = arguments.pop("owner")
        self.register(_THE_SERVER, change.subject, **arguments)
        self._regions[change.subject].owner = owner

    async def _unregister_change(self, change: Change) -> None:
        self.unregister(_THE_SERVER, change.subject)

    def register(self, peer: Peer, name: str, key: str, offset: int, byte_size: int) -> None:
        """Open the file with a key, and register a part of it (shared memory extension).

        Raises RegionExists, InvalidRegion if the file cannot be opened or is too short,
        TooManyRegions, NotLocal or SwitchedOff.
        """
        self.admit(peer, name, offset=offset, byte_size=byte_size)
        self.keep(_opened(self.policy.directory, name, key, offset, byte_size), name)

    @property
    def extensions(self) -> tuple[str, ...]:
        """Return the available protocol extensions, which depend on the device."""
        return () if self.driver is None or not self.is_on else ("cuda_shared_memory",)

    def admit(self, peer: Peer, name: str, *, byte_size: int, offset: int = 0) -> None:
        """Check that a region may be registered, before opening it; raises like `register`."""
        require_all_seen()
        self._permit(peer)
        if not name:
            raise InvalidRegion(name, "a name", "none")
        if name in self._regions:
            raise RegionExists(shown(name))
        for what, count in (("offset", offset), ("byte_size", byte_size)):
            if not 0 <= count <= _LARGEST:
                raise InvalidRegion(shown(name), f"a {what} of 0 to {_LARGEST}", str(count)[:32])
        if not byte_size:
            raise InvalidRegion(shown(name), "a byte_size of 1 or more", "0")
        most = self.policy.max_regions
        if len(self._regions) + len(self._leaving) >= most:
            raise TooManyRegions(most, "regions", "max_shared_memory_regions")

    def keep(self, region: SharedRegion, name: str) -> None:
        """Register an open region under a name; raises TooManyRegions."""
        most = self.policy.max_bytes
        if sum(r.byte_size for r in self._all()) + region.byte_size > most:
            raise TooManyRegions(most, "bytes", "max_shared_memory_bytes")
        region.owner = owner_now()
        self.known.clear()
        self._regions[name] = region

    def status(self, name: str = "") -> list[Region]:
        """Return the region with a name, or all if the name is empty; raises RegionNotFound."""
        return [r for r in self.of_kind(KIND, name) if isinstance(r, Region)]

    def of_kind(self, kind: str, name: str = "") -> list[SharedRegion]:
        """Return the visible regions of a kind: the one with a name, or all if the name is empty.

        Raises RegionNotFound if there is none with the name.
        """
        call = current_call.get()
        found = [
            region
            for known, region in self._by_name().items()
            if region.kind == kind and name in ("", known) and self._may_use(call, region)
        ]
        if name and not found:
            raise RegionNotFound(kind, shown(name))
        return found

    def count(self, kind: str) -> int:
        """Return the number of regions of a kind, over all callers."""
        return sum(region.kind == kind for region in self._all())

    def unregister(self, peer: Peer, name: str = "") -> None:
        """Unregister the region with a name, or all; unknown names are ignored.

        Requests in progress continue to use it; after the last of them it leaves the status, and
        its file is closed. Meanwhile a new region may have its name.
        """
        self.drop(peer, KIND, name)

    def drop(self, peer: Peer, kind: str, name: str = "") -> None:
        """Unregister regions of a kind: the one with a name, or all if the name is empty."""
        require_all_seen()
        if not self._regions:
            return
        self._permit(peer)
        self.known.clear()
        for known, region in list(self._regions.items()):
            if region.kind == kind and name in ("", known):
                self._leaving.add(self._regions.pop(known))

    def find(self, peer: Peer, name: str, call: Call | None = None) -> SharedRegion:
        """Return the region that a request names.

        Raises InvalidRegion if there is none, or if it belongs to another caller: clients may not
        access each other's memory, even if they share a model.
        """
        self._permit(peer, call)
        region = self._regions.get(name) or self._by_name().get(name)
        if region is None or not self._may_use(call, region):
            raise InvalidRegion(shown(name), "a registered region", "none with this name")
        return region

    def may_use_again(self, call: Call, regions: Iterable[SharedRegion]) -> bool:
        """Quickly tell whether `find` would return these registered regions for a call.

        False if it might raise or needs the general path.
        """
        clients = self.policy.clients
        if clients is SharedMemoryClients.NONE:
            return False
        if clients is SharedMemoryClients.LOCAL and not _is_local(call.peer, call):
            return False
        # A list comprehension: a generator would cost a call for each region.
        return not [one for one in regions if one.owner and one.owner != call.owner]

    def are_registered(self, regions: Iterable[SharedRegion]) -> bool:
        """Tell whether none of these regions has been unregistered."""
        return not any(region in self._leaving for region in regions)

    def _all(self) -> list[SharedRegion]:
        return [*self._leaving, *self._regions.values()]

    def _by_name(self) -> dict[str, SharedRegion]:
        """Return the region of each name; registered regions take precedence."""
        return {region.name: region for region in self._leaving} | self._regions

    def _may_use(self, call: Call | None, region: SharedRegion) -> bool:
        """Tell whether the caller owns the region or manages the whole server."""
        if not region.owner or call is None or call.owner == region.owner:
            return True
        return self._sees(call.root, Operation.MANAGE) is everything

    def close(self) -> None:
        """Drop all regions at shutdown."""
        self.known.clear()
        self._leaving.clear()
        self._regions.clear()

    def _permit(self, peer: Peer, call: Call | None = None) -> None:
        """Raise NotLocal or SwitchedOff if the peer may not use shared memory."""
        if self.policy.clients is SharedMemoryClients.NONE:
            raise SwitchedOff("shared memory", "shared_memory")
        if self.policy.clients is SharedMemoryClients.LOCAL and not _is_local(
            peer, call or current_call.get()
        ):
            raise NotLocal("shared memory", peer.address, "shared_memory")


def check_within(name: str, byte_size: int, offset: int, size: int) -> None:
    """Raise InvalidRegion if the range exceeds the region."""
    if offset + size > byte_size:
        expected = f"offset and size within its {byte_size} bytes"
        raise InvalidRegion(name, expected, f"{size} bytes at {offset}")


def shown(name: str) -> str:
    """Return the part of a name that is shown in errors."""
    return name[:_SHOWN_CHARACTERS]


def _is_local(peer: Peer, call: Call | None) -> bool:
    """Tell whether a client is on this machine, and not behind a proxy."""
    if not peer.listener:
        return True  # a call from inside the process
    if peer.proxy or (call is not None and came_through_a_proxy(call.root.headers)):
        return False
    if peer.address == UNIX:
        return True
    if peer.address.startswith(_LOOPBACK):
        return True  # fast path: parsing an address is slow
    host = peer.address.rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _opened(directory: Path, name: str, key: str, offset: int, byte_size: int) -> Region:
    name_shown = shown(name)
    path = directory / _file_name(name_shown, key)
    try:
        file = os.open(path, _FLAGS)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidRegion(
            name_shown,
            "the key of shared memory that the server can open",
            f"{_shown(key)}: {reason}",
        ) from None
    region = Region(name, key, offset, byte_size, file)
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode):
        raise InvalidRegion(
            name_shown, "the key of shared memory", f"{_shown(key)}, which is not shared memory"
        )
    if found.st_uid != os.geteuid():
        raise InvalidRegion(
            name_shown, "shared memory owned by the server's user", f"{_shown(key)} of another user"
        )
    if offset + byte_size > found.st_size:
        raise InvalidRegion(
            name_shown,
            f"shared memory with {byte_size} bytes at {offset}",
            f"{_shown(key)} of {found.st_size} bytes",
        )
    return region


def _file_name(region: str, key: str) -> str:
    """Return the file name for a key; only a single leading slash is allowed."""
    name = key.removeprefix("/")
    is_wrong = not name or "/" in name or "\0" in name or name in (".", "..")
    try:
        is_wrong = is_wrong or len(os.fsencode(name)) > _LONGEST_NAME
    except UnicodeEncodeError:
        is_wrong = True
    if is_wrong or name.startswith(_SEMAPHORE):
        raise InvalidRegion(
            region, "a shared memory key without slashes except a leading one", _shown(key)
        )
    return name


def _shown(key: str) -> str:
    return repr(key[:_SHOWN_CHARACTERS])
