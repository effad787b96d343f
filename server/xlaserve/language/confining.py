"""What the scripts share whose processes compute texts of others: messages, limits, forks.

It needs nothing of the server: those scripts read it from their own directory.
"""

import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

SIZE = struct.Struct("!I")


def receive(stream: BinaryIO) -> Any:
    """Return the next message, None at the end."""
    head = stream.read(SIZE.size)
    if len(head) < SIZE.size:
        return None
    return json.loads(stream.read(SIZE.unpack(head)[0]))


def send(stream: BinaryIO, message: Any) -> None:
    """Write a message."""
    data = json.dumps(message).encode()
    stream.write(SIZE.pack(len(data)) + data)
    stream.flush()


def confine(memory_bytes: int) -> None:
    """Take away files, sockets, processes, and memory beyond so much more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + memory_bytes
    for limit, value in (
        (resource.RLIMIT_AS, most),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 0),
    ):
        resource.setrlimit(limit, (value, value))


def serve(begin: Callable[[Any], Callable[[Any], Mapping[str, Any]]]) -> None:
    """Begin with the first message, then answer each other one, until the input ends.

    Each is answered in a process of its own, which its limits end: what it leaves behind, and what
    it takes to begin anew, is nobody's. Exceptions are answered as `failed`.
    """
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    first = receive(source)
    if first is None:
        return
    limits = first["limits"]
    answer = begin(first)
    send(sink, {"text": ""})
    while (asked := receive(source)) is not None:
        send(sink, _forked(partial(answer, asked), limits))
        del asked


def _forked(answer: Callable[[], Mapping[str, Any]], limits: Mapping[str, Any]) -> Any:
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.close(reads)
        # Whatever becomes of it, it must not go on as the process that was forked.
        with suppress(BaseException):
            _answer(writes, answer, limits)
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as stream:
        data = stream.read(8 * limits["output_bytes"])
    if len(data) == 8 * limits["output_bytes"]:
        os.kill(child, signal.SIGKILL)
        data = b""
    _, status = os.waitpid(child, 0)
    if status or not data:
        return {"lost": "it took more than it may"}
    return json.loads(data)


def _answer(file: int, answer: Callable[[], Mapping[str, Any]], limits: Mapping[str, Any]) -> None:
    confine(limits["memory_bytes"])
    # What it does by default is to end the process, whatever that is busy with.
    signal.setitimer(signal.ITIMER_PROF, limits["cpu_seconds"])
    try:
        found = answer()
    except MemoryError:
        found = {"lost": "it takes more memory than it may"}
    except BaseException as error:
        # What panics in Rust is no Exception.
        found = {"failed": str(error)[:1000], "kind": type(error).__name__}
    rest = memoryview(json.dumps(found).encode())
    while rest:
        rest = rest[os.write(file, rest) :]
