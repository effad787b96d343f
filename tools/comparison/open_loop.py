"""An open-loop client: sends each request when it is due, whether or not others were answered.

h2load has such a mode too, but sends in bursts all requests that are due within ten milliseconds.
Here every request has its own due time, from which its latency is measured, so delays in the client
count as well.
"""

import selectors
import socket
import time
from collections.abc import Sequence

from comparison.varying import Http2Speaker, Load

_SILENCE_SECONDS = 10.0
"""Timeout for the last answers."""
_RECEIVE_BYTES = 1 << 18


class _Connection:
    def __init__(self, load: Load) -> None:
        self._requests = load.requests
        self._speaker = Http2Speaker()
        self._due: list[float] = []
        """Due time of each request; the stream id is twice the index plus one."""
        self.socket = socket.create_connection(("127.0.0.1", load.port), timeout=_SILENCE_SECONDS)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.sendall(load.greeting)

    def send(self, due: float) -> None:
        """Send the next request and record its due time."""
        self.socket.sendall(self._requests[len(self._due)])
        self._due.append(due)

    def receive(self, latencies: list[float]) -> None:
        """Read from the socket, and append the latency of each complete answer."""
        data = self.socket.recv(_RECEIVE_BYTES)
        if not data:
            raise ValueError("the connection was closed")
        now = time.perf_counter()
        self._speaker.answered(data)
        latencies.extend(now - self._due[stream // 2] for stream in self._speaker.ended)
        self._speaker.ended.clear()
        if reply := self._speaker.reply():
            self.socket.sendall(reply)


def open_loop(load: Load, rate: float, seconds: float) -> Sequence[float]:
    """Send requests at a fixed rate, alternating between connections; return latencies in seconds.

    Raises ValueError for anything but a successful answer, and OSError if a connection breaks.
    """
    total = round(rate * seconds)
    latencies: list[float] = []
    connections: list[_Connection] = []
    # Timeouts of select are exact to the microsecond, those of epoll to the millisecond.
    with selectors.SelectSelector() as selector:
        try:
            for _ in range(load.connections):
                connections.append(_Connection(load))
                selector.register(connections[-1].socket, selectors.EVENT_READ, connections[-1])
            start, sent = time.perf_counter(), 0
            end = start + seconds + _SILENCE_SECONDS
            while len(latencies) < total and (now := time.perf_counter()) < end:
                while sent < total and (due := start + sent / rate) <= now:
                    connections[sent % len(connections)].send(due)
                    sent += 1
                wait = start + sent / rate if sent < total else end
                for key, _ in selector.select(max(0, wait - time.perf_counter())):
                    key.data.receive(latencies)
        finally:
            for connection in connections:
                connection.socket.close()
    return latencies
