"""The log: records that clients cannot forge, of bounded length."""

import errno
import io
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import structlog
from support import log_writers

from xlaserve.process import log
from xlaserve.process.log_limits import MAX_RECORD_BYTES, MAX_TEXT, TracebackLimit
from xlaserve.process.output_reader import OutputLines


class Fallible(io.StringIO):
    """A stream whose disk is full for a while."""

    fails = False

    def write(self, text: str) -> int:
        if self.fails:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(text)


@pytest.fixture
def stream() -> io.StringIO:
    target = io.StringIO()
    log.configure("info", target)
    return target


@pytest.mark.parametrize(
    "name", ['x\n{"event": "forged"}', "x\r\nforged", "\x1b[2Jx", "\0", "\u2028", '"}']
)
def test_a_name_cannot_forge_a_record(stream: io.StringIO, name: str) -> None:
    """Each event is one line, and the name in it is the original."""
    structlog.get_logger().info("loaded", model=name)
    lines = stream.getvalue().split("\n")

    assert ["", name] == [lines[1], json.loads(lines[0])["model"]]
    assert "\x1b" not in lines[0]


def test_a_value_is_cut(stream: io.StringIO) -> None:
    structlog.get_logger().info("loaded", model="x" * 1_000_000)

    assert len(stream.getvalue()) < 2 * MAX_TEXT


def test_a_record_says_when_how_bad_and_what(stream: io.StringIO) -> None:
    structlog.get_logger().debug("unseen")
    structlog.get_logger().warning("seen", number=1)
    record = json.loads(stream.getvalue())

    assert ("seen", "warning", 1) == (record["event"], record["level"], record["number"])
    assert record["timestamp"].endswith("Z")


def test_an_exception_is_in_its_record(stream: io.StringIO) -> None:
    try:
        int("no number")
    except ValueError:
        structlog.get_logger().exception("failed")

    assert "ValueError: invalid literal" in json.loads(stream.getvalue())["exception"]


def test_what_was_lost_is_counted_in_the_next_record() -> None:
    target = Fallible()
    log.configure("info", target)
    target.fails = True
    structlog.get_logger().info("lost")
    structlog.get_logger().info("lost")
    target.fails = False
    structlog.get_logger().info("told")
    structlog.get_logger().info("told again")
    records = [json.loads(line) for line in target.getvalue().splitlines()]

    assert [("told", 2), ("told again", None)] == [
        (record["event"], record.get("lost_before")) for record in records
    ]


def test_levels_are_turned_off_and_on_one_by_one(stream: io.StringIO) -> None:
    logger = structlog.get_logger()
    log.set_levels(log.Levels(verbose_level=1, info=False, error=False))
    for method in ("debug", "info", "warning", "error", "critical"):
        getattr(logger, method)(method)
    log.set_levels(log.Levels.from_lowest("error"))
    for method in ("debug", "info", "warning", "error"):
        getattr(logger, method)(f"later {method}")

    records = [json.loads(line)["event"] for line in stream.getvalue().splitlines()]
    assert ["debug", "warning", "later error"] == records


def test_the_levels_of_a_process_are_those_of_its_start(stream: io.StringIO) -> None:
    assert log.Levels(0, info=True, warning=True, error=True) == log.levels()


@pytest.mark.parametrize("text", ["x" * (1 << 20), "\x1b" * (1 << 20), "\U0001f600" * (1 << 20)])
def test_no_record_is_longer_than_8_kb(stream: io.StringIO, text: str) -> None:
    """Whatever it contains, in however many values and errors (S5)."""
    many = {f"value{index}": text for index in range(20)}
    structlog.get_logger().error("failed", exc_info=ValueError(text), list=[text], **many)
    (line,) = stream.getvalue().splitlines()

    assert len(line) <= MAX_RECORD_BYTES
    assert json.loads(line)["exception"].startswith("ValueErr")


def test_a_hundred_tracebacks_of_a_minute_are_logged(stream: io.StringIO) -> None:
    """Further errors are logged by name only (S5: 10,000 errors)."""
    for number in range(10_000):
        structlog.get_logger().error("failed", exc_info=ValueError(f"number {number}"))
    records = [json.loads(line) for line in stream.getvalue().splitlines()]

    assert 100 == sum("exception" in record for record in records)
    assert "ValueError: number 9999" == records[-1]["error"]
    assert 10_000 == len(records)


def test_the_next_minute_has_tracebacks_again() -> None:
    now = [0.0]
    limit = TracebackLimit(1, clock=lambda: now[0])
    events = []
    for at in (0, 1, 2, 60, 61):
        now[0] = float(at)
        events.append(limit(None, "error", {"exc_info": ValueError("x")}))

    assert [True, False, False, True, False] == ["exc_info" in event for event in events]
    assert 2 == events[3]["tracebacks_left_out"]


