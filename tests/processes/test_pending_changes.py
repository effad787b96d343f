"""Changes that wait for their turn are bounded, also those of clients that left."""

import asyncio
import socket
from pathlib import Path

import pytest

from xlaserve.concurrency.control_plane import Change, ChangeKind
from xlaserve.errors import ShuttingDown, TooManyChanges
from xlaserve.workers import link as links
from xlaserve.workers.channel import Channel, from_worker, to_worker
from xlaserve.workers.link import Link
from xlaserve.workers.messages import Ask, GiveUp, Settled


async def test_a_change_beyond_the_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that leaves frees nothing: its change goes on. One that has settled does."""
    monkeypatch.setattr(links, "MOST_PENDING", 2)
    here, there = socket.socketpair()
    parent = await Channel.open(here, from_worker())
    channel = await Channel.open(there, to_worker())
    link = Link(channel, tmp_path)

    async def nothing() -> None: ...

    def apply(kind: ChangeKind, model: str) -> "asyncio.Future[None]":
        return asyncio.ensure_future(link.apply(Change(kind, model), nothing))

    waiting = [apply(ChangeKind.LOAD, name) for name in "ab"]
    asks = [await parent.receive() for _ in waiting]
    waiting[0].cancel()
    with pytest.raises(TooManyChanges, match="load 'c': 2 changes"):
        await apply(ChangeKind.LOAD, "c")
    given_up = await parent.receive()
    followed = apply(ChangeKind.FOLLOW, "d")
    asks.append(await parent.receive())
    for ask in asks:
        assert isinstance(ask, Ask)
        link.heard(Settled(ask.number))
    for change in (waiting[1], followed):
        with pytest.raises(ShuttingDown):
            await change
    again = apply(ChangeKind.LOAD, "c")
    asked = await parent.receive()
    again.cancel()
    for end in (parent, channel):
        end.close()
    # Ends what reads the channel.
    await asyncio.sleep(0)

    assert GiveUp(0) == given_up
    assert isinstance(asked, Ask)
    assert "c" == asked.change.subject
