"""Messages between the server and the process of a model: a header, and tensors behind it."""

import socket
import struct
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np

from xlaserve.tensors import (
    DATATYPES,
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

_SIZES = struct.Struct("<IQ")
_NO_TENSORS: Mapping[str, Tensor] = {}


class PipeError(Exception):
    """The other end sent what cannot be, or is gone."""


class Pipe:
    """One end of a pair of sockets. One thread receives; any may send."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._sending = threading.Lock()

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
            raise PipeError(f"tensors of {total} bytes, at most {LIMIT_TENSOR_BYTES} may be sent")
        head = msgspec.msgpack.encode({**header, "tensors": shown})
        try:
            with self._sending:
                self.socket.sendall(_SIZES.pack(len(head), total) + head)
                for data in buffers:
                    self.socket.sendall(data)
        except OSError as error:
            raise PipeError(str(error)) from error

    def receive(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the next message; raises PipeError, or TimeoutError where none begins in time."""
        head_size, total = _SIZES.unpack(self._exactly(_SIZES.size))
        if head_size > LIMIT_HEADER_BYTES or total > LIMIT_TENSOR_BYTES:
            raise PipeError(f"a message of {head_size} and {total} bytes")
        head, body = self._exactly(head_size), self._exactly(total)
        try:
            header: dict[str, Any] = msgspec.msgpack.decode(head)
            tensors, start = {}, 0
            for name, datatype, shape, size in header.pop("tensors"):
                tensors[name] = from_bytes(DATATYPES[datatype], shape, body[start : start + size])
                start += size
        except (msgspec.DecodeError, TensorDataError, LookupError, TypeError) as error:
            raise PipeError(f"a message that cannot be read, {error}") from error
        return header, tensors

    def close(self) -> None:
        """Close this end; a thread that receives gets PipeError."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def _exactly(self, count: int) -> memoryview:
        # Unlike a bytearray, it is not filled with zeros first.
        view, got = aligned_bytes(count).data, 0
        while got < count:
            try:
                size = self.socket.recv_into(view[got:])
            except TimeoutError:
                if not got and count == _SIZES.size:
                    raise
                continue
            except OSError as error:
                raise PipeError(str(error)) from error
            if not size:
                raise PipeError("the other end is closed")
            got += size
        return view


def plain(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return arrays as they can be sent: in the order of C, texts as objects."""
    found = {}
    for name, value in tensors.items():
        array = np.asarray(value)
        if array.dtype.kind in "SU":
            array = array.astype(np.object_)
        found[name] = array if array.flags.c_contiguous else np.ascontiguousarray(array)
    return found
