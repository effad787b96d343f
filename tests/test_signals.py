"""Signals of a server: the first one drains, the second one ends, SIGHUP reloads."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from support.conditions import until

from xlaserve.process import signals

ALL = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in ALL}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", signals.STOP_SIGNALS)
@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN])
async def test_the_first_signal_to_stop_cancels(
    number: signal.Signals, before: signal.Handlers
) -> None:
    """Shells make background jobs ignore SIGINT, which a server must nevertheless handle."""
    signal.signal(number, before)
    task = asyncio.ensure_future(asyncio.Event().wait())
    with signals.handled(task, lambda: None):
        os.kill(os.getpid(), number)
        with pytest.raises(asyncio.CancelledError):
            await task
        # A repetition counts once: signals may go to the group and its parent, and be of either
        # kind.
        for each in signals.STOP_SIGNALS:
            os.kill(os.getpid(), each)

    await until(lambda: ends_by(signal.SIGTERM) and ends_by(signal.SIGINT))


def ends_by(number: signal.Signals) -> bool:
    return signal.getsignal(number) is signal.SIG_DFL


@pytest.mark.parametrize("is_replaced", [False, True])
async def test_no_handler_is_gone_for_a_moment(
    monkeypatch: pytest.MonkeyPatch, is_replaced: bool
) -> None:
    """A signal between the first and its repetition must not kill the process."""
    actions = list[tuple[int, Any]]()
    set_action = signal.signal

    def recorded(number: int, action: Any) -> Any:
        actions.append((number, action))
        return set_action(number, action)

    monkeypatch.setattr(signal, "signal", recorded)
    task = asyncio.ensure_future(asyncio.Event().wait())
    with signals.handled(task, lambda: None, Replaced() if is_replaced else None):
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(asyncio.CancelledError):
            await task

    assert len(signals.STOP_SIGNALS) * 2 <= len(actions)
    assert not [number for number, action in actions if action is signal.SIG_DFL]


async def test_a_hangup_reloads_and_ends_nothing() -> None:
    reloads: list[None] = []
    task = asyncio.ensure_future(asyncio.Event().wait())
    with signals.handled(task, lambda: reloads.append(None)):
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: 1 == len(reloads))
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: 2 == len(reloads))
        assert not task.done()
    task.cancel()
    os.kill(os.getpid(), signal.SIGHUP)

    assert signal.SIG_IGN is signal.getsignal(signal.SIGHUP)


class Replaced:
    """A server whose replacement is ready."""

    has_taken_over = True

    def __init__(self) -> None:
        self.closed = 0

    def start(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        self.closed += 1


async def test_whoever_stops_a_server_that_was_replaced_has_sent_one_signal() -> None:
    """It has already begun to drain; the first outside signal must not interrupt requests."""
    replaced = Replaced()
    task = asyncio.ensure_future(asyncio.Event().wait())
    with signals.handled(task, lambda: None, replaced):
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(asyncio.CancelledError):
            await task
    drains = asyncio.ensure_future(asyncio.Event().wait())
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    os.kill(os.getpid(), signal.SIGTERM)
    await until(lambda: signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)

    assert 1 == replaced.closed
    assert not drains.done()
    drains.cancel()


def test_the_first_process_of_a_container_is_ended_too() -> None:
    """For process 1 the kernel has no default action: SIGTERM would do nothing."""
    code = (
        "import os, signal\n"
        "from xlaserve.process import signals\n"
        "os.getpid, pid = lambda: 1, os.getpid()\n"
        "signals.end_at_once(signal.SIGTERM)\n"
        "assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL\n"
        "os.kill(pid, signal.SIGTERM)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=False)

    assert 128 + signal.SIGTERM == ended.returncode
