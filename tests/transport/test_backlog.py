"""The accept backlog is that of the setting, on every endpoint."""

import asyncio
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import uvloop
from structlog.testing import capture_logs
from support.server import Serve

from xlaserve.process import endpoints
from xlaserve.process.endpoints import check_backlog

BACKLOG = 7
_BACKLOG_OF_TCP_INFO = 28
"""Offset of tcpi_sacked, which holds the backlog of a listening socket (linux/tcp.h)."""
_MOST = 4 * BACKLOG


def backlog_of_port(port: int) -> int:
    """Return the backlog of a listening socket of this process."""
    for listening in listening_sockets():
        if listening.family == socket.AF_INET and listening.getsockname()[1] == port:
            info = listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
            backlog: int = struct.unpack_from("i", info, _BACKLOG_OF_TCP_INFO)[0]
            return backlog
    raise AssertionError(f"nothing listens on {port}")


def listening_sockets() -> Iterator[socket.socket]:
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError), socket.socket(fileno=os.dup(int(entry.name))) as found:
            if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield found


def backlog_of_path(path: str) -> int:
    """Connect until the queue is full; nothing is accepted meanwhile, as this does not await."""
    with ExitStack() as stack:
        for count in range(_MOST):
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            if client.connect_ex(path):
                return count - 1  # Linux queues one more than the backlog
    raise AssertionError(f"{_MOST} wait")


async def accepted() -> None:
    """Let the event loop accept the queue: asyncio leaks connections of a closed server."""
    for _ in range(_MOST):
        await asyncio.sleep(0)


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_the_backlog_of_every_endpoint_is_the_setting(
    serve: Serve, tmp_path: Path, make_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def read_back() -> list[int]:
        data = f"unix:{tmp_path}/data.sock"
        async with serve(
            tmp_path, http_endpoint="port:0", grpc_data_endpoint=data, listen_backlog=BACKLOG
        ) as server:
            assert server.http is not None
            ports = (int(url.rpartition(":")[2]) for url in (server.url, server.http))
            found = [*map(backlog_of_port, ports), backlog_of_path(f"{tmp_path}/data.sock")]
            await accepted()
            return found

    async def read_back_turned() -> list[int]:
        grpc, http = f"{tmp_path}/grpc.sock", f"{tmp_path}/http.sock"
        unix = {"grpc_endpoint": f"unix:{grpc}", "http_endpoint": f"unix:{http}"}
        async with serve(tmp_path, **unix, listen_backlog=BACKLOG):
            found = [backlog_of_path(grpc), backlog_of_path(http)]
            await accepted()
            return found

    with asyncio.Runner(loop_factory=make_loop) as runner:
        found = runner.run(read_back()) + runner.run(read_back_turned())

    assert [BACKLOG] * 5 == found


@pytest.mark.parametrize(("longest", "told"), [("6\n", True), ("7\n", False), (None, False)])
def test_a_backlog_that_the_system_shortens_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, longest: str | None, *, told: bool
) -> None:
    file = tmp_path / "somaxconn"
    if longest is not None:
        file.write_text(longest)
    monkeypatch.setattr(endpoints, "_LONGEST_BACKLOG", file)
    with capture_logs() as log:
        check_backlog(BACKLOG)

    assert told is bool(log)
