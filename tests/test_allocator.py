"""Memory kept by the allocator, in subprocesses, because its settings cannot be undone."""

import os
import subprocess
import sys

import pytest

from xlaserve.process import allocator

_LARGE = """
import numpy as np
from xlaserve.process import allocator
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
from xlaserve.process import allocator
def held(): return allocator.resident_bytes() >> 20
blocks = [b"a" * (64 << 10) for _ in range(1600)]
last = b"a" * (64 << 10)
del blocks
full = held()
allocator.trim()
print(full - held())
"""


_AGAIN = """
import resource, sys, threading
import numpy as np
from xlaserve.process import allocator
allocator.give_back_large_blocks({}, kept_bytes=int(sys.argv[1]))
def faults():
    def count(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(100 << 20, np.uint8)
    before = count()
    np.ones(100 << 20, np.uint8)
    found.append(count() - before)
found = []
threads = [threading.Thread(target=faults) for _ in range(4)]
for thread in threads:
    thread.start()
    thread.join()
print(max(found))
"""
_FEW_FAULTS = 1000


def faults(kept_bytes: int) -> int:
    """Take, free and retake 100 MiB in threads; return the most page faults of the second time."""
    command = [sys.executable, "-c", _AGAIN, str(kept_bytes)]
    # A huge page would be one fault instead of many.
    environment = {**os.environ, "NUMPY_MADVISE_HUGEPAGE": "0"}
    run = subprocess.run(command, capture_output=True, check=True, timeout=120, env=environment)
    return int(run.stdout)


def given_back(program: str) -> int:
    """Free 100 MiB in a subprocess; return how many of them return to the system."""
    command = [sys.executable, "-c", program]
    return int(subprocess.run(command, capture_output=True, check=True, timeout=120).stdout)


def test_large_blocks_are_given_back_as_soon_as_they_are_free() -> None:
    assert 95 < given_back(_LARGE) < 105


def test_blocks_that_are_to_be_kept_are_not_mapped_anew() -> None:
    """Reusing a freed block causes no page faults, in any thread."""
    assert _FEW_FAULTS > faults(kept_bytes=256 << 20)
    assert _FEW_FAULTS < faults(kept_bytes=0)


def test_what_is_kept_is_given_back_by_a_trim() -> None:
    keeping = _LARGE.replace("({})", "({}, kept_bytes=256 << 20)")
    trimmed = keeping.replace("del blocks", "del blocks; allocator.trim()")

    assert given_back(keeping) < 5
    assert 95 < given_back(trimmed) < 105


def test_a_trim_gives_back_what_is_free() -> None:
    assert 95 < given_back(_SMALL) < 105


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "GLIBC_TUNABLES"])
def test_what_an_operator_has_decided_is_left(name: str) -> None:
    assert not allocator.give_back_large_blocks({name: "1"})
