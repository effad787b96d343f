"""Addresses that a transport listens on."""

import socket
import stat
from contextlib import ExitStack
from pathlib import Path

import pytest

from xlaserve.errors import InvalidSettings
from xlaserve.process.endpoints import Endpoint, Listener, check_grpc_endpoints, listen


def on_unix(path: Path, mode: int = 0o666) -> Listener:
    return listen("grpc_endpoint", Endpoint(path=path), host="", unix_socket_mode=mode, backlog=8)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("port:8001", Endpoint(port=8001)),
        ("port:0", Endpoint(port=0)),
        ("unix:/tmp/x.sock", Endpoint(path=Path("/tmp/x.sock"))),
        ("systemd:grpc", Endpoint(name="grpc")),
        ("none", None),
    ],
)
def test_an_endpoint_is_a_port_or_a_socket(text: str, expected: Endpoint | None) -> None:
    assert expected == Endpoint.parse("grpc_endpoint", text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "8001",
        "port:",
        "port:-1",
        "port:65536",
        "port:x",
        "unix:",
        "unix:/" + "x" * 107,
        "systemd:",
    ],
)
def test_anything_else_is_refused_by_the_name_of_the_setting(text: str) -> None:
    with pytest.raises(InvalidSettings, match="grpc_endpoint"):
        Endpoint.parse("grpc_endpoint", text)


def test_a_free_port_is_reported() -> None:
    listener = listen(
        "grpc_endpoint", Endpoint(port=0), host="127.0.0.1", unix_socket_mode=0, backlog=8
    )
    host, port = listener.address.split(":")

    assert isinstance(listener.socket, socket.socket)
    assert ("127.0.0.1", listener.socket.getsockname()[1]) == (host, int(port))

    listener.close()


def test_a_taken_port_is_refused() -> None:
    taken = listen(
        "grpc_endpoint", Endpoint(port=0), host="127.0.0.1", unix_socket_mode=0, backlog=8
    )
    port = int(taken.address.split(":")[1])
    with pytest.raises(InvalidSettings, match="in use"):
        listen(
            "grpc_endpoint", Endpoint(port=port), host="127.0.0.1", unix_socket_mode=0, backlog=8
        )

    taken.close()


def test_a_unix_socket_has_its_mode_and_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "s"
    listener = on_unix(path, 0o660)

    assert 0o660 == stat.S_IMODE(path.stat().st_mode)

    listener.close()

    assert not path.exists()


def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    on_unix(path).close()


def test_a_socket_that_somebody_serves_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    listener = on_unix(path)
    with pytest.raises(InvalidSettings, match="not in use by another process"):
        on_unix(path)

    assert path.exists()

    listener.close()


def test_a_socket_whose_accept_queue_is_full_is_left_alone(tmp_path: Path) -> None:
    """The check does not block: the queue may stay full for long."""
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as busy, ExitStack() as stack:
        busy.bind(str(path))
        busy.listen(0)
        for _ in range(4):
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            client.connect_ex(str(path))
        with pytest.raises(InvalidSettings, match="not in use by another process"):
            on_unix(path)

    assert path.exists()


def test_a_socket_of_another_kind_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams:
        datagrams.bind(str(path))
        with pytest.raises(InvalidSettings, match="not in use by another process"):
            on_unix(path)

    assert path.exists()


def test_the_socket_of_the_next_server_is_left_alone(tmp_path: Path) -> None:
    """A draining server has stopped listening, and its successor takes over the path."""
    path = tmp_path / "s"
    first = on_unix(path)
    first.socket.close()
    second = on_unix(path)
    first.close()

    assert path.exists()

    second.close()

    assert not path.exists()


def test_a_file_in_place_of_a_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("precious")
    with pytest.raises(InvalidSettings, match="a path that does not exist"):
        on_unix(path)

    assert "precious" == path.read_text()


def test_two_sockets_share_a_directory() -> None:
    """ModelMesh, Deploying a Runtime: the directory becomes a mount in all containers."""
    grpc, data = Endpoint(path=Path("/a/grpc.sock")), Endpoint(path=Path("/a/data.sock"))
    elsewhere = Endpoint(path=Path("/b/data.sock"))
    check_grpc_endpoints({"grpc_endpoint": grpc, "grpc_data_endpoint": data})
    check_grpc_endpoints({"grpc_endpoint": Endpoint(port=1), "grpc_data_endpoint": elsewhere})

    with pytest.raises(InvalidSettings, match="grpc_data_endpoint: expected a socket in the same"):
        check_grpc_endpoints({"grpc_endpoint": grpc, "grpc_data_endpoint": elsewhere})
    with pytest.raises(InvalidSettings, match="grpc_endpoint"):
        check_grpc_endpoints({"grpc_endpoint": None})
