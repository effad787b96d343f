"""Servers that are replaced by new processes (SIGUSR2) sharing the log."""

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
    """Kill the replacements of a server at the end of a block."""
    try:
        yield
    finally:
        for record in server.log:
            if record.get("event") == "replacement started":
                with suppress(ProcessLookupError):
                    os.kill(record["pid"], signal.SIGKILL)
        if server.process.returncode is not None:
            # All of them write to one pipe, which closes with the last one.
            await server.process.communicate()


def records(server: ServerProcess, event: str) -> list[dict[str, Any]]:
    """Return the log records of an event so far."""
    return [record for record in server.log if record.get("event") == event]


async def replace(server: ServerProcess, process: int) -> int:
    """Replace the process of a server; return the new process id once the old one has exited."""
    known = len(records(server, "server replaced"))
    os.kill(process, signal.SIGUSR2)
    while len(records(server, "server replaced")) == known:
        assert await server.read(), server.log
        assert [] == records(server, "server not replaced")
    new = records(server, "server replaced")[-1]["by"]
    await is_over(process)
    return int(new)


async def is_over(process: int) -> None:
    """Wait until a process has exited, even if nobody has reaped it."""
    state = Path(f"/proc/{process}/stat")
    while state.exists() and ") Z " not in state.read_text():
        await asyncio.sleep(0.01)