def test_libraries_log_as_few_tracebacks(stream: io.StringIO) -> None:
    """Library records become ours: JSON, filtered by level, bounded, under the same limit."""
    library = logging.getLogger("library.of.others")
    for _ in range(101):
        library.error("said %s", "so\nand on", exc_info=ValueError("100 %\nof it"))
    library.info("unseen")
    log.set_levels(log.Levels(error=False))
    library.error("unseen too")
    records = [json.loads(line) for line in stream.getvalue().splitlines()]

    assert 101 == len(records)
    assert {"said so\nand on"} == {record["event"] for record in records}
    assert {("error", "library.of.others")} == {(r["level"], r["logger"]) for r in records}
    assert "ValueError: 100 %" in records[0]["exception"]
    assert "exception" not in records[100]
    assert "ValueError: 100 %\nof it" == records[100]["error"]


WRITER_KEYS = {"logger", "thread", "pid", "of", "place"}
"""Fields of which a record of somebody else's line has one: they name the writer."""
STATUSES = {"nobody": 1, "a crash": -signal.SIGABRT}


def printed_by(writers: Sequence[str]) -> tuple[list[bytes], int]:
    """Return the log of a process as a server's in which these have printed, and its status."""
    program = f"""
import gc, logging, sys, threading, warnings
from xlaserve.process.output import logged_output

with logged_output("info"):
    for code in {[log_writers.code(name) for name in writers]!r}:
        exec(code, globals())
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=False, timeout=60
    )

    assert b"" == ran.stdout
    return ran.stderr.splitlines(), ran.returncode


@pytest.fixture(scope="module", name="together")
def _together() -> tuple[list[bytes], int]:
    return printed_by(log_writers.TOGETHER)


@pytest.mark.parametrize("writer", log_writers.WRITERS)
def test_every_line_of_the_log_is_json_whoever_writes_it(
    writer: str, request: pytest.FixtureRequest
) -> None:
    """What is printed is in one record, or in one of each line, which names its writer."""
    if writer in log_writers.TOGETHER:
        lines, status = request.getfixturevalue("together")
    else:
        lines, status = printed_by([writer])
    records = [json.loads(line) for line in lines]
    shown = [record for record in records if log_writers.mark(writer) in json.dumps(record)]

    assert shown
    assert all({"event", "level", "timestamp"} <= record.keys() for record in records)
    assert all(len(line) <= MAX_RECORD_BYTES for line in lines)
    if writer not in ("structlog", "nobody"):
        assert all(WRITER_KEYS & record.keys() for record in shown)
    assert STATUSES.get(writer, 0) == status


def printed(program: str) -> list[dict[str, object]]:
    """Return the log records of a program, which must end by itself."""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=False, timeout=60
    )
    return [json.loads(line) for line in ran.stderr.splitlines() if line.startswith(b"{")]


def test_long_lines_are_counted() -> None:
    code = "import os; os.write(2, b'x' * 5000 + b'\\n')"
    program = f"from xlaserve.process.output import logged_output as o\nwith o('info'): {code}"
    (record,) = printed(program)

    assert ("x" * 4096, 904) == (record["line"], record["cut_bytes"])


READER = "xlaserve.process.output_reader"


ENDS = {"SIGKILL": "SIGKILL", "SIGSTOP": "SIGKILL, because it was stopped"}


def test_a_stopped_reader_ends_after_its_server() -> None:
    """The kernel resumes it, so that it logs what it has not read, and ends."""
    program = f"""
import fcntl, os, signal, struct, termios, time
import psutil
from xlaserve.process import output
from xlaserve.process.output import logged_output

# The server would otherwise kill a stopped reader, if it had the time.
output._keep_reading = lambda *given: None

def unread():
    return struct.unpack("i", fcntl.ioctl(2, termios.TIOCOUTQ, bytes(4)))[0]

