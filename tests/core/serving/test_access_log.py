"""The access log: which calls it has, what a line may hold, and that nobody waits for it."""

import asyncio
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from support.calls import NotedCall

from xlaserve.core.serving.access_file import AccessFile
from xlaserve.core.serving.access_log import MAX_RECORD_BYTES, AccessLog, Sampling
from xlaserve.core.serving.call import Call, Operation, Peer
from xlaserve.core.serving.gates import Gates
from xlaserve.core.serving.infer_call import InferCall
from xlaserve.core.serving.principal import Principal
from xlaserve.errors import InvalidSettings, Unsupported
from xlaserve.transport.status import told_status

SECOND = 1_000_000_000
HOSTILE = {
    "crlf": "a\r\nb",
    "escape": "\x1b[2J\x1b]0;x\x07",
    "nul": "\0\0",
    "c1": "\x9b31m",
    "delete": "\x7f\x7f",
    "separators": "\u2028\u2029\x85",
    "bidi": "\u202eabc",
    "surrogate": "\udcff\ud800",
    "quotes": '"},{"status":"OK',
    "mebibyte": "x" * (1 << 20),
    "mebibyte of astral": "\U0001f600" * (1 << 20),
    "mebibyte of controls": "\x01" * (1 << 20),
}


async def in_thread(work: Callable[[], bool]) -> bool:
    return await asyncio.to_thread(work)


class World:
    """An access log of a gate, in a file, with a clock that stands still."""

    def __init__(self, path: Path, *, max_pending: int = 100, **sampling: Any) -> None:
        self.path = path
        self.now = SECOND
        self.chances: Iterator[float] = iter(())
        self.file = AccessFile(str(path))
        self.log = AccessLog(
            self.file,
            told_status,
            Sampling(**sampling),
            max_pending,
            clock=lambda: self.now,
            now=lambda: 1_700_000_000_123_456_789,
            chance=lambda: next(self.chances),
        )
        self.gates = Gates(observers=[self.log])

    def admit(self, call: Call) -> Call:
        self.gates.admit(call)
        return call

    async def lines(self) -> list[dict[str, Any]]:
        await self.log.close(in_thread)
        return [json.loads(line) for line in self.path.read_bytes().splitlines()]


async def test_a_call_has_one_record(tmp_path: Path) -> None:
    world = World(tmp_path / "access")
    peer = Peer("http_endpoint", "10.0.0.7:51824")
    call = world.admit(
        NotedCall(
            operation=Operation.METADATA,
            model="m",
            version="3",
            peer=peer,
            principal=Principal("alice"),
        )
    )
    assert call.record is not None
    call.record.received(7)
    call.record.status = 404
    world.now += 2_000_000
    call.end()
    call.end()
    call.record.sent(9)

    (line,) = await world.lines()

    assert "2023-11-14T22:13:20.123456Z" == line.pop("time")
    assert line.pop("total_us") >= 2000
    assert {
        "operation": "metadata",
        "status": "404",
        "peer": "10.0.0.7:51824",
        "listener": "http_endpoint",
        "bytes_in": 7,
        "bytes_out": 9,
        "model": "m",
        "version": "3",
        "principal": "alice",
    } == line


async def test_failed_and_slow_calls_are_always_there(tmp_path: Path) -> None:
    world = World(tmp_path / "access", rate=0.5, slow_ns=SECOND)
    world.chances = iter([0.5, 0.4])
    for name in ("left out", "drawn", "failed", "slow", "refused"):
        call = world.admit(NotedCall(model=name))
        if name == "slow":
            world.now += SECOND
        if name == "refused":
            assert call.record is not None
            call.record.status = 400
        if name == "failed":
            call.fail(Unsupported("that"))
        else:
            call.end()

    lines = await world.lines()

    assert ["drawn", "failed", "slow", "refused"] == [line["model"] for line in lines]
    assert ["OK", "UNIMPLEMENTED"] == [line["status"] for line in lines[:2]]
    assert str(Unsupported("that")) in lines[1]["error"]


