"""A client that must not suffer, in a separate process so that attackers cannot hold its GIL.

    python victim_process.py HOST:PORT

It sends requests until standard input ends, and then prints its observations as JSON.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[2] / "tests"


@dataclass(slots=True)
class Seen:
    """Observations of a victim."""

    calls: int = 0
    worst_seconds: float = 0.0
    errors: list[str] = field(default_factory=list)


@contextmanager
def victim(url: str) -> Iterator[Seen]:
    """Have a victim send requests for the duration of a block; it reports afterwards."""
    seen = Seen()
    process = subprocess.Popen(
        [sys.executable, __file__, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdout.readline()  # return after its first call
    try:
        yield seen
    finally:
        written, _ = process.communicate()
        found = json.loads(written.splitlines()[-1])
        seen.calls, seen.worst_seconds = found["calls"], found["worst_seconds"]
        seen.errors = found["errors"]


def main() -> None:
    """Send requests until standard input ends."""
    sys.path.append(str(_TESTS))
    from support.victim import Victim

    running, first = Victim(sys.argv[1]), threading.Event()
    with running:
        while not running.calls:
            first.wait(0.01)
        # Forget the first call, which opened the connection.
        running.worst_seconds = 0.0
        print("served", flush=True)
        sys.stdin.read()
    found = {
        "calls": running.calls,
        "worst_seconds": running.worst_seconds,
        "errors": running.errors[:10],
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
