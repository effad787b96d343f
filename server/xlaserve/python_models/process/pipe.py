"""Messages between the server and a model's process: a header, then tensors."""

import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias

import msgspec
import numpy as np

from xlaserve.python_models.process.slab import (
    LEAST_BYTES,
    SlabError,
    SlabReader,
    SlabWriter,
    aligned,
)
from xlaserve.tensors import (
    DATATYPES,
    Buffer,
    Tensor,
    TensorDataError,
    aligned_bytes,
    datatype_of,
    from_bytes,
    to_bytes,
)

LIMIT_HEADER_BYTES = 16 << 20
LIMIT_TENSOR_BYTES = 1 << 31
"""Maximum size of all tensors in one message."""
STALLED_SECONDS = 30.0
"""Seconds without progress in sending a message before the connection counts as broken."""

_SIZES = struct.Struct("<IQ")
_NO_TENSORS: Mapping[str, Tensor] = {}

_Head: TypeAlias = tuple[
    dict[str, Any], list[tuple[str, str, tuple[int, ...], int]], int | None, list[int]
]
"""The header; the name, datatype, shape and size of each tensor; their offset in the slab, or None
if they follow on the socket; and the offsets in the other slab that can be reused."""
_read_head = msgspec.msgpack.Decoder(_Head).decode


class PipeError(Exception):
    """The peer sent a malformed message, or closed the connection."""


class MessageTooLarge(PipeError):
    """A message exceeds the size limit; nothing was sent."""


class Pipe:
    """One end of a socket pair with two slabs. One thread receives; any thread may send.

    Large tensors are written to the slab if it has free memory, and are otherwise sent after the
    header. Each message lists the chunks of the peer's slab that this side has finished reading.
    """

    def __init__(
        self,
        end: socket.socket,
        writer: SlabWriter | None = None,
        reader: SlabReader | None = None,
    ) -> None:
        self.socket = end
        self.writer = writer
        self.reader = reader
        self._sending = threading.Lock()
        self.on_silence: Callable[[], None] = lambda: None
        """Called when no data arrives within the socket's timeout, even in the middle of a message;
        may raise to stop receiving."""

    def send(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor] = _NO_TENSORS) -> None:
        """Send a message; blocks while the peer does not read. Raises PipeError."""
        shown, buffers, total = [], [], 0
        for name, tensor in tensors.items():
            datatype = datatype_of(tensor.dtype)
            if datatype is None:
                raise PipeError(f"tensor '{name}' has a dtype without a name, {tensor.dtype}")
            data = to_bytes(datatype, tensor)
            shown.append((name, datatype.name, tensor.shape, len(data)))
            buffers.append(data)
            total += len(data)
        if total > LIMIT_TENSOR_BYTES:
            limit = f"more than the limit of {LIMIT_TENSOR_BYTES}"
            raise MessageTooLarge(f"its tensors have {total} bytes, {limit}")
        # Encode before `write` allocates memory in the slab, because encoding may raise.
        encoded = msgspec.Raw(msgspec.msgpack.encode(header))
        writer, reader, place = self.writer, self.reader, None
        dropped = () if reader is None else reader.dropped()
        if writer is not None and total >= LEAST_BYTES and self.socket.fileno() >= 0:
            place = writer.write(buffers)
            if place is not None:
                total, buffers = 0, []
        head = msgspec.msgpack.encode((encoded, shown, place, dropped))
        try:
            with self._sending:
                self._all_of(_SIZES.pack(len(head), total) + head)
                for data in buffers:
                    self._all_of(data)
        except OSError as error:
            raise PipeError(str(error)) from error

    def receive(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the next message. Raises PipeError, or TimeoutError if none begins in time.

        Numeric tensors may be views of the slab; their memory is reused once no view is left.
        """
        head_size, total = _SIZES.unpack(self._exactly(_SIZES.size))
        if head_size > LIMIT_HEADER_BYTES or total > LIMIT_TENSOR_BYTES:
            raise PipeError(
                f"a message exceeds the limits: {head_size} bytes of header, {total} of tensors"
            )
        head, body = self._exactly(head_size), self._exactly(total)
        try:
            header, shown, place, dropped = _read_head(head)
            writer, reader = self.writer, self.reader
            if writer is not None:
                for start in dropped:
                    writer.release(start)
            step = _as_it_is
            if place is not None and reader is not None:
                step = aligned
                body = reader.view(place, sum(aligned(size) for *_, size in shown))
            tensors, start = {}, 0
            for name, datatype, shape, size in shown:
                tensors[name] = from_bytes(DATATYPES[datatype], shape, body[start : start + size])
                start += step(size)
        except (
            *(msgspec.DecodeError, TensorDataError, SlabError),
            *(LookupError, TypeError, ValueError),
        ) as error:
            raise PipeError(f"a message that cannot be read, {error}") from error
        return header, tensors

    def close(self) -> None:
        """Close this end; a receiving thread gets PipeError.

        Each slab is unmapped when no array refers to it.
        """
        self.writer = self.reader = None
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def _all_of(self, data: Buffer) -> None:
        # The socket's timeout is meant for receiving; sending may take longer.
        left, moved = memoryview(data).cast("B"), time.monotonic()
        while left:
            try:
                left = left[self.socket.send(left) :]
            except TimeoutError:
                if time.monotonic() - moved > STALLED_SECONDS:
                    raise
            else:
                moved = time.monotonic()

    def _exactly(self, count: int) -> memoryview:
        # Unlike a bytearray, this buffer is not zeroed first.
        view, got = aligned_bytes(count).data, 0
        while got < count:
            try:
                size = self.socket.recv_into(view[got:])
            except TimeoutError:
                self.on_silence()
                if not got and count == _SIZES.size:
                    raise
                continue
            except OSError as error:
                raise PipeError(str(error)) from error
            if not size:
                raise PipeError("the other end is closed")
            got += size
        return view


def _as_it_is(count: int) -> int:
    return count


def plain(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return arrays in a form that can be sent: C-contiguous, strings as objects."""
    found = {}
    for name, value in tensors.items():
        array = np.asarray(value)
        if array.dtype.kind in "SU":
            array = array.astype(np.object_)
        found[name] = array if array.flags.c_contiguous else np.ascontiguousarray(array)
    return found
