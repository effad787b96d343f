"""The shared memory extension over REST, as a client asks for it."""

from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote

from xlaserve.dialing.interface import Json

_MEMORY = "/v2/systemsharedmemory"


class RestMemory:
    """Has a server know shared memory of this machine (system shared memory extension)."""

    def __init__(self, read: Callable[[str, str, Json | None], Awaitable[Any]]) -> None:
        """`read` sends a method, a path and a body, and returns the JSON of the answer."""
        self._read = read

    async def register(self, name: str, key: str, size: int) -> None:
        """Have the server know shared memory by a name."""
        path = f"{_MEMORY}/region/{quote(name, safe='')}/register"
        await self._read("POST", path, {"key": key, "offset": 0, "byte_size": size})

    async def unregister(self, name: str) -> None:
        """Have the server forget it; one that it does not know is no error."""
        await self._read("POST", f"{_MEMORY}/region/{quote(name, safe='')}/unregister", {})

    async def knows(self, name: str) -> bool:
        """Tell whether the server knows shared memory of a name."""
        rows = await self._read("GET", f"{_MEMORY}/status", None)
        return any(isinstance(row, dict) and row.get("name") == name for row in rows)
