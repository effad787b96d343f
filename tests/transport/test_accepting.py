"""Connections from the accept queue to their protocol, with and without TLS."""

import asyncio
import errno
import os
import socket
import ssl
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
import uvloop
from structlog.testing import capture_logs
from support.conditions import until
from support.tls import write_certificate

from xlaserve.net import accepting
from xlaserve.net.accepting import Acceptor, Handshakes
from xlaserve.net.tls import ServerTls
from xlaserve.settings import Settings
from xlaserve.settings.choices import TlsEndpoint

Run = Callable[[Coroutine[Any, Any, None]], None]
SECONDS = 20


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a test in each supported event loop."""
    found: Run = request.param
    return found


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    """A listening socket."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        yield found


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    """The CA that signs the certificates."""
    return trustme.CA()


@pytest.fixture
def tls(authority: trustme.CA, tmp_path: Path) -> ServerTls:
    """TLS contexts of a server with a certificate for localhost."""
    found = ServerTls(Settings(repository=tmp_path, **write_certificate(authority, tmp_path)))  # type: ignore[arg-type]
    found.reload()
    return found


class Echo(asyncio.Protocol):
    """Sends a greeting."""

    made: "list[Echo]"

    def __init__(self) -> None:
        self.lost = False

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.made.append(self)
        transport.write(b"hello")

    def connection_lost(self, exc: BaseException | None) -> None:
        self.lost = True


@pytest.fixture
def make() -> type[Echo]:
    """Make a protocol class that lists its connections."""
    return type("Listed", (Echo,), {"made": []})


def connect(listening: socket.socket) -> socket.socket:
    client = socket.create_connection(listening.getsockname(), timeout=SECONDS)
    client.setblocking(False)
    return client


async def received(client: socket.socket, count: int = 100) -> bytes:
    async with asyncio.timeout(SECONDS):
        return await asyncio.get_running_loop().sock_recv(client, count)


def shaking(tls: ServerTls, seconds: float = SECONDS) -> Handshakes:
    make_context = tls.of(TlsEndpoint.HTTP)
    assert make_context is not None
    return Handshakes(make_context, seconds)


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


def close(made: list[Echo]) -> None:
    for protocol in made:
        protocol.transport.abort()


def test_connections_get_their_protocol(
    run: Run, listening: socket.socket, make: type[Echo]
) -> None:
    async def ask() -> None:
        acceptor = Acceptor(listening, make)
        clients = [connect(listening) for _ in range(3)]
        assert [b"hello"] * 3 == [await received(client) for client in clients]
        acceptor.stop()
        close(make.made)
        for client in clients:
            client.close()

    run(ask())


def test_what_waits_at_the_end_is_served_and_nothing_later(
    run: Run, listening: socket.socket, make: type[Echo]
) -> None:
    async def ask() -> None:
        acceptor = Acceptor(listening, make)
        name = listening.getsockname()
        # The loop gets no chance to accept them.
        clients = [connect(listening) for _ in range(50)]
        acceptor.stop()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(name, timeout=SECONDS)
        await acceptor.begun()
        assert [b"hello"] * 50 == [await received(client) for client in clients]
        close(make.made)
        for client in clients:
            client.close()

    run(ask())


def test_a_client_that_trusts_the_server_shakes_hands(
    run: Run, listening: socket.socket, make: type[Echo], tls: ServerTls, authority: trustme.CA
) -> None:
    async def ask() -> None:
        acceptor = Acceptor(listening, make, handshakes=shaking(tls))
        reader, writer = await asyncio.open_connection(
            *listening.getsockname(), ssl=trusting(authority), server_hostname="localhost"
        )
        assert b"hello" == await reader.readexactly(5)
        assert 0 == acceptor.in_handshake
        writer.close()
        acceptor.stop()
        close(make.made)

    run(ask())


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n"])
def test_a_handshake_has_its_time_from_the_accept_on(
    run: Run, listening: socket.socket, make: type[Echo], tls: ServerTls, sent: bytes
) -> None:
    """With no data, half a ClientHello, or another protocol, the connection ends and is logged."""

    async def ask() -> None:
        acceptor = Acceptor(listening, make, name="here", handshakes=shaking(tls, 0.2))
        with capture_logs() as log:
            client = connect(listening)
            client.send(sent)
            await until(lambda: log and not acceptor.in_handshake)
            # An alert may come first.
            try:
                while await received(client):
                    pass
            except ConnectionError:
                pass
        client.close()
        acceptor.stop()
        assert not make.made
        assert [("connection not accepted", "here", "127.0.0.1")] == [
            (record["event"], record["listener"], record["peer"]) for record in log
        ]

    run(ask())


