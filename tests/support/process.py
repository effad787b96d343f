"""The server as a process of its own, started the way an operator starts it."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Of a machine that does other things too: what hangs is ended later by the limit of each test.
START_SECONDS = 240
STOP_SECONDS = 120
ENVIRONMENT = {
    "XLASERVE_LOG_LEVEL": "info",
    # What a test measures must not depend on the tests before it.
    "XLASERVE_COMPILATION_CACHE_DIRECTORY": "none",
    "XLASERVE_COMPILE_PROCESSES": "0",
}


ONLY_IDENTITY = ("--model-control-mode", "explicit", "--load-model", "identity")
"""Flags for tests that ask no other example: those take four seconds of a core to compile."""


@dataclass
class ServerProcess:
    """A running `xlaserve serve`."""

    process: asyncio.subprocess.Process
    log: list[dict[str, Any]]
    plain: list[bytes] = field(default_factory=list)
    """Lines that are no records: the server prints none once it has read its settings."""

    def event(self, name: str) -> dict[str, Any]:
        """Return the log record of an event that has happened."""
        return next(record for record in self.log if record.get("event") == name)

    @property
    def url(self) -> str:
        """Where gRPC is served."""
        return str(self.event("listening")["grpc"])

    @property
    def http(self) -> str:
        """Where HTTP is served."""
        return str(self.event("listening")["http"])

    async def until(self, event: str) -> None:
        """Read the log until an event has happened."""
        while not any(record.get("event") == event for record in self.log):
            assert await self.read(), f"the server ended before it was {event}: {self.log}"

    async def read(self) -> bool:
        """Read a line of the log; tell whether there was one."""
        assert self.process.stderr is not None
        line = await self.process.stderr.readline()
        self._note(line)
        return bool(line)

    def _note(self, line: bytes) -> None:
        try:
            self.log.append(json.loads(line))
        except ValueError:
            self.plain += [line] if line.strip() else []

    async def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit status; the log is whole then."""
        self.process.send_signal(number)
        return await self.ended()

    async def ended(self) -> int:
        """Return the exit status once the server has ended; the log is whole then."""
        async with asyncio.timeout(STOP_SECONDS):
            # asyncio hears of the end of a process once its pipes were read to their end.
            _, rest = await self.process.communicate()
        for line in rest.splitlines():
            self._note(line)
        assert self.process.returncode is not None
        return self.process.returncode


def command(*arguments: str) -> Sequence[str]:
    """Return the command line of xlaserve in this interpreter."""
    return (sys.executable, "-m", "xlaserve.cli", *arguments)


@asynccontextmanager
async def served(
    repository: Path | str,
    *flags: str,
    programs: str = "",
    until: str = "started",
    group: str = "",
    **variables: str,
) -> AsyncIterator[ServerProcess]:
    """Run `xlaserve serve` on a free port, with its models loaded, for the length of a block.

    Or from another event of its log on, such as `listening`.

    Where a directory of programs is given, what it compiles is kept there. `variables` are of its
    environment. With `group="new"` it leads a process group, which can be sent signals.
    """
    kept = ("--compilation-cache-directory", programs) if programs else ()
    process = await asyncio.create_subprocess_exec(
        *command(
            "serve", str(repository), "--grpc-endpoint", "port:0", "--http-endpoint", "port:0"
        ),
        *flags,
        *kept,
        "--device",
        "cpu",
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | ENVIRONMENT | variables,
        process_group=0 if group else None,
    )
    server = ServerProcess(process, [])
    try:
        async with asyncio.timeout(START_SECONDS):
            await server.until(until)
        yield server
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def run(*arguments: str) -> tuple[int, str, str]:
    """Run a program to its end; return exit status, stdout and stderr."""
    code, out, err = await run_bytes(*arguments)
    return code, out.decode(), err.decode()


async def run_bytes(*arguments: str) -> tuple[int, bytes, bytes]:
    """Run a program to its end; return exit status, stdout and stderr as they are."""
    process = await asyncio.create_subprocess_exec(
        *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(START_SECONDS):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode is not None
    return process.returncode, out, err
