"""Clients in a separate process that send requests during chaos and report their observations.

    python tools/acceptance/bystanders.py GRPC HTTP

They send requests until standard input ends, and reconnect if a connection breaks. Then they print
JSON: the number of requests, the wrong answers, the failed requests with their times, and a sample
of the latencies.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

_TOOLS = Path(__file__).resolve().parents[1]
_CLIENTS = 4
_PACE_SECONDS = 0.005
_PATIENCE_SECONDS = 20.0
_KEPT = 200_000
_AGAIN_SECONDS = 0.1


@dataclass(slots=True)
class Sight:
    """Observations of all clients, with wall-clock times."""

    asked: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: list[tuple[float, float, str]] = field(default_factory=list)
    """Start, end and error of each failed request."""
    latencies: list[tuple[float, float]] = field(default_factory=list)
    """Start time and duration in seconds of the sampled requests."""


@contextmanager
def bystanders(grpc_url: str, http_url: str) -> Iterator[Sight]:
    """Run clients for the duration of a block; their observations are complete once it ends."""
    sight = Sight()
    process = subprocess.Popen(
        [sys.executable, __file__, grpc_url, http_url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield sight
    finally:
        written, _ = process.communicate()
        found = json.loads(written.splitlines()[-1])
        sight.asked, sight.wrong = found["asked"], found["wrong"]
        sight.failed = [tuple(one) for one in found["failed"]]
        sight.latencies = [tuple(one) for one in found["latencies"]]


async def _watch(grpc_url: str, http_url: str) -> Sight:
    from acceptance.asking import Tally, ask_once, clients

    sight, is_over = Sight(), asyncio.Event()

    async def one(number: int) -> None:
        random = Random(number)
        while not is_over.is_set():
            try:
                # The second client of a pair uses HTTP.
                async with clients(grpc_url, http_url, 2, _PATIENCE_SECONDS) as pair:
                    client = pair[number % 2]
                    while not is_over.is_set():
                        began, tally = time.time(), Tally()
                        await ask_once(client, tally, random)
                        sight.asked += 1
                        sight.wrong += tally.wrong
                        if tally.lost:
                            sight.failed.append((began, time.time(), tally.lost[0]))
                            break
                        if len(sight.latencies) < _KEPT or not random.randrange(10):
                            place = len(sight.latencies)
                            if place >= _KEPT:
                                sight.latencies[random.randrange(_KEPT)] = began, tally.seconds[0]
                            else:
                                sight.latencies.append((began, tally.seconds[0]))
                        await asyncio.sleep(_PACE_SECONDS)
            except OSError:
                pass  # the server is restarting: nobody listens
            await asyncio.sleep(_AGAIN_SECONDS)

    async with asyncio.TaskGroup() as group:
        for number in range(_CLIENTS):
            group.create_task(one(number))
        await asyncio.to_thread(sys.stdin.read)
        is_over.set()
    return sight


def main() -> None:
    """Send requests until standard input ends."""
    sys.path[0] = str(_TOOLS)
    sys.path.append(str(_TOOLS.parent / "tests"))
    sight = asyncio.run(_watch(sys.argv[1], sys.argv[2]))
    found = {name: getattr(sight, name) for name in ("asked", "wrong", "failed", "latencies")}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
