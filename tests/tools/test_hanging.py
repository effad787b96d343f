"""How pytest's settings handle a test that hangs."""

import sys
from pathlib import Path

import pytest
from support.process import run

SETTINGS = Path(__file__).resolve().parents[2] / "pyproject.toml"

TESTS = """
import asyncio
import threading

import pytest


def test_before(): ...


async def test_waiting():
    await asyncio.Event().wait()


def test_locked():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def test_deaf():
    # No signal gets through to a process that has none left.
    import signal
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    threading.Event().wait()


@pytest.fixture
def deaf_in_teardown():
    yield
    threading.Event().wait()


def test_failing(deaf_in_teardown):
    # pytest drops its limits for tests that fail.
    assert False


def test_after(): ...
"""


@pytest.mark.slow
async def test_each_test_that_hangs_fails_and_the_others_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test that no signal can interrupt ends its process, but nothing else."""
    (tmp_path / "test_some.py").write_text(TESTS)
    limits = ("--timeout", "1", "-o", "faulthandler_timeout=3")
    arguments = ("-c", str(SETTINGS), "--rootdir", str(tmp_path), "-p", "no:cacheprovider")
    plugins = ("-p", "support.hanging", "-p", "no:randomly")
    tests = (*plugins, *limits, *arguments, "--numprocesses", "1", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    code, out, err = await run(sys.executable, "-m", "pytest", *tests)

    assert 1 == code, err
    assert "5 failed, 2 passed" in out
    assert "test_waiting - Failed: Timeout (>1.0s)" in out
    assert "test_locked - Failed: Timeout (>1.0s)" in out
    assert "crashed while running" in out.partition("test_deaf - ")[2]
    assert "test_failing - assert False" in out
    assert "crashed while running" in out.partition("test_failing - ")[2]
