"""Echo bytes through a bare TCP socket, as a lower bound for any server.

    python tools/raw_echo.py serve PORT BYTES
    python tools/raw_echo.py measure PORT BYTES COUNT     prints the seconds of each as JSON

Like a model server, the echo receives the whole message before it answers.
"""

import argparse
import json
import socket
import sys
import time

HOST = "127.0.0.1"


def serve(port: int, size: int) -> None:
    """Echo messages of a fixed size, to one client after the other, forever."""
    buffer = memoryview(bytearray(size))
    with socket.create_server((HOST, port)) as listener:
        print("listening", flush=True)
        while True:
            client, _ = listener.accept()
            with client:
                while receive(client, buffer):
                    client.sendall(buffer)


def measure(port: int, size: int, count: int) -> list[float]:
    """Return the round-trip seconds of `count` messages, sent one at a time."""
    message, answer = memoryview(bytes(size)), memoryview(bytearray(size))
    seconds = []
    with socket.create_connection((HOST, port)) as server:
        for _ in range(count):
            started = time.perf_counter()
            server.sendall(message)
            if not receive(server, answer):
                sys.exit("the echo ended")
            seconds.append(time.perf_counter() - started)
    return seconds


def receive(peer: socket.socket, buffer: memoryview) -> bool:
    """Fill the buffer; return False if the connection ends first."""
    have = 0
    while have < len(buffer):
        count = peer.recv_into(buffer[have:])
        if not count:
            return False
        have += count
    return True


def main() -> None:
    """Parse the arguments, and serve or measure."""
    parser = argparse.ArgumentParser(description="Echo bytes over TCP.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("serve", "measure"):
        command = commands.add_parser(name)
        command.add_argument("port", type=int)
        command.add_argument("bytes", type=int)
        if name == "measure":
            command.add_argument("count", type=int)
    arguments = parser.parse_args()
    if arguments.command == "serve":
        serve(arguments.port, arguments.bytes)
    else:
        print(json.dumps(measure(arguments.port, arguments.bytes, arguments.count)))


if __name__ == "__main__":
    main()
