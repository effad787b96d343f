"""The message that blocks the event loop longest is found, named and stored."""

import time
from pathlib import Path

import pytest

from acceptance import holding

QUICK, SLOW = b"\x0a\x01m", b"\x0a\x01slow"


def reader(slow: bytes, seconds: float = 0.06) -> holding.Read:
    """Make a reader that takes too long for one message, measured by the judging clock."""

    def read(data: bytes) -> str:
        end = time.thread_time() + (seconds if data == slow else 0)
        while time.thread_time() < end:
            pass
        return "read"

    return read


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slow", "failing"), [(SLOW, ["longest hold of the event loop"]), (b"never sent", [])]
)
def test_a_message_that_takes_long_is_found_and_kept(
    tmp_path: Path, slow: bytes, failing: list[str]
) -> None:
    shapes = {"quick": QUICK, "slow": SLOW}
    outcome = holding.hold(tmp_path, messages=200, read=reader(slow), shapes=shapes)

    assert failing == outcome.failing
    if failing:
        assert SLOW == (tmp_path / "slowest").read_bytes()
        assert f"slow, {len(SLOW)} octets from {SLOW.hex()}: read" in str(outcome.figures[-1])


@pytest.mark.slow
def test_what_took_long_only_once_is_not_judged_by_that(tmp_path: Path) -> None:
    """After a cache miss or an interrupt the message is read again."""
    times = iter([True])
    once = reader(SLOW)

    def read(data: bytes) -> str:
        return once(data) if next(times, False) else "read"

    assert holding.hold(tmp_path, messages=0, read=read, shapes={"slow": SLOW}).holds


def test_every_shape_is_of_a_mebibyte_and_read_as_a_server_reads_it() -> None:
    read = holding._reader()

    assert all(len(data) <= 1 << 20 for data in holding.LATER.values())
    ends = {name: read(data) for name, data in holding.LATER.items()}
    assert {"read", "InvalidTensor", "UnknownDatatype"} == set(ends.values()), ends
