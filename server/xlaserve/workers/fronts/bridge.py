"""The bridge between two processes: records over sockets, tensors in shared memory.

What is said in one turn of the event loop leaves in one write.
"""

import asyncio
import gc
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec
import structlog

from xlaserve.errors import XlaserveError
from xlaserve.errors.panics import ENDS
from xlaserve.net.ledger import Account
from xlaserve.net.ledger import Kind as Purpose
from xlaserve.python_models.process.slab import (
    LEAST_BYTES,
    SlabError,
    SlabReader,
    SlabWriter,
    make_slab,
)
from xlaserve.tensors import TensorDataError
from xlaserve.workers.fronts.begun import BegunBoard
from xlaserve.workers.fronts.records import LENGTH, NOWHERE, PLACES, Kind, Record
from xlaserve.workers.handing import readable

_DROP_SECONDS = 0.05
"""Seconds after which a place in the slab is given back though there is nothing else to say."""

_log = structlog.get_logger("fronts")


class Slabs:
    """The memory that two processes share: one slab for each direction, or none."""

    def __init__(self, writes: int = -1, reads: int = -1, begun: int = -1) -> None:
        """Map two slabs and a board by their descriptors, which are closed; -1 for none."""
        self.begun = BegunBoard(begun) if begun >= 0 else None
        """The requests of the side that offers which the other has begun with."""
        try:
            self.writer = SlabWriter(writes) if writes >= 0 else None
            self.reader = SlabReader(reads, writable=False) if reads >= 0 else None
        finally:
            _close([writes, reads])


