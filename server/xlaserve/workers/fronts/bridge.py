"""A bridge between two processes: records over sockets, tensors in shared memory.

Records sent in the same iteration of the event loop share one write.
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
"""Delay before freed slab blocks are reported to the peer if no other record is sent, in
seconds."""

_log = structlog.get_logger("fronts")


class Slabs:
    """The shared memory of two processes: one slab per direction, or none."""

    def __init__(self, writes: int = -1, reads: int = -1, begun: int = -1) -> None:
        """Map slabs and board from their descriptors, and close the descriptors; -1 for none."""
        self.begun = BegunBoard(begun) if begun >= 0 else None
        """The board on which the other side records the requests that it has begun."""
        try:
            self.writer = SlabWriter(writes) if writes >= 0 else None
            self.reader = SlabReader(reads, writable=False) if reads >= 0 else None
        finally:
            _close([writes, reads])


def offer(end: socket.socket, size: int) -> Slabs:
    """Create slabs of `size` bytes in total and send them to the peer; raises OSError.

    If the memory cannot be allocated, tensors are sent through the socket instead.
    """
    reason = "this system has no memfd"
    made: list[int] = []
    try:
        made += [make_slab(size // 2)]
        made += [make_slab(size // 2)]
        made += [BegunBoard.make()]
    except OSError as error:  # a resource limit of the process or machine
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
    """Receive the slabs that the peer offers; raises EOFError if the peer has exited."""
    await readable(end)
    data, descriptors, _, _ = socket.recv_fds(end, 1, 3, socket.MSG_CMSG_CLOEXEC)
    if not data:
        raise EOFError
    return Slabs(*descriptors)


class Bridge(asyncio.Protocol):
    """One end of a bridge. Used from the event loop only."""

    def __init__(
        self,
        slabs: Slabs,
        account: Account,
        purpose: Purpose,
        on_records: Callable[[Sequence[Record]], None],
        lost: Callable[[], None],
        *,
        unsaid: Callable[[Record, BaseException], Record | None],
    ) -> None:
        """`account` is charged for data in the slab, under `purpose`.

        `on_records` is called with the records of each frame, and `lost` when the peer is gone.
        `unsaid` is called with a record that cannot be serialized, and returns its replacement or
        None.
        """
        self.reader = slabs.reader
        self.begun = slabs.begun
        self._writer = slabs.writer
        self._account = account
        self._purpose: Purpose = purpose
        self._heard = on_records
        self._lost = lost
        self._unsaid = unsaid
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(list[list[Any]])
        self._waiting: list[Record] = []
        """Records to send at the end of this iteration of the event loop."""
        self._received = bytearray()
        """The bytes received so far of an incomplete frame."""
        self._sizes: dict[int, int] = {}
        """Bytes charged for each block of this side's slab, by the block's offset."""
        self._viewed = 0
        """Number of blocks in the peer's slab that are still viewed here."""
        self._timer: asyncio.TimerHandle | None = None
        self.is_open = True

    async def open(self, end: socket.socket) -> None:
        """Start communicating over one end of a socket pair, which the bridge closes."""
        await self._loop.create_connection(lambda: self, sock=end)

    # --- Sending ---

    def say(self, record: Record) -> None:
        """Send a record at the end of this loop iteration; dropped once the bridge is lost."""
        if not self.is_open:
            return
        if not self._waiting:
            self._loop.call_soon(self._flush)
        self._waiting.append(record)

    def place(self, buffers: Sequence[bytes | memoryview], total: int) -> int:
        """Write tensors to the slab and return their offset; NOWHERE if they belong in the record.

        NOWHERE is returned for small tensors, if the slab is full or the ledger rejects the bytes,
        and once the bridge is lost, when nobody would free the block.
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
            return  # sent once the connection is made
        waiting, self._waiting = self._waiting, []
        if not self.is_open or self._transport.is_closing():
            return
        if self.reader is not None and (dropped := self.reader.dropped()):
            # A block of an unreadable request may be dropped before it was counted as viewed.
            self._viewed = max(0, self._viewed - len(dropped))
            waiting.append((Kind.DROPPED, dropped))
        if waiting:
            data = self._encoded(waiting)
            self._transport.writelines((LENGTH.pack(len(data)), data))

    def _encoded(self, records: Sequence[Record]) -> bytes:
        """Encode records; one that cannot be encoded is replaced without affecting the others."""
        try:
            return self._encoder.encode(records)
        except ENDS:
            raise
        except BaseException:
            sendable = [other for one in records if (other := self._sayable(one)) is not None]
            return self._encoder.encode(sendable)

    def _sayable(self, record: Record) -> Record | None:
        """Return a record if it can be encoded, else its replacement; None if there is none."""
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
        """Count a viewed block, and report it to the peer soon after its last use."""
        self._viewed += 1
        if self._timer is None:
            self._timer = self._loop.call_later(_DROP_SECONDS, self._drop)

    def _drop(self) -> None:
        self._timer = None
        self._flush()
        if self._viewed:
            # XLA releases host arrays at its next call, and JAX at the next garbage collection. An
            # idle process has to trigger one.
            gc.collect(0)
            self._flush()
        if self._viewed and self.is_open:
            # A slow client may still be reading from the block.
            self._timer = self._loop.call_later(_DROP_SECONDS, self._drop)

    # --- Receiving ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start sending."""
        self._transport = cast(asyncio.Transport, transport)
        self._flush()

    def data_received(self, data: bytes) -> None:
        """Process all complete frames."""
        received = self._received
        if received:
            received += data
            del received[: self._frames(received)]
            return
        end = self._frames(data)
        if end < len(data):
            received += data[end:]

    def _frames(self, data: bytes | bytearray) -> int:
        """Process complete frames, and return the offset after the last one."""
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
            # Both ends run the same version, so this is a bug in the server.
            _log.exception("bridge closed after an unreadable record")
            self.close()

    def dropped(self, places: Sequence[int]) -> None:
        """Free the slab blocks that the peer no longer uses."""
        assert self._writer is not None
        for place in places:
            self._writer.release(place)
            self._account.release(self._sizes.pop(place), self._purpose)

    # --- Shutdown ---

    def connection_lost(self, exc: Exception | None) -> None:
        """Release charged bytes, and report that the peer is gone."""
        if self.is_open:
            self.is_open = False
            self._end()

    def close(self) -> None:
        """Close this end, and call `lost` unless it was called before."""
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
        # Break the reference cycle with the callbacks, so that the slabs are freed immediately.
        self.reader = self._writer = None
        self._lost()  # the callback may still read the board
        self.begun = None
