"""A spare process that has already imported JAX replaces an engine that dies."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, MutableMapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from support.conditions import until

from xlaserve.process.silence import is_stopped
from xlaserve.process.systemd import Systemd
from xlaserve.settings import Settings
from xlaserve.workers import worker_process
from xlaserve.workers.messages import Part
from xlaserve.workers.parent import Supervisor
from xlaserve.workers.shares import encoded
from xlaserve.workers.worker_process import Role, WorkerProcess

FAKE = """
import json, os, socket, struct, sys

end = socket.socket(fileno=int(sys.argv[1]))

def read(count):
    data = b""
    while len(data) < count:
        more = end.recv(count - len(data))
        if not more:
            os._exit(1)
        data += more
    return data

while True:
    message = json.loads(read(struct.unpack("<I", read(4))[0]))
    said = {"Begin": ('{"type": "Listening"}', '{"type": "Here", "is_ready": true}',
                      '{"type": "Ready"}'), "Ping": ('{"type": "Alive"}',)}
    if message["type"] == "Question":
        said["Question"] = (json.dumps({"type": "Reply", "number": message["number"], "said": []}),)
    for text in said.get(message["type"], ()):
        end.sendall(struct.pack("<I", len(text)) + text.encode())
    if message["type"] == "Stop":
        os._exit(0)
"""
"""A worker that is ready as soon as it is assigned a role."""

ROLES: Mapping[str, Any] = {"processes": 2, "process_roles": "front-ends"}


@dataclass
class Running:
    """A parent with idle workers, and its log."""

    log: list[MutableMapping[str, Any]]

    def pids(self, event: str, **said: object) -> list[int]:
        """Return the process ids in all records of an event."""
        return [
            one["pid"] for one in self.log if one["event"] == event and said.items() <= one.items()
        ]

    def has(self, *, engines: int = 0, spares: int = 0) -> bool:
        """Tell whether this many processes were started."""
        return len(self.engines) >= engines and len(self.spares) >= spares

    @property
    def engines(self) -> list[int]:
        """Return the processes that became the engine, in order."""
        return self.pids("worker started", worker=0)

    @property
    def spares(self) -> list[int]:
        """Return the processes started as spares."""
        return self.pids("spare engine started")


@asynccontextmanager
async def running(folder: Path, **given: Any) -> AsyncIterator[Running]:
    """Run a parent with a ready engine and a ready front end for the length of a block."""
    settings = Settings.read({}, model_repository=(str(folder),), **{**ROLES, **given})
    with capture_logs() as log:
        serving = asyncio.ensure_future(Supervisor(settings, [], Systemd()).serve())
        try:
            await until(lambda: any(one["event"] == "workers ready" for one in log))
            yield Running(log)
        finally:
            serving.cancel()
            with suppress(asyncio.CancelledError):
                await serving


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "COMMAND", (sys.executable, "-S", "-c", FAKE))


def is_there(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


@pytest.mark.usefixtures("fakes")
async def test_the_spare_is_the_next_engine_and_has_a_successor(tmp_path: Path) -> None:
    async with running(tmp_path) as found:
        for turn in (1, 2):
            await until(partial(found.has, spares=turn))
            os.kill(found.engines[-1], signal.SIGKILL)
            await until(partial(found.has, engines=turn + 1))
        await until(lambda: len(found.spares) == 3)
        engines, spares = found.engines, found.spares

    assert engines[1:] == spares[:2]
    assert [] == [pid for pid in (*engines, *spares) if is_there(pid)]


async def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: is_stopped(pid))


async def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    await until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z")


HARMS: Mapping[str, Callable[[int], Any]] = {"stopped": stop, "killed": kill}


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("harm", HARMS)
async def test_a_spare_that_somebody_ended_is_not_waited_for(harm: str, tmp_path: Path) -> None:
    """A new engine process is started instead, and then another spare."""
    async with running(tmp_path) as found:
        await until(lambda: len(found.spares) == 1)
        spare = found.spares[0]
        await HARMS[harm](spare)
        os.kill(found.engines[0], signal.SIGKILL)
        await until(lambda: len(found.spares) == 2)
        engines = found.engines

    assert 2 == len(engines)
    assert spare not in engines
    assert not is_there(spare)


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize(
    "given", [{"spare_engine": False}, {"process_roles": "workers"}], ids=["off", "workers"]
)
async def test_there_is_none_where_none_is_wanted(given: Any, tmp_path: Path) -> None:
    """Equal workers answer for one another; only a lost engine makes all clients wait."""
    async with running(tmp_path, **given) as found:
        os.kill(found.engines[0], signal.SIGKILL)
        await until(lambda: len(found.engines) == 2)
        spares = found.spares

    assert [] == spares


async def test_it_has_imported_jax_before_it_is_told_who_it_is(tmp_path: Path) -> None:
    settings = Settings.read({}, model_repository=(str(tmp_path),), **ROLES)
    spare = await WorkerProcess.ahead(Role(0, encoded(settings), [], 60.0, part=Part.ENGINE))
    try:
        maps = Path(f"/proc/{spare.process.pid}/maps")
        await until(lambda: "jaxlib" in maps.read_text())
        may_begin = spare.may_begin
    finally:
        spare.kill()
        await spare.ended()

    assert may_begin
    assert not spare.may_begin
