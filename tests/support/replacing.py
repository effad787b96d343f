"""Servers that are replaced by others (SIGUSR2), which have their log."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from support.process import ServerProcess

MOST_SECONDS = 120


@asynccontextmanager
async def ending(server: ServerProcess) -> AsyncIterator[None]:
    """End what has replaced a server, behind a block."""
    try:
        yield
    finally:
        for record in server.log:
            if record.get("event") == "replacement started":
                with suppress(ProcessLookupError):
                    os.kill(record["pid"], signal.SIGKILL)
        if server.process.returncode is not None:
            # All of them write to one log: it ends with the last one.
            await server.process.communicate()


def records(server: ServerProcess, event: str) -> list[dict[str, Any]]:
    """Return what the log has of an event by now."""
    return [record for record in server.log if record.get("event") == event]


async def replace(server: ServerProcess, process: int) -> int:
    """Replace a server by its process id; return that of the new one, once the old one is gone."""
    known = len(records(server, "server replaced"))
    os.kill(process, signal.SIGUSR2)
    while len(records(server, "server replaced")) == known:
        assert await server.read(), server.log
        assert [] == records(server, "server not replaced")
    new = records(server, "server replaced")[-1]["by"]
    await is_over(process)
    return int(new)


async def is_over(process: int) -> None:
    """Return once a process has ended, though nobody has waited for it."""
    state = Path(f"/proc/{process}/stat")
    while state.exists() and ") Z " not in state.read_text():
        await asyncio.sleep(0.01)
