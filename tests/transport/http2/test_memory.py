"""Message memory is reused once unreferenced, and the amount kept is bounded."""

import gc
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from xlaserve.net.memory import SMALLEST_BYTES, MessageMemory, Octets, fresh
from xlaserve.tensors import ALIGNMENT

SIZE = SMALLEST_BYTES
LIMIT = 4 * SIZE


def address(block: Octets) -> int:
    return block.ctypes.data


def test_memory_is_used_again_once_nobody_refers_to_it() -> None:
    memory = MessageMemory(LIMIT)
    first = memory.take(SIZE)
    where = address(first)
    del first

    assert where == address(memory.take(SIZE))


def aligned(octets: memoryview) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    """Return an array that JAX accepts without a copy."""
    array = np.frombuffer(octets, np.uint8)
    return array[-array.ctypes.data % ALIGNMENT :][: SIZE // 2].view(np.float32)


VIEWS: dict[str, Callable[[memoryview], object]] = {
    "bytes": lambda octets: octets[64:].cast("I"),
    "tensor": lambda octets: np.ndarray((2, 3), np.float32, octets, 8),
    "part of a tensor": lambda octets: np.ndarray((2, 3), np.float32, octets, 8)[1:].T,
    "from a buffer": lambda octets: np.frombuffer(octets, np.float32)[8:].reshape(2, -1),
    "array": lambda octets: np.asarray(octets).view(np.int8)[::2],
    "in place in JAX": lambda octets: jax.device_put(aligned(octets), jax.devices("cpu")[0]),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_memory_is_not_used_again_while_there_is_any_view_of_it(
    view: Callable[[memoryview], object],
) -> None:
    memory = MessageMemory(LIMIT)
    first = memory.take(SIZE)
    held = view(first.data.cast("B"))
    where = address(first)
    del first
    gc.collect()

    assert 0 == memory.spare_bytes
    assert where != address(memory.take(SIZE))
    del held
    gc.collect()
    assert 2 * SIZE == memory.spare_bytes


def test_memory_that_only_garbage_refers_to_is_used_again() -> None:
    """As with the last message, which JAX has read in place."""
    memory = MessageMemory(LIMIT)
    first = memory.take(SIZE)
    where = address(first)
    cycle: list[object] = [first]
    cycle.append(cycle)
    del first, cycle

    assert where == address(memory.take(SIZE))


def test_a_block_serves_messages_that_are_somewhat_smaller() -> None:
    memory = MessageMemory(LIMIT)
    where = address(memory.take(2 * SIZE))

    assert where == address(memory.take(SIZE + 1))
    assert SIZE + 1 == len(memory.take(SIZE + 1))


@pytest.mark.parametrize(("kept", "size"), [(LIMIT, LIMIT), (2 * SIZE, SIZE), (SIZE, SIZE)])
def test_a_block_serves_the_longest_and_the_shortest_that_it_may(kept: int, size: int) -> None:
    """From half a block to all of the kept memory, nothing is mapped anew."""
    memory = MessageMemory(LIMIT)
    where = address(memory.take(kept))

    assert kept == memory.spare_bytes
    assert where == address(memory.take(size))
    assert kept == memory.spare_bytes


def test_a_block_does_not_serve_a_message_of_less_than_half() -> None:
    """The rest of the block would stay in use for as long as the message."""
    memory = MessageMemory(LIMIT)
    where = address(memory.take(4 * SIZE))
    message = memory.take(2 * SIZE - 1)

    assert where != address(message)
    assert 2 * SIZE - 1 == len(message)


def test_memory_is_mapped_from_the_shortest_on_that_is_kept() -> None:
    """Shorter buffers come from the C library, which reuses freed memory."""
    short, long = fresh(SMALLEST_BYTES - 1), fresh(SMALLEST_BYTES)

    assert (True, False) == (short.base is None, long.base is None)


def test_what_is_too_small_for_a_message_goes_when_it_gets_a_new_block() -> None:
    memory = MessageMemory(LIMIT)
    memory.take(SIZE)
    large = memory.take(2 * SIZE)

    assert 0 == memory.spare_bytes
    del large
    assert 2 * SIZE == memory.spare_bytes


def test_no_more_is_kept_than_the_limit() -> None:
    memory = MessageMemory(LIMIT)
    blocks = [memory.take(SIZE) for _ in range(10)]
    del blocks

    assert LIMIT == memory.spare_bytes


def test_nothing_is_kept_with_a_limit_of_nothing_or_of_what_is_short() -> None:
    MessageMemory(0).take(SIZE)
    memory = MessageMemory(LIMIT)
    memory.take(SIZE - 1)

    assert 0 == memory.spare_bytes


def test_what_nobody_has_used_for_long_is_given_back() -> None:
    times = [0.0]
    memory = MessageMemory(LIMIT, lambda: times[0])
    old, new = memory.take(SIZE), memory.take(SIZE)
    del old
    times[0] = 5.0
    del new

    memory.drop_unused(4.0)
    assert SIZE == memory.spare_bytes
    memory.drop_unused(5.0)
    assert SIZE == memory.spare_bytes
    times[0] = 10.0
    memory.drop_unused(5.0)
    assert SIZE == memory.spare_bytes
    times[0] = 10.5
    memory.drop_unused(5.0)

    assert 0 == memory.spare_bytes


def test_long_memory_is_private() -> None:
    """Shared memory has only small pages: touching 64 MiB takes 100 ms instead of 14."""
    octets = fresh(4 << 20)
    where = address(octets)
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= where < last:
            assert "rw-p" == line.split()[1]
            break
    else:
        pytest.fail("it is not mapped")


@pytest.mark.parametrize(("size", "expected"), [(SIZE, "nh"), (16 << 20, "nh"), (64 << 20, "hg")])
def test_only_very_long_messages_have_huge_pages(size: int, expected: str) -> None:
    """The first touch of a huge page blocks the event loop for longer than a turn may take."""
    block = fresh(size)

    assert expected in _flags(address(block))


def _flags(where: int) -> list[str]:
    """Return the kernel's flags for the memory at an address."""
    is_there = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if "-" in name:
            first, last = (int(one, 16) for one in name.split("-"))
            is_there = first <= where < last
        elif is_there and name == "VmFlags:":
            return rest
    raise AssertionError(f"nothing is mapped at {where:x}")
