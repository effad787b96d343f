"""Objects of a store: names, sizes, and marks that reveal changes."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from xlaserve.errors import InvalidModel

_MAX_NAME_BYTES = 1024
_MAX_PART_BYTES = 255
"""The longest name that file systems take."""


class StoreProblem(OSError):
    """A store cannot be read. The text omits SDK messages, which may contain secrets."""

    def __init__(
        self, reason: str, *, is_transient: bool = True, is_away: bool | None = None
    ) -> None:
        super().__init__(reason)
        self.is_transient = is_transient
        """Whether the same request may succeed a moment later."""
        self.is_away = is_transient if is_away is None else is_away
        """Whether the store failed, rather than its contents."""


class ObjectMissing(StoreProblem):
    """A missing object or bucket."""

    def __init__(self, reason: str = "it does not exist") -> None:
        super().__init__(reason, is_transient=False)


class ObjectChanged(StoreProblem):
    """An object has changed since it was listed."""

    def __init__(self, name: str) -> None:
        super().__init__(f"'{name}' changed while it was fetched", is_transient=False)


class RangeIgnored(Exception):
    """A server sends an object from its beginning, and not from where it was asked to."""


class FetchCancelled(Exception):
    """The fetch was abandoned."""


@dataclass(frozen=True, slots=True)
class Checksum:
    """A checksum as a store gives it."""

    algorithm: str
    """Name for hashlib."""
    value: str
    """Value in lower-case hexadecimal."""


@dataclass(frozen=True, slots=True)
class RemoteObject:
    """One object of a store."""

    name: str
    """Relative to the root of the store, with `/` between its parts."""
    size_bytes: int
    mark: str
    """An ETag, a generation or a time: another one means that the object was changed."""
    checksum: Checksum | None = None


class Store(Protocol):
    """A place that objects are read from. Its methods block, and raise StoreProblem."""

    def objects(self, below: str = "") -> list[RemoteObject]:
        """Return all objects below a name, at most as many as the store may have."""
        ...

    def read(self, found: RemoteObject, start: int, stop: int) -> Iterator[bytes]:
        """Yield the bytes from `start` up to `stop`, and never more.

        Raises ObjectChanged for an object that is not the one that was listed, and RangeIgnored
        where it can only be had from its beginning.
        """
        ...

    def confirm(self, found: RemoteObject) -> None:
        """Check that an object is unchanged since it was listed; raises ObjectChanged."""
        ...


class ObjectStore(Store, Protocol):
    """A store of objects that are asked for by their names, and are never listed."""

    def look(self) -> None:
        """Probe the store once, cheaply, and record the result in its attempts."""
        ...

    def find(self, name: str) -> RemoteObject | None:
        """Return an object, or None if it is missing."""
        ...


@runtime_checkable
class WritableStore(ObjectStore, Protocol):
    """A store that objects are written to as well."""

    def write(self, name: str, data: bytes) -> None:
        """Put an object whole, in place of one of this name."""
        ...


Read = Callable[[RemoteObject, int, int], Iterator[bytes]]


def check_names(objects: Iterable[RemoteObject]) -> None:
    """Raise InvalidModel unless all of them can be files of one directory, and nothing else.

    A store takes every name. One that leads elsewhere, that a file system would take for another
    one, or that is a file and a directory at once, is refused with its model.
    """
    folded: dict[str, str] = {}
    files: set[str] = set()
    for found in objects:
        _check_name(found.name)
        parts = found.name.split("/")
        for depth in range(1, len(parts) + 1):
            path = "/".join(parts[:depth])
            before = folded.setdefault(path.casefold(), path)
            if before != path:
                raise InvalidModel(f"its objects {before!r} and {path!r} differ only in case")
        files.add(found.name)
    for name in files:
        parts = name.split("/")
        for depth in range(1, len(parts)):
            if "/".join(parts[:depth]) in files:
                raise InvalidModel(f"its object {name!r} is nested below another object")


def _check_name(name: str) -> None:
    reason = _fault_of(name)
    if reason:
        raise InvalidModel(f"its object {name[:200]!r} {reason}")


def _fault_of(name: str) -> str:
    if name.startswith("/"):
        return "has an absolute name"
    if "\\" in name:
        return "has a backslash in its name"
    if not name.isprintable():
        return "has an unprintable name"
    if any(part in ("", ".", "..") for part in name.split("/")):
        return "has an empty name, '.' or '..' in its path"
    parts = name.split("/")
    if len(name.encode()) > _MAX_NAME_BYTES or any(
        len(part.encode()) > _MAX_PART_BYTES for part in parts
    ):
        return "has a name too long for a file"
    return ""
