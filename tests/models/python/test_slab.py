"""Memory shared between a server and a model process, and the messages through it."""

import gc
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from xlaserve.python_models.process.pipe import Pipe, PipeError
from xlaserve.python_models.process.slab import (
    LEAST_BYTES,
    SlabError,
    SlabReader,
    SlabWriter,
    make_slab,
)
from xlaserve.tensors import DATATYPES, from_bytes

SIZE = 1 << 20
large = np.arange(60_000, dtype=np.float32)


@contextmanager
def slab(size: int = SIZE) -> Iterator[tuple[SlabWriter, SlabReader, int]]:
    descriptor = make_slab(size)
    try:
        yield SlabWriter(descriptor), SlabReader(descriptor, writable=False), descriptor
    finally:
        os.close(descriptor)


@contextmanager
def pipes(size: int = SIZE) -> Iterator[tuple[Pipe, Pipe]]:
    """Yield the two ends of a pipe; the first writes to a slab that the second reads."""
    ends = socket.socketpair()
    with slab(size) as (writer, reader, _), slab(size) as (back, forth, _):
        first, second = Pipe(ends[0], writer, forth), Pipe(ends[1], back, reader)
        yield first, second
        first.close()
        second.close()


def written(writer: SlabWriter, size: int) -> int | None:
    return writer.write([bytes(size)])


def test_nobody_can_truncate_what_the_other_has_mapped() -> None:
    """Reading past the end of a truncated file raises SIGBUS, which would end the server."""
    with slab() as (_, reader, descriptor):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 0)
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 2 * SIZE)

        assert bytes(SIZE) == reader.view(0, SIZE)


def test_memory_is_given_again_once_it_was_released() -> None:
    with slab() as (writer, _, _):
        places = [written(writer, SIZE // 4) for _ in range(4)]
        full = written(writer, 1)
        for place in (places[2], places[1]):
            assert place is not None
            writer.release(place)
        both = written(writer, SIZE // 2)

    assert [0, SIZE // 4, SIZE // 2, 3 * SIZE // 4] == places
    assert full is None
    assert SIZE // 4 == both


def test_what_was_not_written_cannot_be_released_or_viewed() -> None:
    with slab() as (writer, reader, _):
        with pytest.raises(SlabError):
            writer.release(0)
        for start, count in ((-1, 1), (0, SIZE + 1), (SIZE, 1), (4, -8)):
            with pytest.raises(SlabError):
                reader.view(start, count)


def test_a_place_is_dropped_with_the_last_array_of_it() -> None:
    with slab() as (_, reader, _):
        array = from_bytes(DATATYPES["FP32"], (100,), reader.view(4096, 600)[64:464])
        part = array[3:5].reshape(2, 1)
        del array
        gc.collect()
        kept = reader.dropped()
        del part
        gc.collect()

        assert ([], [4096]) == (kept, reader.dropped())


def test_large_tensors_pass_through_the_slab_and_leave_it() -> None:
    texts = np.array([b"x" * 70_000, b""], np.object_)
    with pipes() as (first, second):
        for number in range(40):
            first.send({"kind": "a"}, {"x": large + number, "t": texts, "n": np.ones((), np.int8)})
            header, found = second.receive()

            assert ({"kind": "a"}, ["x", "t", "n"]) == (header, list(found))
            np.testing.assert_array_equal(large + number, found["x"])
            assert not found["x"].flags.writeable
            assert (texts.tolist(), 1) == (found["t"].tolist(), int(found["n"]))
            # Dropped memory is reported in the next message of the other side.
            del found
            second.send({"kind": "b"})
            first.receive()


def test_what_does_not_fit_goes_through_the_pipe() -> None:
    with pipes() as (first, second):
        kept = []
        for _ in range(10):
            sending = threading.Thread(target=first.send, args=({"kind": "a"}, {"x": large}))
            sending.start()
            kept.append(second.receive()[1]["x"])
            sending.join()

    assert [False] * 4 + [True] * 6 == [array.flags.writeable for array in kept]
    for array in kept:
        np.testing.assert_array_equal(large, array)


@pytest.mark.parametrize(
    ("place", "dropped"), [(SIZE, []), (-1, []), ("x", []), (None, [7]), (None, 3)]
)
def test_a_message_of_memory_that_is_not_there_is_refused(place: Any, dropped: Any) -> None:
    head = msgspec.msgpack.encode(({"kind": "a"}, [("x", "FP32", (3,), 12)], place, dropped))
    with pipes() as (first, second):
        first.socket.sendall(struct.pack("<IQ", len(head), 0) + head)
        with pytest.raises(PipeError, match="a message that cannot be read"):
            second.receive()


def test_what_cannot_be_said_takes_no_place_and_forgets_nothing() -> None:
    """The header cannot be encoded; the next message is unaffected."""
    short = large[: LEAST_BYTES // 4]  # which the pipe would take, too
    with pipes() as (first, second):
        first.send({"kind": "a"}, {"x": short})
        second.receive()  # and drop it
        for sender in (first, second):
            for _ in range(SIZE // LEAST_BYTES + 1):
                with pytest.raises(TypeError):
                    sender.send({"kind": object()}, {"x": short})
        second.send({"kind": "b"})
        first.receive()
        first.send({"kind": "c"}, {"x": short})
        _, found = second.receive()
        is_shared = not found["x"].flags.writeable
        places = [
            writer._allocated for writer in (first.writer, second.writer) if writer is not None
        ]

    assert is_shared
    assert [1, 0] == [len(one) for one in places]


def test_no_slab_is_made_of_no_bytes() -> None:
    assert make_slab(0) == -1
