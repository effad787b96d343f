"""The log: records that clients cannot forge, of bounded length."""

import io
import json
from collections.abc import Iterator

import pytest
import structlog

from xlaserve import log


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