with logged_output("info"):
    os.write(2, b"read\\n")
    while unread():
        time.sleep(0.01)
    found = [one for one in psutil.Process().children() if {READER!r} in one.cmdline()]
    found[0].suspend()
    os.write(2, f"the reader is {{found[0].pid}}\\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)
"""
    run = subprocess.run(
        [sys.executable, "-c", program], stderr=subprocess.PIPE, timeout=60, check=False
    )

    assert -signal.SIGKILL == run.returncode
    first, last = (json.loads(line)["line"] for line in run.stderr.decode().splitlines())
    assert ("read", "the reader is ") == (first, last.rstrip("0123456789"))


@pytest.mark.parametrize("number", ENDS)
def test_a_reader_that_is_killed_or_stopped_is_replaced(number: str) -> None:
    """What is printed meanwhile is not lost, and its end is in the log.

    Each write to a stopped one would take a second, once its socket is full.
    """
    program = f"""
import os, signal, time
from contextlib import suppress
import psutil
from xlaserve.process.output import logged_output

def reader():
    for one in psutil.Process().children():
        with suppress(psutil.Error):  # one that has ended meanwhile
            if {READER!r} in one.cmdline():
                return one

def until(holds):
    while not holds():
        time.sleep(0.01)

with logged_output("info"):
    until(reader)
    first = reader()
    first.send_signal(signal.{number})
    os.write(2, b"meanwhile\\n")
    until(lambda: (now := reader()) and now.pid != first.pid)
    os.write(2, b"afterwards\\n")
"""
    records = printed(program)

    assert [ENDS[number]] == [one["reason"] for one in records if one["event"] == "process ended"]
    assert ["meanwhile", "afterwards"] == [one["line"] for one in records if "line" in one]


CANNOT_START = """
import subprocess, threading
from xlaserve.process import output

refused, start, readers = threading.Event(), output._started, []
tries = {tries}
output._AGAIN_SECONDS = 0.01

def started(*given):
    global tries
    tries -= 1
    if tries < -1:
        refused.set()  # the failure before has been handled
    if tries < 0:
        raise OSError("no process can be started")
    readers.append(start(*given))
    return readers[-1]

output._started = started
with output.logged_output("info"):
    for one in readers:
        one.kill()
        refused.wait()
    print(subprocess.run(["echo", "a line"]).returncode)
"""


@pytest.mark.parametrize("tries", [0, 1])
def test_without_a_reader_what_a_child_prints_does_not_end_it(tries: int) -> None:
    """Neither at the start nor later: SIGPIPE would, if nobody held the socket."""
    records = printed(CANNOT_START.format(tries=tries))
    told = [one for one in records if one["event"] == "output of native code not logged"]

    assert ["no process can be started"] == [one["reason"] for one in told]
    assert "0" in [one.get("line") for one in records]


def test_an_unfinished_line_does_not_wait_until_others_are_silent() -> None:
    """It is shown after some seconds, though another process writes without a pause."""
    now, shown = [0.0], list[tuple[int, str]]()

    def receive() -> tuple[int, bytes]:
        now[0] += 1
        if now[0] == 20:
            return 0, b""
        return (1, b"unfinished") if now[0] == 1 else (2, b"a line\n")

    with Path("/dev/zero").open("rb") as readable:
        lines = OutputLines(lambda pid, line, _: shown.append((pid, line)), lambda: now[0])
        lines.read(readable.fileno(), receive)

    assert 5 == shown.index((1, "unfinished"))
    assert 19 == len(shown)


def test_the_last_line_is_logged_though_threads_are_left() -> None:
    """The process then ends without the end of the interpreter."""
    program = """
from xlaserve.cli.serve import command
from xlaserve.settings import Settings

def left(*_, **__):
    print("the end", end="")
    return True

command._run = left
command._serve(Settings.read({}, repository="."), (), opens_page=False)
raise AssertionError("it goes on")
"""
    (record,) = printed(program)

    assert ("printed on stdout", "the end") == (record["event"], record["line"])


ALIASES = {
    name: stream
    for stream, number in (("stdout", 1), ("stderr", 2))
    for name in (stream, f"fd:{number}", f"/dev/{stream}", f"/proc/self/fd/{number}")
}


@pytest.mark.parametrize("target", ALIASES)
def test_an_access_log_on_a_standard_stream_gets_its_records_as_they_are(target: str) -> None:
    """The path is that of a socket, which cannot be opened, and what comes there is logged."""
    program = f"""
from xlaserve.process.output import logged_output
from xlaserve.serving.observability.access_file import AccessFile

with logged_output("info"):
    assert AccessFile({target!r}).write(b"a record\\n")
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, timeout=60
    )

    assert {"stdout": b"", "stderr": b"", ALIASES[target]: b"a record\n"} == {
        "stdout": ran.stdout,
        "stderr": ran.stderr,
    }


def test_a_terminal_shows_lines_as_they_are() -> None:
    ours, theirs = os.openpty()
    program = "import os\nfrom xlaserve.process.output import logged_output\n"
    program += "with logged_output('info'): os.write(2, b'plain\\n')"
    subprocess.run([sys.executable, "-c", program], stdout=theirs, stderr=theirs, check=True)
    os.close(theirs)

    assert b"plain\r\n" == os.read(ours, 1000)
    os.close(ours)


def test_a_start_that_fails_says_nothing_about_the_reader() -> None:
    """The reader has then reached the end of its stream; that is no crash."""
    program = """
import time
from xlaserve.process.output import logged_output

try:
    with logged_output("info"):
        raise ValueError
except ValueError:
    time.sleep(2)
"""
    assert [] == [one for one in printed(program) if one["event"] == "process ended"]


def test_a_fork_prints_though_a_thread_was_printing() -> None:
    """The thread held the lock of the stream during the fork, and is missing in the child."""
    program = """
import os, sys
from xlaserve.process.output import logged_output

with logged_output("info"):
    with sys.stdout._lock:
        pid = os.fork()
        if not pid:
            print("the child")
            os._exit(0)
    os.waitpid(pid, 0)
"""
    assert ["the child"] == [one["line"] for one in printed(program) if "line" in one]
