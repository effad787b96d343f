"""Connection hand-off: which worker gets a new connection."""

import asyncio
import socket
from dataclasses import dataclass

import pytest

from xlaserve.workers.handing import Handing

MOST_SECONDS = 30


@dataclass
class Taker:
    """A fake worker that counts the connections it gets."""

    connections: int
    takes_connections: bool = True
    is_full: bool = False

    def hand(self, setting: str, connection: socket.socket) -> bool:
        if not self.is_full:
            self.connections += 1
        return not self.is_full


async def handed(takers: list[Taker], count: int) -> list[int]:
    """Open connections, and return the number that each worker has once all are handed over."""
    before = sum(taker.connections for taker in takers)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        handing = Handing("grpc_endpoint", listening, lambda: takers)
        clients = [socket.create_connection(listening.getsockname()) for _ in range(count)]
        async with asyncio.timeout(MOST_SECONDS):
            while sum(taker.connections for taker in takers) < before + count:
                await asyncio.sleep(0.001)
        handing.stop(drain=False)
        for client in clients:
            client.close()
    return [taker.connections for taker in takers]


@pytest.mark.parametrize(
    ("takers", "count", "expected"),
    [
        ([Taker(0), Taker(0)], 64, [32, 32]),
        ([Taker(0), Taker(6)], 4, [4, 6]),
        ([Taker(5), Taker(0), Taker(3)], 10, [6, 6, 6]),
        ([Taker(0, takes_connections=False), Taker(9)], 3, [0, 12]),
        ([Taker(0, is_full=True), Taker(9)], 3, [0, 12]),
    ],
)
async def test_a_connection_goes_to_the_worker_that_has_the_fewest(
    takers: list[Taker], count: int, expected: list[int]
) -> None:
    """Workers that refuse or cannot take one are skipped."""
    assert expected == await handed(takers, count)
