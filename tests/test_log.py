"""The log: records that clients cannot forge, of bounded length."""

import errno
import io
import json
import logging
import os
import subprocess
import sys

import pytest
import structlog

from xlaserve.process import log
from xlaserve.process.log_limits import MAX_RECORD_BYTES, MAX_TEXT, TracebackLimit


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


WRITERS = {
    "a library that logs": "logging.getLogger('lib').warning('two\\nlines')",
    "a library with a handler of its own": (
        "own = logging.getLogger('own'); own.propagate = False; "
        "own.addHandler(logging.StreamHandler()); own.error('two\\nlines')"
    ),
    "a library that sets up logging": (
        "logging.basicConfig(format='PLAIN %(message)s'); logging.getLogger('l').error('x')"
    ),
    "a warning": "warnings.warn('two\\nlines', stacklevel=1)",
    "a deprecation": "warnings.simplefilter('always'); warnings.warn('x', DeprecationWarning)",
    "a line": "print('a line', file=sys.stderr)",
    "a part of a line": "sys.stderr.write('a '); sys.stderr.write('line\\n')",
    "a line where the interpreter began": "print('a line', file=sys.__stderr__)",
    "a process that is forked": (
        "import multiprocessing as m; p = m.get_context('fork').Process(target=divmod, args=(1, 0))"
        "; p.start(); p.join()"
    ),
    "a record that cannot be formatted": "logging.getLogger('lib').error('x %d', 'y')",
    "a traceback": "import traceback; traceback.print_stack()",
    "a thread": "t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join()",
    "a finalizer": "A = type('A', (), {'__del__': lambda self: 1 / 0}); A()",
    "a task": "import asyncio; asyncio.run(forgotten())",
    "nobody": "1 / 0",
}


@pytest.mark.parametrize("writer", WRITERS)
def test_every_line_of_the_log_is_json_whoever_writes_it(writer: str) -> None:
    """In a server-like process: output becomes a single record, or one per line."""
    program = f"""
import gc, logging, sys, threading, warnings
from xlaserve.process import log
from xlaserve.process.log_everything import taken_stderr

async def forgotten():
    import asyncio
    asyncio.ensure_future(failing())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    gc.collect()

async def failing():
    raise ValueError("nobody asks")

log.configure()
with taken_stderr():
    {WRITERS[writer]}
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=False, text=True
    )
    records = [json.loads(line) for line in ran.stderr.splitlines()]

    assert records
    assert all({"event", "level", "timestamp"} <= record.keys() for record in records)
    assert (1 if writer == "nobody" else 0) == ran.returncode
