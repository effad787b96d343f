"""Warm requests make no more Python calls than allowed; counts do not depend on the machine."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

from benchmarks.calls import KINDS, calls_between, of_each

TOOL = Path(__file__).resolve().parents[2] / "tools" / "benchmarks" / "calls.py"
_SECONDS = 240

MOST = {
    "grpc-fast": (47, 52),
    "grpc-compiled": (54, 60),
    "grpc-stream": (67, 73),
    "grpc-shared": (70, 76),
    "grpc-general": (117, 120),
    "rest-json": (36, 39),
    "rest-binary": (88, 97),
    "rest-general": (190, 199),
    "python": (92, 103),
    "frame": (2, 2),
}
"""Maximum calls of our own code per warm request: on Python 3.12 and later, and on 3.11, where
comprehensions are functions. If you save calls, lower a number; raising one needs a reason."""


def test_no_kind_of_request_makes_more_calls() -> None:
    command = [sys.executable, str(TOOL), "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    assert not ran.returncode, ran.stderr[-2000:]
    counted = json.loads(ran.stdout.splitlines()[-1])
    most = {name: pair[sys.version_info < (3, 12)] for name, pair in MOST.items()}

    assert set(KINDS) == set(most) == set(counted)
    assert {} == {name: count for name, count in counted.items() if not 0 < count <= most[name]}


def test_a_call_that_not_every_request_makes_is_none_of_its_own() -> None:
    counts = [Counter(read=2, sweep=1), Counter(read=2), Counter(read=3)]

    assert 2 == of_each(counts)


def test_system_calls_are_counted_between_two_connections() -> None:
    log = """\
7 accept4(9, ..., 2048) = 10
7 read(3, "", 1) = 0
8 accept4(9, ..., 2048 <unfinished ...>
8 <... accept4 resumed>) = 11
7 read(10, "PRI", 3) = 3
8 futex(0x7f, FUTEX_WAIT, 1 <unfinished ...>
7 accept4(9, ...) = -1 EAGAIN (Resource temporarily unavailable)
8 <... futex resumed>) = 0
7 accept4(9, ..., 2048) = 12
7 read(10, "PRI", 3) = 3
"""

    assert {"read": 1, "futex": 1, "accept4": 1} == calls_between(log, 1)
