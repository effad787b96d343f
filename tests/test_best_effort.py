"""Output streams whose disk is full, or whose reader is gone or does not read."""

import fcntl
import io
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest
from rich.console import Console

from xlaserve.app.display import Addresses, ModelRow
from xlaserve.cli.display import TerminalDisplay
from xlaserve.process import best_effort as module
from xlaserve.process.best_effort import BestEffortStream, best_effort, finish, flushed
from xlaserve.residence.catalog import IndexEntry
from xlaserve.runtime.loaded import Stage

FULL = Path("/dev/full")


@pytest.fixture(name="pipe")
def _pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, TextIO]]:
    monkeypatch.setattr(module, "_MOST_QUEUED_BYTES", 0)
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    with os.fdopen(writer, "w") as stream:
        yield reader, stream
    os.close(reader)


def fill(stream: TextIO) -> int:
    """Write until a pipe is full; return the number of bytes written."""
    os.set_blocking(stream.fileno(), False)
    count = 0
    try:
        while True:
            count += os.write(stream.fileno(), b"." * 1024)
    except BlockingIOError:
        os.set_blocking(stream.fileno(), True)
    return count


def test_text_is_written_at_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("w") as file:
        stream = BestEffortStream(file)
        stream.write("é\n" * 10_000)

        assert "é\n" * 10_000 == path.read_text()
        assert 0 == stream.lost


@pytest.mark.parametrize("text", ["x\n", "x" * 100_000])
def test_a_full_disk_is_no_error(text: str) -> None:
    with FULL.open("w") as file:
        stream = BestEffortStream(file)

        assert len(text) == stream.write(text)
        assert 1 == stream.lost


def test_a_reader_that_is_gone_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as file:
        stream = BestEffortStream(file)
        stream.write("x\n")

        assert 1 == stream.lost


def test_a_reader_that_does_not_read_holds_nobody_up(pipe: tuple[int, TextIO]) -> None:
    """Once it reads again, output continues on a new line."""
    reader, file = pipe
    stream = BestEffortStream(file)
    held = fill(file)
    stream.write("lost\n")
    stream.write("lost\n")

    assert 2 == stream.lost

    os.read(reader, held)
    stream.write("told\n")

    assert b"told\n" == os.read(reader, 100)
    assert 0 == stream.lost


@pytest.fixture(name="queued")
def _queued() -> Iterator[tuple[int, TextIO]]:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        yield reader, stream
    os.close(reader)


def test_what_a_reader_does_not_take_waits_for_it_in_order(queued: tuple[int, TextIO]) -> None:
    """A thread writes it once the reader reads again, and nothing is lost."""
    reader, file = queued
    stream = BestEffortStream(file)
    held = fill(file)
    written = [f"line {number}\n" for number in range(1000)]
    for line in written:
        stream.write(line)

    assert 0 == stream.lost

    expected = "".join(written).encode()
    octets = b""
    while len(octets) < held + len(expected):
        octets += os.read(reader, 1 << 16)
    stream.finish(60)
    stream.write("at once\n")

    assert expected == octets[held:]
    assert b"at once\n" == os.read(reader, 100)


def test_a_record_holds_nobody_up_on_a_small_pipe(queued: tuple[int, TextIO]) -> None:
    """The kernel gives a user of many pipes smaller ones, and two pages do not fit into one."""
    reader, file = queued
    fcntl.fcntl(file, fcntl.F_SETPIPE_SZ, 4096)
    stream = BestEffortStream(file)
    text = "x" * 6000 + "\n"
    writing = threading.Thread(target=stream.write, args=(text,), daemon=True)
    writing.start()
    writing.join(60)

    assert not writing.is_alive()

    octets = b""
    while len(octets) < len(text):
        octets += os.read(reader, 1 << 16)

    assert text.encode() == octets


def test_the_queue_is_bounded_and_the_end_too(
    queued: tuple[int, TextIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropped lines are counted, and an exiting process waits for a limited time."""
    monkeypatch.setattr(module, "_MOST_QUEUED_BYTES", 100)
    reader, file = queued
    stream = BestEffortStream(file)
    held = fill(file)
    for _ in range(12):
        stream.write("x" * 9 + "\n")

    assert 2 == stream.lost

    finish(stream, 0.01)
    octets = b""
    while len(octets) < held + 100:
        octets += os.read(reader, 1 << 16)
    stream.finish(60)

    assert (b"x" * 9 + b"\n") * 10 == octets[held:]


def test_a_reader_that_leaves_frees_the_queue(queued: tuple[int, TextIO]) -> None:
    reader, file = queued
    stream = BestEffortStream(file)
    fill(file)
    stream.write("x\n")
    os.dup2(os.open(os.devnull, os.O_RDONLY), reader)
    stream.finish(60)

    assert 1 == stream.lost


def test_half_a_line_is_ended_before_the_next(pipe: tuple[int, TextIO]) -> None:
    reader, file = pipe
    stream = BestEffortStream(file)
    stream.write("x" * (1 << 20))
    taken = len(os.read(reader, 1 << 20))

    assert 0 < taken < 1 << 20
    assert 1 == stream.lost

    stream.write("told\n")

    assert b"\ntold\n" == os.read(reader, 100)


def test_surrogates_of_a_file_name_are_escaped(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("w") as file:
        best_effort(file).write("x\udcff\n")

    assert b"x\\udcff\n" == path.read_bytes()


def test_a_stream_without_a_descriptor_is_written_to() -> None:
    target = io.StringIO()
    best_effort(target).write("x")

    assert "x" == target.getvalue()

    target.close()
    stream = best_effort(target)
    stream.write("x")

    assert not stream.isatty()


def test_no_stream_at_all_is_no_error() -> None:
    stream = best_effort(None)
    stream.write("x")

    assert not stream.isatty()
    assert stream is best_effort(stream)


def test_what_cannot_be_flushed_is_given_up_once() -> None:
    """Closing it then succeeds, as the interpreter does at exit."""
    with FULL.open("w") as file:
        file.write("x")
        error = flushed(file)

        assert error is not None
        assert "No space left on device" == error.strerror
        assert flushed(file) is None


def test_a_display_on_a_full_device_is_no_error() -> None:
    entry = IndexEntry("m", "1", "READY", "")
    with (
        FULL.open("w") as file,
        TerminalDisplay(Console(file=best_effort(file), force_terminal=True)) as display,
    ):
        display.listening(Addresses("127.0.0.1:1", None, "127.0.0.1:1"))
        display.stage("m", "1", Stage("compiling", 1, 2))
        display.started([ModelRow(entry, 1, 1.0)])