async def test_parts_of_a_call_have_no_record_of_their_own(tmp_path: Path) -> None:
    world = World(tmp_path / "access")
    whole = world.admit(NotedCall(model="ensemble"))
    world.admit(NotedCall(model="step", parent=whole)).end()
    whole.end()

    assert ["ensemble"] == [line["model"] for line in await world.lines()]


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
async def test_no_text_of_a_client_forges_a_record(tmp_path: Path, text: str) -> None:
    """A record is one line of printable ASCII of 8 KB at most, whatever is in it (S5)."""
    world = World(tmp_path / "access")
    call = InferCall()
    call.id = call.model = call.version = text
    call.principal = Principal(text)
    call.peer = Peer("grpc_endpoint", "127.0.0.1:1")
    world.admit(call)
    call.end(Unsupported(text))

    (line,) = await world.lines()
    data = world.path.read_bytes()

    assert b"\n" == data[-1:]
    assert all(0x20 <= byte < 0x7F for byte in data[:-1])
    assert len(data) <= MAX_RECORD_BYTES
    kept = 16
    assert text[:kept] == line["id"][:kept] == line["model"][:kept]


async def test_nobody_waits_for_a_file_that_takes_nothing(tmp_path: Path) -> None:
    """With a pipe that nobody reads calls end at once, and what has no room is counted."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while os.write(writer, b"x" * 4096):
            pass
    log = AccessLog(AccessFile(f"fd:{writer}"), told_status, Sampling(), 10)
    gates = Gates(observers=[log])
    try:
        with capture_logs() as logged:
            for _ in range(50):
                call = NotedCall()
                gates.admit(call)
                call.end()
            dropped = log.dropped
            left = threading.Thread(target=os.read, args=(reader, 1 << 20))
            left.start()
            await log.close(in_thread)
            left.join()
    finally:
        os.close(reader)
        os.close(writer)

    assert 40 == dropped
    (warning,) = [entry for entry in logged if entry["event"] == "access records were dropped"]
    assert warning["count"] >= 40


async def test_the_file_names_how_many_records_were_dropped(tmp_path: Path) -> None:
    world = World(tmp_path / "access", max_pending=3)
    for _ in range(5):
        world.admit(NotedCall()).end()

    lines = await world.lines()

    assert 2 == lines[0]["dropped"]
    assert 3 == len(lines[1:])


@pytest.mark.parametrize("way", ["asked for", "seen"])
async def test_a_file_that_was_rotated_is_opened_anew(tmp_path: Path, way: str) -> None:
    path = tmp_path / "access"
    times = iter([0.0, 5.0, 10.0])
    file = AccessFile(str(path), clock=lambda: next(times))
    assert file.write(b"first\n")
    path.rename(tmp_path / "rotated")
    if way == "asked for":
        file.reopen()
    else:
        file.look()
    assert file.write(b"second\n")
    file.close()

    assert b"first\n" == (tmp_path / "rotated").read_bytes()
    assert b"second\n" == path.read_bytes()


async def test_a_rotated_log_goes_on(tmp_path: Path) -> None:
    """`AccessLog.reopen` is what SIGHUP calls."""
    world = World(tmp_path / "access")
    before = world.admit(NotedCall(model="before"))
    before.end()
    assert before.record is not None
    before.record.sent(0)
    world.log._flush()
    world.path.rename(tmp_path / "rotated")
    world.log.reopen()
    world.admit(NotedCall(model="after")).end()

    assert ["after"] == [line["model"] for line in await world.lines()]


@pytest.mark.parametrize("target", ["fd:999", "fd:x", "fd:-1", "/nowhere/at/all"])
def test_a_target_that_cannot_be_written_is_refused(target: str) -> None:
    with pytest.raises(InvalidSettings, match="access_log"):
        AccessFile(target)


def test_half_a_line_is_not_completed_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "access"
    file = AccessFile(str(path))
    file._torn = True
    assert file.write(b"next\n")
    file.close()

    assert b"\nnext\n" == path.read_bytes()
