"""The time of a process that counts: not that in which it waits for a processor."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from xlaserve.process.own_time import Activity, OwnTime, activity

PROMPT_SECONDS = 60.0
PID = 1
"""Of a process about which each look is told."""


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("what", "found", "counted"),
    [
        ("sleeps", Activity(is_runnable=False, processor_seconds=0.0), 10.0),
        ("runs", Activity(is_runnable=True, processor_seconds=10.0), 10.0),
        ("waits for a processor", Activity(is_runnable=True, processor_seconds=1.5), 1.5),
        ("has four threads", Activity(is_runnable=True, processor_seconds=40.0), 10.0),
        ("is gone", None, 10.0),
    ],
)
def test_time_without_waits_for_a_processor(
    what: str, found: Activity | None, counted: float
) -> None:
    clock = Clock()
    taken = OwnTime(PID, clock)
    clock.now = 10.0

    taken.look(lambda pid: found)

    assert counted == taken.seconds, what


def test_processor_time_counts_once() -> None:
    clock = Clock()
    taken = OwnTime(PID, clock)

    for used in (2.0, 2.0, 3.0):
        clock.now += 10.0
        taken.look(lambda pid, used=used: Activity(is_runnable=True, processor_seconds=used))

    assert 3.0 == taken.seconds


@contextmanager
def running(code: str) -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    with process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process.pid
        finally:
            process.kill()


def until(pid: int, expected: bool, seconds: float) -> Activity:
    """Return what a process does once that is so."""
    end = time.monotonic() + PROMPT_SECONDS
    while time.monotonic() < end:
        found = activity(pid)
        if found and (expected, True) == (found.is_runnable, found.processor_seconds >= seconds):
            return found
        time.sleep(0.01)
    raise AssertionError(f"{found}, expected {expected} and {seconds} s")


SPINS = "while True: pass"
THREAD = "import threading; threading.Thread(target=lambda: exec('while True: pass')).start();"


@pytest.mark.parametrize("code", [f"print(flush=True)\n{SPINS}", f"{THREAD} print(flush=True)"])
def test_a_thread_that_computes_makes_its_process_runnable(code: str) -> None:
    with running(code) as pid:
        first = until(pid, True, 0.02)
        assert until(pid, True, first.processor_seconds + 0.05)


def test_a_process_that_sleeps_is_not_runnable() -> None:
    with running("import time; print(flush=True); time.sleep(1000)") as pid:
        assert not until(pid, False, 0.0).is_runnable


def test_nobody_knows_of_a_process_that_is_gone() -> None:
    with running("print(flush=True)") as pid:
        pass

    assert activity(pid) is None
    assert activity(os.getpid()) is not None
