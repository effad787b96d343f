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
"""The most bytes of the tensors of one message."""
STALLED_SECONDS = 30.0
"""Seconds without progress of a message before the other end is given up."""

_SIZES = struct.Struct("<IQ")
_NO_TENSORS: Mapping[str, Tensor] = {}

_Head: TypeAlias = tuple[
    dict[str, Any], list[tuple[str, str, tuple[int, ...], int]], int | None, list[int]
]
"""The header; name, datatype, shape and bytes of each tensor; their place in the slab, or None if
they follow on the socket; and the places of the other slab that are free again."""
_read_head = msgspec.msgpack.Decoder(_Head).decode


class PipeError(Exception):
    """The other end sent a malformed message, or is gone."""


class MessageTooLarge(PipeError):
    """A message has more bytes than may be sent; nothing of it was."""


class Pipe:
    """One end of a pair of sockets, and the slabs beside it. One thread receives; any may send.

    Larger tensors are written to a slab where there is memory in it, and else sent behind the
    header. What was dropped of the other slab is told with the next message.
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
        """Called whenever nothing came for the timeout of the socket, also within a message; may
        raise to receive no more."""

    def send(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor] = _NO_TENSORS) -> None:
        """Send a message; blocks while the other end does not read. Raises PipeError."""
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
            limit = f"at most {LIMIT_TENSOR_BYTES} may be sent"
            raise MessageTooLarge(f"tensors of {total} bytes, {limit}")
        said = msgspec.Raw(msgspec.msgpack.encode(header))  # before a place of the slab is taken
        writer, reader, place = self.writer, self.reader, None
        dropped = () if reader is None else reader.dropped()
        if writer is not None and total >= LEAST_BYTES and self.socket.fileno() >= 0:
            place = writer.write(buffers)
            if place is not None:
                total, buffers = 0, []
        head = msgspec.msgpack.encode((said, shown, place, dropped))
        try:
            with self._sending:
                self._all_of(_SIZES.pack(len(head), total) + head)
                for data in buffers:
                    self._all_of(data)
        except OSError as error:
            raise PipeError(str(error)) from error

    def receive(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the next message; raises PipeError, or TimeoutError where none begins in time.

        Numbers may be views of the slab, whose place is free again once no view is left.
        """
        head_size, total = _SIZES.unpack(self._exactly(_SIZES.size))
        if head_size > LIMIT_HEADER_BYTES or total > LIMIT_TENSOR_BYTES:
            raise PipeError(f"a message of {head_size} and {total} bytes")
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
        """Close this end; a thread that receives gets PipeError.

        The slabs are unmapped once no array of them is left.
        """
        self.writer = self.reader = None
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def _all_of(self, data: Buffer) -> None:
        # The timeout of the socket is that of receiving: the other end may be slower than that.
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
        # Unlike a bytearray, it is not filled with zeros first.
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
    """Return arrays as they can be sent: in the order of C, texts as objects."""
    found = {}
    for name, value in tensors.items():
        array = np.asarray(value)
        if array.dtype.kind in "SU":
            array = array.astype(np.object_)
        found[name] = array if array.flags.c_contiguous else np.ascontiguousarray(array)
    return found
