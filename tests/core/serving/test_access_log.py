"""The access log: which calls it records, the bounds of a line, and that writing never blocks."""

import asyncio
import errno
import itertools
import json
import os
import random
import select
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs
from support.calls import NotedCall

from xlaserve.errors import InvalidSettings, Unsupported
from xlaserve.net.status import reported_status
from xlaserve.serving.access.principal import Principal
from xlaserve.serving.call import Call, Operation, Peer
from xlaserve.serving.gates import Gates
from xlaserve.serving.infer_call import Executed, InferCall
from xlaserve.serving.observability.access_file import AccessFile
from xlaserve.serving.observability.access_lines import MAX_RECORD_BYTES
from xlaserve.serving.observability.access_log import AccessLog, Sampling

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
    """An access log behind a gate, writing to a file, with a clock that stands still."""

    def __init__(
        self,
        path: Path,
        chances: Iterable[float] = (),
        *,
        max_pending: int = 100,
        **sampling: Any,
    ) -> None:
        self.path = path
        self.now = SECOND
        drawn = iter(chances)
        self.file = AccessFile(str(path))
        self.log = AccessLog(
            self.file,
            reported_status,
            Sampling(**sampling),
            max_pending,
            clock=lambda: self.now,
            now=lambda: 1_700_000_000_123_456_789,
            chance=lambda: next(drawn),
        )
        self.gates = Gates(clock=lambda: self.now)
        self.gates.observe(self.log, needs_records=True)

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
    call.record.bytes_out, call.record.written_ns = 9, world.now + 1000

    (line,) = await world.lines()

    assert "2023-11-14T22:13:20.123457Z" == line.pop("time")
    assert 2001 == line.pop("total_us")
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
    # The numbers drawn: one call is skipped before the first sampled one, and many before the next.
    world = World(tmp_path / "access", [0.5, 0.9], rate=0.5, slow_ns=SECOND)
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


async def test_a_part_of_the_calls_is_drawn(tmp_path: Path) -> None:
    """As if each call were sampled independently, but with one random number per recorded call."""
    draws = random.Random(7)
    numbers = [draws.random() for _ in range(1000)]
    left = list(numbers)
    world = World(tmp_path / "access", iter(left.pop, None), max_pending=4000, rate=0.1)
    for number in range(4000):
        world.admit(NotedCall(model=str(number))).end()

    lines = await world.lines()

    drawn = [int(line["model"]) for line in lines]
    gaps = [after - before for before, after in itertools.pairwise(drawn)]
    assert 330 < len(drawn) < 470
    assert len(numbers) - len(left) <= len(drawn) + 1
    # Not simply every tenth call: with alternating clients some would never be logged.
    assert len(set(gaps)) > 15
    assert min(gaps) == 1


@pytest.mark.parametrize("rate", [0.0, 1.0])
async def test_no_chance_is_taken_where_nothing_is_left_to_it(tmp_path: Path, rate: float) -> None:
    world = World(tmp_path / "access", rate=rate)
    for _ in range(3):
        world.admit(NotedCall()).end()
    world.admit(NotedCall()).fail(Unsupported("that"))

    assert (4 if rate else 1) == len(await world.lines())


async def test_executed_calls_are_drawn_too(tmp_path: Path) -> None:
    world = World(tmp_path / "access", [0.6, 0.0, 0.9999], rate=0.5, slow_ns=SECOND)
    version = SimpleNamespace(model="m", number="3")
    for name, took in [("out", 0), ("in", 0), ("in too", 0), ("slow", SECOND), ("out too", 0)]:
        call = InferCall()
        call.found, call.id = cast(Any, version), name
        world.admit(call)
        call.submitted_ns = world.now
        call.end(Executed({}, world.now, world.now + took, 1))
        assert call.record is not None
        call.record.bytes_out = 0

    assert ["in", "in too", "slow"] == [line["id"] for line in await world.lines()]