def offer(end: socket.socket, size: int) -> Slabs:
    """Make slabs of this many bytes together, and send them to the other end; raises OSError.

    Where there is no memory, everything goes through the sockets.
    """
    reason = "this system has no memfd"
    made: list[int] = []
    try:
        made += [make_slab(size // 2)]
        made += [make_slab(size // 2)]
        made += [BegunBoard.make()]
    except OSError as error:  # a limit of the process or of the machine
        reason = str(error)
    if len(made) == 3 and min(made) >= 0:
        ours, theirs, begun = made
        try:
            socket.send_fds(end, [b"s"], [theirs, ours, begun])
        except OSError:
            _close(made)
            raise
        return Slabs(ours, theirs, begun)
    _close(made)
    _log.warning("shared memory unavailable", reason=reason)
    end.sendall(b"-")
    return Slabs()


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        if descriptor >= 0:
            os.close(descriptor)


async def offered(end: socket.socket) -> Slabs:
    """Return the slabs that the other end sends first; raises EOFError where that has ended."""
    await readable(end)
    data, descriptors, _, _ = socket.recv_fds(end, 1, 3, socket.MSG_CMSG_CLOEXEC)
    if not data:
        raise EOFError
    return Slabs(*descriptors)


class Bridge(asyncio.Protocol):
    """One end. Of the event loop, but for `write`, which any thread may call."""

    def __init__(
        self,
        slabs: Slabs,
        account: Account,
        purpose: Purpose,
        heard: Callable[[Sequence[Record]], None],
        lost: Callable[[], None],
        *,
        unsaid: Callable[[Record, BaseException], Record | None],
    ) -> None:
        """`account` counts what is written to the slab, as what `purpose` says.

        `heard` is called with the records of a frame, `lost` when the other end is gone. `unsaid`
        is called with a record that cannot be serialized, and returns its replacement.
        """
        self.reader = slabs.reader
        self.begun = slabs.begun
        self._writer = slabs.writer
        self._account = account
        self._purpose: Purpose = purpose
        self._heard = heard
        self._lost = lost
        self._unsaid = unsaid
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(list[list[Any]])
        self._waiting: list[Record] = []
        """Records of this iteration of the event loop, sent at its end."""
        self._received = bytearray()
        """The received part of an incomplete frame."""
        self._sizes: dict[int, int] = {}
        """Charged bytes by their place in the slab."""
        self._viewed = 0
        """Number of places in the other side's slab that were not reported as dropped yet."""
        self._timer: asyncio.TimerHandle | None = None
        self.is_open = True

    async def open(self, end: socket.socket) -> None:
        """Begin, over one of a pair of sockets, which is closed in the end."""
        await self._loop.create_connection(lambda: self, sock=end)

    # --- sending ---

    def say(self, record: Record) -> None:
        """Send a record with all others of this iteration; dropped once the bridge is lost."""
        if not self.is_open:
            return
        if not self._waiting:
            self._loop.call_soon(self._flush)
        self._waiting.append(record)

    def place(self, buffers: Sequence[bytes | memoryview], total: int) -> int:
        """Write tensors to the slab and return where they are; NOWHERE if they go in the record.

        That is for few bytes, where the slab or the ledger has no memory for them, and once the
        bridge is lost: nobody would say that they were dropped.
        """
        writer = self._writer
        if total < LEAST_BYTES or writer is None or not self.is_open:
            return NOWHERE
        if not self._account.admits(total):
            return NOWHERE
        place = writer.write(buffers)
        if place is None:
            return NOWHERE
        self._account.hold(total, self._purpose)
        self._sizes[place] = total
        return place

    def _flush(self) -> None:
        if self._transport is None:
            return  # it is sent once there is one
        waiting, self._waiting = self._waiting, []
        if not self.is_open or self._transport.is_closing():
            return
        if self.reader is not None and (dropped := self.reader.dropped()):
            # One of a request that could not be read was dropped before anybody watched it.
            self._viewed = max(0, self._viewed - len(dropped))
            waiting.append((Kind.DROPPED, dropped))
        if waiting:
            data = self._encoded(waiting)
            self._transport.writelines((LENGTH.pack(len(data)), data))

    def _encoded(self, records: Sequence[Record]) -> bytes:
        """Return the bytes of records; one that has none takes no other one along."""
        try:
            return self._encoder.encode(records)
        except ENDS:
            raise
        except BaseException:
            said = [other for one in records if (other := self._sayable(one)) is not None]
            return self._encoder.encode(said)

    def _sayable(self, record: Record) -> Record | None:
        """Return a record if it can be serialized, else its replacement; None for nothing."""
        try:
            self._encoder.encode(record)
        except ENDS:
            raise
        except BaseException as error:
            _log.exception("record not encodable", kind=record[0])
            place = record[PLACES[record[0]]] if record[0] in PLACES else NOWHERE
            if place != NOWHERE:
                self.dropped([place])
            return self._unsaid(record, error)
        return record

    def watch_drops(self) -> None:
        """Return a viewed place soon after its last use, even if no record is sent by then."""
        self._viewed += 1
        if self._timer is None:
            self._timer = self._loop.call_later(_DROP_SECONDS, self._drop)

    def _drop(self) -> None:
        self._timer = None
        self._flush()
        if self._viewed:
            # XLA lets go of a host array at its next call, or as JAX has it when garbage is
            # collected: in a process that has nothing else to do, now.
            gc.collect(0)
            self._flush()
        if self._viewed and self.is_open:
            # A client that reads slowly views it for as long as it likes.
            self._timer = self._loop.call_later(_DROP_SECONDS, self._drop)

    # --- receiving ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to send."""
        self._transport = cast(asyncio.Transport, transport)
        self._flush()

    def data_received(self, data: bytes) -> None:
        """Act on every frame that is whole."""
        received = self._received
        if received:
            received += data
            del received[: self._frames(received)]
            return
        end = self._frames(data)
        if end < len(data):
            received += data[end:]

    def _frames(self, data: bytes | bytearray) -> int:
        """Return where the frames that are whole end."""
        start = 0
        with memoryview(data) as view:
            while len(view) - start >= LENGTH.size and self.is_open:
                (size,) = LENGTH.unpack_from(view, start)
                end = start + LENGTH.size + size
                if end > len(view):
                    break
                with view[start + LENGTH.size : end] as frame:
                    self._frame(frame)
                start = end
        return start

    def _frame(self, frame: memoryview) -> None:
        try:
            self._heard(self._decoder.decode(frame))
        except (
            *(msgspec.DecodeError, TensorDataError, SlabError),
            *(LookupError, TypeError, ValueError, XlaserveError),
        ):
            # Both ends are of one version: it is a fault of this server.
            _log.exception("bridge closed after an unreadable record")
            self.close()

    def dropped(self, places: Sequence[int]) -> None:
        """Take back the parts of the slab that the other end has released."""
        assert self._writer is not None
        for place in places:
            self._writer.release(place)
            self._account.release(self._sizes.pop(place), self._purpose)

    # --- shutdown ---

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the charged bytes, and report that the other end is gone."""
        if self.is_open:
            self.is_open = False
            self._end()

    def close(self) -> None:
        """Close this end; `lost` is called, if it was not yet."""
        if self._transport is not None:
            self._transport.abort()
        if self.is_open:
            self.is_open = False
            self._end()

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for size in self._sizes.values():
            self._account.release(size, self._purpose)
        self._sizes.clear()
        # Who hears what it says refers to it: the slabs are not to stay until garbage is collected.
        self.reader = self._writer = None
        self._lost()  # which may read what was begun
        self.begun = None
