"""A store in memory, which counts what is read of it and fails when it is told to."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from xlaserve.storage.objects import ObjectChanged, RemoteObject, StoreProblem


@dataclass
class MemoryStore:
    """Objects by name; another content is another object."""

    contents: dict[str, bytes] = field(default_factory=dict)
    read_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes that were read, by name."""
    on_read: Callable[[RemoteObject], None] = lambda found: None
    """Called before each piece, in the thread that reads."""
    is_away: bool = False
    piece_bytes: int = 1 << 20
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def objects(self, below: str = "") -> list[RemoteObject]:
        """Return all objects below a name."""
        if self.is_away:
            raise StoreProblem("the store is away")
        return [
            RemoteObject(name, len(content), str(hash(content)))
            for name, content in self.contents.items()
            if name.startswith(below)
        ]

    def look(self) -> None:
        """Say whether it is there."""
        if self.is_away:
            raise StoreProblem("the store is away")

    def find(self, name: str) -> RemoteObject | None:
        """Return an object, None where there is none of this name."""
        return next((one for one in self.objects(name) if one.name == name), None)

    def read(self, found: RemoteObject, start: int, stop: int) -> Iterator[bytes]:
        """Yield a part in pieces."""
        while start < stop:
            self.on_read(found)
            if self.is_away:
                raise StoreProblem("the store is away")
            end = min(start + self.piece_bytes, stop)
            piece = self.contents[found.name][start:end]
            with self._lock:
                self.read_bytes[found.name] = self.read_bytes.get(found.name, 0) + len(piece)
            yield piece
            start = end

    def confirm(self, found: RemoteObject) -> None:
        """Compare with what is there now."""
        if str(hash(self.contents.get(found.name))) != found.mark:
            raise ObjectChanged(found.name)