async def test_lines_of_a_burst_are_made_before_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are handed over together: the thread is not woken for each batch."""
    monkeypatch.setattr("xlaserve.serving.observability.access_log._FLUSH_SECONDS", 3600)
    world = World(tmp_path / "access", max_pending=1000)
    version = SimpleNamespace(model="m", number="3")
    for number in range(300):
        call = InferCall()
        call.found, call.id = cast(Any, version), str(number)
        world.admit(call)
        call.end(Executed({}, world.now, world.now, 1))
        assert call.record is not None
        if number != 7:
            call.record.bytes_out = 0
        if number % 64 == 63:
            await asyncio.sleep(0)
    made, waiting = world.log._made_count, len(world.log._pending)
    assert world.log._thread._thread is None

    lines = await world.lines()

    assert made >= 127
    assert 300 == made + waiting
    # One call is still waiting for its answer.
    numbers = [int(line["id"]) for line in lines]
    assert numbers[:7] == list(range(7))
    assert sorted(numbers) == list(range(300))
    assert numbers.index(7) > 120


async def test_parts_of_a_call_have_no_record_of_their_own(tmp_path: Path) -> None:
    world = World(tmp_path / "access")
    whole = world.admit(NotedCall(model="ensemble"))
    world.admit(NotedCall(model="step", parent=whole)).end()
    whole.end()

    assert ["ensemble"] == [line["model"] for line in await world.lines()]


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
async def test_no_text_of_a_client_forges_a_record(tmp_path: Path, text: str) -> None:
    """A record is one line of printable ASCII, at most 8 KB long."""
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
    """Calls complete although nobody reads the pipe; lines that do not fit are counted."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while os.write(writer, b"x" * 4096):
            pass
    log = AccessLog(AccessFile(f"fd:{writer}"), reported_status, Sampling(), 10)
    gates = Gates()
    gates.observe(log, needs_records=True)
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
    (warning,) = [entry for entry in logged if entry["event"] == "access records dropped"]
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
        file.check_rotation()
    assert file.write(b"second\n")
    file.close()

    assert b"first\n" == (tmp_path / "rotated").read_bytes()
    assert b"second\n" == path.read_bytes()


async def test_a_rotated_log_goes_on(tmp_path: Path) -> None:
    """SIGHUP calls `AccessLog.reopen`."""
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


def test_a_pipe_takes_many_lines_at_once() -> None:
    """Only whole lines, at most PIPE_BUF bytes per write: another writer cannot split a line."""
    reader, writer = os.pipe()
    file = AccessFile(f"fd:{writer}")
    lines = b"".join(b"%d" % number * 50 + b"\n" for number in range(300))
    long = b"x" * 5000 + b"\n"
    try:
        parts = list(file.parts(lines + long + lines))
    finally:
        os.close(reader)
        os.close(writer)

    assert lines + long + lines == b"".join(parts)
    assert all(part.endswith(b"\n") for part in parts)
    assert [long] == [part for part in parts if len(part) > select.PIPE_BUF]
    assert len(parts) < 25


def test_a_file_takes_all_lines_at_once(tmp_path: Path) -> None:
    file = AccessFile(str(tmp_path / "access"))
    lines = b"line\n" * 4000
    file.close()

    assert [lines] == list(file.parts(lines))


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


class FullDisk:
    """`os.write` on a disk with room for a limited number of bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room = 1 << 20
        self.after: Callable[[], object] = bool
        """Called once the disk is full."""
        self._write = os.write
        monkeypatch.setattr(os, "write", self._put)

    def _put(self, descriptor: int, data: bytes) -> int:
        if not self.room:
            self.after()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._write(descriptor, data[: self.room])
        self.room -= written
        return written


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A partial line is truncated, so that the next line starts on its own."""
    path = tmp_path / "access"
    file, disk = AccessFile(str(path)), FullDisk(monkeypatch)

    answers = [file.write(b"first\n")]
    disk.room = 3
    answers += [file.write(b"second\n"), file.write(b"third\n")]
    disk.room = 1 << 20
    answers.append(file.write(b"fourth\n"))
    file.close()

    assert [True, False, False, True] == answers
    assert b"first\nfourth\n" == path.read_bytes()


def test_half_a_line_becomes_no_part_of_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once another process has appended, it cannot be truncated; a newline ends it."""
    path = tmp_path / "access"
    file, disk = AccessFile(str(path)), FullDisk(monkeypatch)

    def another_writes() -> None:
        with path.open("ab") as other:
            other.write(b"another\n")
        disk.after = bool

    disk.room, disk.after = 3, another_writes
    answers = [file.write(b"second\n"), file.write(b"third\n")]
    disk.room = 1 << 20
    answers.append(file.write(b"fourth\n"))
    file.close()

    assert [False, False, True] == answers
    assert b"secanother\n\nfourth\n" == path.read_bytes()
