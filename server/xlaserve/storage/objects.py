"""Objects in a store: names, sizes, and marks that change with the contents."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from xlaserve.errors import InvalidModel

_MAX_NAME_BYTES = 1024
_MAX_PART_BYTES = 255
"""Maximum length of a file name in bytes, on common file systems."""


class StoreProblem(OSError):
    """Reading from a store failed. The text omits SDK messages, which may contain secrets."""

    def __init__(
        self, reason: str, *, is_transient: bool = True, is_away: bool | None = None
    ) -> None:
        super().__init__(reason)
        self.is_transient = is_transient
        """Whether the same request may succeed later."""
        self.is_away = is_transient if is_away is None else is_away
        """Whether the store itself failed, rather than one object."""


class ObjectMissing(StoreProblem):
    """A missing object or bucket."""

    def __init__(self, reason: str = "it does not exist") -> None:
        super().__init__(reason, is_transient=False)


class ObjectChanged(StoreProblem):
    """An object has changed since it was listed."""

    def __init__(self, name: str) -> None:
        super().__init__(f"'{name}' changed while it was fetched", is_transient=False)


class RangeIgnored(Exception):
    """The server ignored a range request and sends the object from its start."""


class FetchCancelled(Exception):
    """The fetch was cancelled."""


@dataclass(frozen=True, slots=True)
class Checksum:
    """A checksum provided by the store."""

    algorithm: str
    """The algorithm's name in hashlib."""
    value: str
    """Lower-case hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class RemoteObject:
    """An object in a store."""

    name: str
    """Name relative to the store's root, with `/` separators."""
    size_bytes: int
    mark: str
    """ETag, generation or modification time; it differs if the object has changed."""
    checksum: Checksum | None = None


def ended_early(found: RemoteObject, position: int) -> StoreProblem:
    """Return the error for an object that is shorter than the size that the store listed."""
    return StoreProblem(f"'{found.name}' ended at byte {position} of {found.size_bytes}")


class Store(Protocol):
    """A read-only store of objects. Methods block, and raise StoreProblem."""

    def objects(self, below: str = "") -> list[RemoteObject]:
        """Return all objects below a prefix, up to the limit on their number."""
        ...

    def read(self, found: RemoteObject, start: int, stop: int) -> Iterator[bytes]:
        """Yield the bytes from `start` up to, but not including, `stop`.

        Raises ObjectChanged if the object has changed since it was listed, and RangeIgnored if the
        server can only send it from its start.
        """
        ...

    def confirm(self, found: RemoteObject) -> None:
        """Check that an object is unchanged since it was listed; raises ObjectChanged."""
        ...

    def failed(self, problem: StoreProblem) -> None:
        """Record why a load or a listing failed, though others of its requests succeeded later."""
        ...


class ObjectStore(Store, Protocol):
    """A store whose objects can be read by name, without a listing."""

    def look(self) -> None:
        """Test the store with one cheap request, and record the result in its attempts."""
        ...

    def find(self, name: str) -> RemoteObject | None:
        """Return an object, or None if it is missing."""
        ...


@runtime_checkable
class WritableStore(ObjectStore, Protocol):
    """A store that objects can also be written to."""

    def write(self, name: str, data: bytes) -> None:
        """Write an object as a whole, replacing an existing one."""
        ...


Read = Callable[[RemoteObject, int, int], Iterator[bytes]]


def check_names(objects: Iterable[RemoteObject]) -> None:
    """Raise InvalidModel unless all names can be files below one directory.

    Stores accept any name. A model is refused if a name leads outside of its directory, is
    ambiguous on a file system, or is both a file and a directory.
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
