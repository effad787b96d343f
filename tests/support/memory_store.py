"""An in-memory object store that counts bytes read and can be made to fail."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from xlaserve.storage.objects import ObjectChanged, RemoteObject, StoreProblem


@dataclass
class MemoryStore:
    """Objects by name; changing the content makes it another object."""

    contents: dict[str, bytes] = field(default_factory=dict)
    read_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes read, by object name."""
    on_read: Callable[[RemoteObject], None] = lambda found: None
    """Called before each piece, on the reading thread."""
    is_away: bool = False
    piece_bytes: int = 1 << 20
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def objects(self, below: str = "") -> list[RemoteObject]:
        """Return all objects whose name starts with `below`."""
        if self.is_away:
            raise StoreProblem("the store is away")
        return [
            RemoteObject(name, len(content), str(hash(content)))
            for name, content in self.contents.items()
            if name.startswith(below)
        ]

    def look(self) -> None:
        """Raise StoreProblem if the store is unavailable."""
        if self.is_away:
            raise StoreProblem("the store is away")

    def find(self, name: str) -> RemoteObject | None:
        """Return the object with this name, or None."""
        return next((one for one in self.objects(name) if one.name == name), None)

    def read(self, found: RemoteObject, start: int, stop: int) -> Iterator[bytes]:
        """Yield a byte range in pieces."""
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
        """Raise ObjectChanged if the object has changed."""
        if str(hash(self.contents.get(found.name))) != found.mark:
            raise ObjectChanged(found.name)

    def failed(self, problem: StoreProblem) -> None:
        """Do nothing: the store tracks no problems."""
