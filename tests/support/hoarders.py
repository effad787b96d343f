"""Clients that make a server hold memory, and a server whose memory is watched.

The clients do not complete their requests or do not read the answers.
"""

import gzip
import json
import os
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

import xlaserve
from support import frames
from support.floods import INFER
from support.frames import data, headers, literals
from support.process import ENVIRONMENT, START_SECONDS, command
from support.resident import Resident
from support.wire import request_headers

MIB = 1 << 20
WIDE_BYTES = 10 * MIB
_QUIET_SECONDS = 2.0
_PATIENCE_SECONDS = 60


def export_models(folder: Path) -> None:
    """Write the models `wide` (returns 10 MiB), `sum` (any vector), `text`, and `photo`."""
    weights = {"w": np.ones((1, WIDE_BYTES // 4), np.float32)}
    xlaserve.export_model(
        lambda params, x: {"y": x + params["w"]},
        weights,
        {"x": ("FP32", [1, 1])},
        folder / "wide" / "1",
    )
    xlaserve.export_model(
        lambda params, x: {"y": x[:, :1]},
        {},
        {"x": ("FP64", [-1, 2 * MIB])},
        folder / "vector" / "1",
        max_batch_size=1,
    )
    xlaserve.export_model(
        lambda params, x: {"y": x},
        {},
        {"x": ("FP32", [-1, 16])},
        folder / "echo" / "1",
        max_batch_size=8,
    )


@dataclass(frozen=True)
class Watched(Resident):
    """A server in its own process."""

    grpc: str
    http: str

    def seconds_until(self, most_bytes: int, limit_seconds: float) -> float:
        """Return the seconds until it uses at most `most_bytes`, capped at the limit."""
        begun = time.monotonic()
        while time.monotonic() - begun < limit_seconds:
            if self.resident_bytes() <= most_bytes:
                return time.monotonic() - begun
            time.sleep(0.1)
        return limit_seconds


@contextmanager
def watched(folder: Path, **settings: object) -> Iterator[Watched]:
    """Serve the models in `folder/models` for the duration of a block."""
    log = folder / "log"
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    arguments = ("serve", str(folder / "models"), "--grpc-endpoint", "port:0")
    with log.open("w") as written:
        process = subprocess.Popen(
            [*command(*arguments), "--http-endpoint", "port:0", "--device", "cpu", *flags],
            stderr=written,
            env=os.environ | ENVIRONMENT,
        )
        try:
            record = _listening(log, process)
            yield Watched(psutil.Process(process.pid), record["grpc"], record["http"])
        finally:
            process.terminate()
            try:
                process.wait(_PATIENCE_SECONDS)
            finally:
                process.kill()


def _listening(log: Path, process: "subprocess.Popen[bytes]") -> dict[str, str]:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        events = {}
        for line in log.read_text().splitlines():
            with suppress(ValueError):
                record = json.loads(line)
                events[record.get("event")] = record
        if "started" in events:
            return dict(events["listening"])
        time.sleep(0.05)
    raise AssertionError(f"the server did not start: {log.read_text()}")


class Hoarder:
    """A connection that sends as much as it can and reads only the first bytes of the answer."""

    def __init__(self, url: str, *parts: bytes, context: ssl.SSLContext | None = None) -> None:
        host, _, port = url.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), _PATIENCE_SECONDS)
        if context is not None:
            self.socket = context.wrap_socket(self.socket, server_hostname="localhost")
        self.socket.setblocking(False)
        self.unsent = [memoryview(part) for part in parts]
        self.sent = 0
        self.ended = False

    def send(self) -> bool:
        """Send without blocking; return whether anything was sent."""
        before = self.sent
        while self.unsent and not self.ended:
            try:
                count = self.socket.send(self.unsent[0][: 1 << 20])
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                break
            except OSError:
                self.ended = True
                break
            self.sent += count
            self.unsent[0] = self.unsent[0][count:]
            if not self.unsent[0]:
                del self.unsent[0]
        return self.sent > before

    def first(self) -> bytes:
        """Read the first bytes without blocking; empty if there are none."""
        with suppress(OSError):
            return self.socket.recv(4096)
        return b""

    def close(self) -> None:
        """Close the socket without ending the protocol."""
        self.socket.close()


def push(hoarders: Sequence[Hoarder], seconds: float = _PATIENCE_SECONDS) -> None:
    """Send on all connections until none makes progress for a while."""
    end = time.monotonic() + seconds
    moved = time.monotonic()
    while time.monotonic() < min(end, moved + _QUIET_SECONDS):
        if sum(hoarder.send() for hoarder in hoarders):
            moved = time.monotonic()
        elif not any(hoarder.unsent and not hoarder.ended for hoarder in hoarders):
            return
        else:
            time.sleep(0.01)


@contextmanager
def hoarding(make: Callable[[], Hoarder], count: int) -> Iterator[list[Hoarder]]:
    """Keep `count` connections open for the duration of a block."""
    with ExitStack() as stack:
        hoarders = []
        for _ in range(count):
            hoarders.append(make())
            stack.callback(hoarders[-1].close)
        yield hoarders


# --- Requests ------------------------------------------------------------------------------------


def http_request(model: str, body_bytes: int, *lines: str) -> bytes:
    """Return the header block of an inference over HTTP; a negative size means a chunked body."""
    framing = f"Content-Length: {body_bytes}" if body_bytes >= 0 else "Transfer-Encoding: chunked"
    first = f"POST /v2/models/{model}/infer HTTP/1.1"
    return "\r\n".join((first, "Host: localhost", framing, *lines, "", "")).encode()


WIDE = json.dumps(
    {
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1]}],
        "outputs": [{"name": "y", "parameters": {"binary_data": True}}],
    }
).encode()
"""HTTP body that requests 10 MiB from `wide`."""

_BLOCK = literals(request_headers(INFER))
_GZIP = literals(request_headers(INFER, ("grpc-encoding", "gzip")))


def grpc_opening(window: int) -> bytes:
    """Return a connection preface that grants the server `window` bytes per stream."""
    setting = frames.settings((frames.Setting.INITIAL_WINDOW_SIZE, window))
    return b"".join((frames.PREFACE, bytes(setting), bytes(frames.SETTINGS_ACK)))


def grpc_requests(message: bytes, streams: range, *, compressed: bool = False) -> bytes:
    """Return a request for each stream; the message must fit into a flow-control window."""
    block = _GZIP if compressed else _BLOCK
    whole = bytes([compressed]) + len(message).to_bytes(4, "big") + message
    parts = [whole[start : start + 16_384] for start in range(0, len(whole), 16_384)]
    octets = b""
    for stream in streams:
        octets += bytes(headers(stream, block))
        for number, part in enumerate(parts):
            octets += bytes(data(stream, part, end_stream=number == len(parts) - 1))
    return octets


def resets(streams: range) -> bytes:
    """Return RST_STREAM frames for the streams."""
    return b"".join(bytes(frames.rst_stream(stream)) for stream in streams)


def bomb(inflated_bytes: int) -> bytes:
    """Return a gzip bomb that inflates to so many zeros."""
    return gzip.compress(bytes(inflated_bytes), 9)
