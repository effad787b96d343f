"""A bridge between two processes, with both ends in this one."""

import gc
import resource
import socket
import weakref
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import InitVar, dataclass, field
from pathlib import Path

import pytest
from support.conditions import until

from xlaserve.net.ledger import Kind as Purpose
from xlaserve.net.ledger import Ledger
from xlaserve.python_models.process.slab import LEAST_BYTES
from xlaserve.workers.fronts import bridge as bridges
from xlaserve.workers.fronts.bridge import Bridge, Slabs, offer, offered
from xlaserve.workers.fronts.records import NOWHERE, Kind, Record


@dataclass
class End:
    """One end of a bridge, the messages it received, and its ledger."""

    slabs: InitVar[Slabs]
    connection: socket.socket
    ledger: Ledger = field(default_factory=lambda: Ledger(64 << 20))
    heard: list[Record] = field(default_factory=list)
    unsaid: list[Record] = field(default_factory=list)

    def __post_init__(self, slabs: Slabs) -> None:
        account = self.ledger.open()
        self.bridge = Bridge(
            slabs, account, Purpose.ANSWERS, self._hear, lambda: None, unsaid=self._unsaid
        )

    def _unsaid(self, record: Record, error: BaseException) -> None:
        self.unsaid.append(record)

    def _hear(self, records: Sequence[Record]) -> None:
        for record in records:
            if record[0] == Kind.DROPPED:
                self.bridge.dropped(record[1])
            else:
                self.heard.append(record)

    async def open(self) -> None:
        """Connect this end."""
        await self.bridge.open(self.connection)


@asynccontextmanager
async def bridged() -> AsyncIterator[tuple[End, End]]:
    """Yield both ends of a bridge, not yet open."""
    one, other = socket.socketpair()
    with one, other:
        one.setblocking(False)
        other.setblocking(False)
        ends = End(offer(one, 4 * LEAST_BYTES), one), End(await offered(other), other)
        yield ends
        for end in ends:
            end.bridge.close()


def open_files() -> int:
    """Return the number of open file descriptors of this process."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def test_a_place_that_is_viewed_for_long_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client may read slowly, and then send no further request."""
    looks: list[Bridge] = []
    drop = Bridge._drop

    def noted(self: Bridge) -> None:
        looks.append(self)
        drop(self)

    monkeypatch.setattr(bridges, "_DROP_SECONDS", 0.001)
    monkeypatch.setattr(Bridge, "_drop", noted)
    async with bridged() as (writing, reading):
        await writing.open()
        await reading.open()
        place = writing.bridge.place([bytes(LEAST_BYTES)], LEAST_BYTES)
        assert reading.bridge.reader is not None
        view = reading.bridge.reader.view(place, LEAST_BYTES)
        reading.bridge.watch_drops()
        await until(lambda: looks)
        held = writing.ledger.held
        del view
        await until(lambda: not writing.ledger.held)

        assert held == LEAST_BYTES
        await until(lambda: reading.bridge._timer is None)


async def test_a_place_of_garbage_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA keeps host arrays until the next call of JAX or a garbage collection."""
    monkeypatch.setattr(bridges, "_DROP_SECONDS", 0.001)
    async with bridged() as (writing, reading):
        await writing.open()
        await reading.open()
        place = writing.bridge.place([bytes(LEAST_BYTES)], LEAST_BYTES)
        assert reading.bridge.reader is not None
        gc.disable()
        try:
            kept: list[object] = [reading.bridge.reader.view(place, LEAST_BYTES)]
            kept.append(kept)
            del kept
            reading.bridge.watch_drops()
            await until(lambda: not writing.ledger.held)
        finally:
            gc.enable()


async def test_a_bridge_without_memory_is_one_all_the_same() -> None:
    """A process that must not write files of that size has no slabs; tensors travel in records."""
    one, other = socket.socketpair()
    with one, other:
        before = open_files()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (LEAST_BYTES, limits[1]))
        try:
            ours = offer(one, 4 * LEAST_BYTES)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        theirs = await offered(other)

        assert [None] * 4 == [ours.reader, ours.writer, theirs.reader, theirs.writer]
        assert before == open_files()


async def test_memory_that_nobody_takes_is_closed() -> None:
    """The other process has died before it was connected."""
    one, other = socket.socketpair()
    with one:
        other.close()
        before = open_files()
        with pytest.raises(OSError, match="Broken pipe"):
            offer(one, 4 * LEAST_BYTES)

        assert before == open_files()


async def test_what_is_said_before_a_bridge_is_open_is_heard() -> None:
    """A worker may be given a batch by then: the board says that it is idle."""
    async with bridged() as (saying, hearing):
        await hearing.open()
        saying.bridge.say((Kind.REFUSED, 1))
        saying.bridge._flush()
        saying.bridge.say((Kind.REFUSED, 2))
        await saying.open()
        await until(lambda: len(hearing.heard) == 2)

        assert [[Kind.REFUSED, 1], [Kind.REFUSED, 2]] == hearing.heard


async def test_a_bridge_that_is_lost_holds_nothing() -> None:
    """Later completions write nothing: nobody would acknowledge them."""
    async with bridged() as (writing, reading):
        await writing.open()
        await reading.open()
        before = writing.bridge.place([bytes(LEAST_BYTES)], LEAST_BYTES)
        writing.bridge.close()
        place = writing.bridge.place([bytes(LEAST_BYTES)], LEAST_BYTES)
        writing.bridge.say((Kind.REFUSED, 1))

        assert (0, NOWHERE, 0) == (before, place, writing.ledger.held)
        assert [] == writing.bridge._waiting


async def test_a_bridge_that_is_lost_leaves_its_memory() -> None:
    """No garbage collection is needed: the last view releases it."""
    async with bridged() as (writing, reading):
        await writing.open()
        await reading.open()
        place = writing.bridge.place([b"1" * LEAST_BYTES], LEAST_BYTES)
        reader, writer = reading.bridge.reader, writing.bridge._writer
        assert reader is not None
        assert writer is not None
        view = reader.view(place, LEAST_BYTES)
        left = weakref.ref(reader), weakref.ref(writer), weakref.ref(reader._bytes)
        del reader, writer
        gc.disable()
        try:
            writing.bridge.close()
            reading.bridge.close()

            assert [True, True, False] == [one() is None for one in left]
            assert b"1" * LEAST_BYTES == view
            del view
            assert left[2]() is None
        finally:
            gc.enable()


async def test_a_record_that_has_no_form_takes_no_other_along() -> None:
    """Its slab memory is freed, and the sender gets an error."""
    async with bridged() as (one, other):
        await one.open()
        await other.open()
        data = bytes(LEAST_BYTES)
        place = one.bridge.place([data], len(data))
        formless = (Kind.ANSWER, 1, place, object())
        for record in ((Kind.CANCEL, 1, False), formless, (Kind.CANCEL, 2, False)):
            one.bridge.say(record)
        await until(lambda: len(other.heard) == 2)

        assert [1, 2] == [record[1] for record in other.heard]
        assert [formless] == one.unsaid
        assert 0 <= place
        assert 0 == one.ledger.held
