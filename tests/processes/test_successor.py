"""A server whose replacement is ready stops itself once, unless it is already being stopped."""

import asyncio
import os
import signal
import socket
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from xlaserve.app.successor import Successor
from xlaserve.concurrency.control_plane import ChangeKind, ChangeText
from xlaserve.process.systemd import Systemd
from xlaserve.settings import Settings


class Changes:
    """A change log without changes."""

    def __init__(self) -> None:
        self.may_say = asyncio.Event()

    async def hold(self, kinds: Collection[ChangeKind]) -> Sequence[ChangeText]:
        return ()

    def go_on(self) -> None:
        """Accept changes again."""

    def files_of(self, change: ChangeText) -> Mapping[str, bytes]:
        return {}

    async def replies(self, question: str) -> Sequence[Any]:
        await self.may_say.wait()
        return ()


@pytest.mark.parametrize("is_stopped", [False, True])
async def test_a_server_that_was_replaced_sends_itself_no_second_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_stopped: bool
) -> None:
    """A second signal would end it immediately, with requests in flight."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *one: sent.append(one))
    changes = Changes()
    made = Successor(Settings(repository=tmp_path), (), Systemd(), changes, lambda: True)
    replaced = asyncio.ensure_future(made._replaced(1))
    await asyncio.sleep(0)
    if is_stopped:
        made.close()
    changes.may_say.set()
    await replaced

    assert ([] if is_stopped else [(os.getpid(), signal.SIGTERM)]) == sent
    assert made.has_taken_over is not is_stopped


class Handed:
    """The channel to a replacement."""

    def __init__(self) -> None:
        self.shut: list[int] = []

    def shutdown(self, how: int) -> None:
        self.shut.append(how)


async def test_nothing_is_handed_over_while_no_process_answers_for_the_models(
    tmp_path: Path,
) -> None:
    """The engine has died: the replacement would find no models, and serve none."""
    changes = Changes()
    changes.may_say.set()
    settings = Settings.read({}, repository=tmp_path, scratch_directory=tmp_path)
    made = Successor(settings, (), Systemd(), changes, lambda: True)
    channel: Any = Handed()
    made._channel = channel
    with capture_logs() as logs:
        await made._hand_over(channel)
    made._channel = None

    assert [socket.SHUT_RDWR] == channel.shut
    (said,) = logs
    assert "changes of clients not handed over to the new process" == said["event"]
    assert "no model-loading process responds: it died, is starting or is silent" == said["reason"]
