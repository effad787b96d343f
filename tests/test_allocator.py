"""What the allocator keeps, asked in processes of its own: its settings cannot be taken back."""

import subprocess
import sys

import pytest

from xlaserve import allocator

_LARGE = """
import numpy as np
from xlaserve import allocator
def held(): return allocator.resident_bytes() >> 20
allocator.give_back_large_blocks({})
for _ in range(3):
    np.ones(30 << 20, np.uint8)  # by which glibc would learn to keep such blocks
blocks = [np.ones(10 << 20, np.uint8) for _ in range(10)]
last = np.ones(1 << 20, np.uint8)  # so that what is below it is not at the end of the heap
full = held()
del blocks
print(full - held())
"""
_SMALL = """
from xlaserve import allocator
def held(): return allocator.resident_bytes() >> 20
blocks = [b"a" * (64 << 10) for _ in range(1600)]
last = b"a" * (64 << 10)
del blocks
full = held()
allocator.trim()
print(full - held())
"""


def given_back(program: str) -> int:
    """Free 100 MiB in a process; return how many of them the system has again."""
    command = [sys.executable, "-c", program]
    return int(subprocess.run(command, capture_output=True, check=True, timeout=120).stdout)


def test_large_blocks_are_given_back_as_soon_as_they_are_free() -> None:
    assert 95 < given_back(_LARGE) < 105


def test_a_trim_gives_back_what_is_free() -> None:
    assert 95 < given_back(_SMALL) < 105


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "GLIBC_TUNABLES"])
def test_what_an_operator_has_decided_is_left(name: str) -> None:
    assert not allocator.give_back_large_blocks({name: "1"})
