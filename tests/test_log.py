"""The log: records that clients cannot forge, of bounded length."""

import errno
import io
import json
import os
from collections.abc import Iterator

import pytest
import structlog

from xlaserve import log


class Fallible(io.StringIO):
    """A disk that is full for a while."""

    fails = False

    def write(self, text: str) -> int:
        if self.fails:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(text)


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    target = io.StringIO()
    log.configure("info", target)
    yield target
    structlog.reset_defaults()


@pytest.mark.parametrize(
    "name", ['x\n{"event": "forged"}', "x\r\nforged", "\x1b[2Jx", "\0", "\u2028", '"}']
)
def test_a_name_cannot_forge_a_record(stream: io.StringIO, name: str) -> None:
    """One event is one line, and the name in it is the name that came."""
    structlog.get_logger().info("loaded", model=name)
    lines = stream.getvalue().split("\n")

    assert ["", name] == [lines[1], json.loads(lines[0])["model"]]
    assert "\x1b" not in lines[0]


def test_a_value_is_cut(stream: io.StringIO) -> None:
    structlog.get_logger().info("loaded", model="x" * 1_000_000)

    assert len(stream.getvalue()) < 2 * log.MAX_TEXT


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
    structlog.reset_defaults()
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