def test_handshakes_count_as_connections(
    run: Run, listening: socket.socket, make: type[Echo], tls: ServerTls
) -> None:
    """A connection above the limit is closed immediately, before its handshake costs anything."""

    async def ask() -> None:
        acceptor = Acceptor(
            listening,
            make,
            handshakes=shaking(tls),
            is_full=lambda: acceptor.in_handshake >= 2,
        )
        with capture_logs() as log:
            clients = [connect(listening) for _ in range(2)]
            await until(lambda: 2 == acceptor.in_handshake)
            with connect(listening) as refused:
                assert b"" == await received(refused)
        assert 2 == acceptor.in_handshake
        assert "too many connections are open" == log[0]["reason"]
        acceptor.stop()
        await acceptor.aborted()
        for client in clients:
            assert b"" == await received(client)
            client.close()

    run(ask())


def test_a_silent_connection_holds_no_handshake(
    run: Run, listening: socket.socket, make: type[Echo], tls: ServerTls
) -> None:
    """OpenSSL's 50 KB are allocated when the client sends its first bytes."""
    handshakes = shaking(tls)
    contexts: list[ssl.SSLContext] = []

    def make_context() -> ssl.SSLContext:
        contexts.append(handshakes.make_context())
        return contexts[-1]

    async def ask() -> None:
        acceptor = Acceptor(listening, make, handshakes=Handshakes(make_context, SECONDS))
        client = connect(listening)
        await until(lambda: acceptor.in_handshake)
        for _ in range(10):
            await asyncio.sleep(0)
        assert not contexts
        client.send(b"\x16")
        await until(lambda: contexts)
        client.close()
        acceptor.stop()
        await acceptor.aborted()

    run(ask())


def test_failures_are_counted_and_not_said_one_by_one(
    run: Run,
    listening: socket.socket,
    make: type[Echo],
    tls: ServerTls,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A flood of broken handshakes must not fill the log."""
    now = [100.0]
    monkeypatch.setattr(accepting, "_now", lambda: now[0])

    async def fail(acceptor: Acceptor) -> None:
        client = connect(listening)
        client.send(b"nothing\r\n\r\n")
        try:
            while await received(client):
                pass
        except ConnectionError:
            pass
        client.close()
        await until(lambda: not acceptor.in_handshake)

    async def ask() -> None:
        acceptor = Acceptor(listening, make, handshakes=shaking(tls))
        with capture_logs() as log:
            for _ in range(3):
                await fail(acceptor)
            now[0] += 2
            await fail(acceptor)
        acceptor.stop()
        assert [0, 2] == [record["more_before"] for record in log]

    run(ask())


def test_accepting_goes_on_after_files_ran_out(
    run: Run, listening: socket.socket, make: type[Echo], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepting, "_RETRY_SECONDS", 0.01)

    class Exhausted:
        """A listening socket of a process that runs out of file descriptors twice."""

        left = 2

        def __getattr__(self, name: str) -> Any:
            return getattr(listening, name)

        def accept(self) -> Any:
            if self.left:
                self.left -= 1
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return listening.accept()

    async def ask() -> None:
        exhausted: Any = Exhausted()
        acceptor = Acceptor(exhausted, make)
        with capture_logs() as log:
            client = connect(listening)
            assert b"hello" == await received(client)
        assert 2 == len(log)
        client.close()
        acceptor.stop()
        close(make.made)

    run(ask())


def test_a_new_certificate_is_shown_to_new_connections(
    run: Run,
    listening: socket.socket,
    make: type[Echo],
    tls: ServerTls,
    authority: trustme.CA,
    tmp_path: Path,
) -> None:
    """Open connections continue."""

    async def serial() -> tuple[str, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(
            *listening.getsockname(), ssl=trusting(authority), server_hostname="localhost"
        )
        assert b"hello" == await reader.readexactly(5)
        return writer.get_extra_info("peercert")["serialNumber"], writer

    async def ask() -> None:
        acceptor = Acceptor(listening, make, handshakes=shaking(tls))
        first, one = await serial()
        write_certificate(authority, tmp_path)
        tls.reload()
        second, two = await serial()
        assert first != second
        assert not any(protocol.lost for protocol in make.made)
        for writer in (one, two):
            writer.close()
        acceptor.stop()
        close(make.made)

    run(ask())
