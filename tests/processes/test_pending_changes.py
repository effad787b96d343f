"""Queued changes are bounded, including those of clients that have left."""

import asyncio
import socket
from pathlib import Path

import pytest

from xlaserve.concurrency.control_plane import Change, ChangeKind, ChangeText
from xlaserve.errors import ShuttingDown, TooManyChanges
from xlaserve.workers import link as links
from xlaserve.workers.channel import Channel, from_worker, to_worker
from xlaserve.workers.link import Link
from xlaserve.workers.messages import Ask, Did, Do, GiveUp, Settled


async def test_a_change_beyond_the_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that leaves frees no slot: its change continues. A completed change does."""
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
    # Ends the task that reads the channel.
    await asyncio.sleep(0)

    assert GiveUp(0) == given_up
    assert isinstance(asked, Ask)
    assert "c" == asked.change.subject


async def test_a_change_that_is_given_up_before_it_begins_is_answered(tmp_path: Path) -> None:
    """Both messages arrive in one read; the parent must not wait forever."""
    here, there = socket.socketpair()
    parent = await Channel.open(here, from_worker())
    channel = await Channel.open(there, to_worker())
    link = Link(channel, tmp_path)

    async def make(change: Change) -> None:
        await asyncio.Event().wait()

    link.handle(ChangeKind.LOAD, make)
    for number, rounds in ((1, 0), (2, 1)):
        link.heard(Do(number, ChangeText(ChangeKind.LOAD, "m", {})))
        for _ in range(rounds):
            await asyncio.sleep(0)
        link.heard(GiveUp(number))
    async with asyncio.timeout(60):
        done = [await parent.receive() for _ in range(2)]
    for end in (parent, channel):
        end.close()
    await asyncio.sleep(0)

    told = {one.number: one.failure for one in done if isinstance(one, Did)}
    assert told.keys() == {1, 2}
    assert {"LoadCancelled"} == {one.error for one in told.values() if one is not None}
    assert None not in told.values()


async def test_a_load_that_is_given_up_before_it_is_asked_for_is_never_asked_for(
    tmp_path: Path,
) -> None:
    """Its files are still being written: the GiveUp would arrive before the change itself."""
    here, there = socket.socketpair()
    parent = await Channel.open(here, from_worker())
    channel = await Channel.open(there, to_worker())
    link = Link(channel, tmp_path)

    async def nothing() -> None: ...

    files = {"file:1/model.py": b"x" * 100}
    leaving = asyncio.ensure_future(link.apply(Change(ChangeKind.LOAD, "a", {}, files), nothing))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    staying = asyncio.ensure_future(link.apply(Change(ChangeKind.LOAD, "b"), nothing))
    async with asyncio.timeout(60):
        first = await parent.receive()
        while list(tmp_path.iterdir()):
            await asyncio.sleep(0)
    link.heard(Settled(1))
    with pytest.raises(ShuttingDown):
        await staying
    for end in (parent, channel):
        end.close()
    await asyncio.sleep(0)

    assert isinstance(first, Ask)
    assert "b" == first.change.subject
