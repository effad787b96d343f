"""F1: how long reading a single message blocks the event loop.

Times are the thread's CPU time, so other load on the machine does not count. The slowest messages
are read again, to rule out cache misses caused by other processes.
"""

import gc
import heapq
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any, TypeAlias

from support.mutation import mutate, random_message
from support.protobuf import Google

from acceptance.figures import Outcome
from acceptance.suites import run_tests
from bench_codec import BOMBS, LONG, sized, varint
from xlaserve.errors import XlaserveError
from xlaserve.errors.message import MalformedMessage, TooManyFields
from xlaserve.grpc.infer.infer_codec import InferCodec
from xlaserve.settings import Settings
from xlaserve_proto.inference import ModelInferRequest

Read: TypeAlias = Callable[[bytes], str]
"""Reads a message and returns the outcome."""

_MOST_MS = 50.0
_MOST_BYTES = 1 << 20
_AGAIN = 20
"""Number of the slowest messages that are read again, `_TIMES` times each."""
_TIMES = 5
_MUTATIONS = 25
_SHOWN = 16
_COMPARED = (
    "tests/transport/grpc/test_codec_differential.py",
    "tests/transport/grpc/test_infer_codec_differential.py",
    "tests/transport/grpc/test_codec_limits.py",
)


def _tensor(datatype: bytes, dimensions: bytes, *others: bytes) -> bytes:
    """Encode an input tensor of a request that names a model."""
    fields = (sized(1, b"x"), sized(2, datatype), sized(3, dimensions), *others)
    return sized(1, b"m") + sized(5, b"".join(fields))


_FILLED = _MOST_BYTES - 200
"""Bytes of the repeated part in a request of one mebibyte."""
_IN_MEMORY = sized(4, sized(1, b"shared_memory_region") + sized(2, sized(3, b"r")))

LATER = {
    "dimensions": _tensor(b"FP32", b"\1" * _FILLED) + sized(7, bytes(4)),
    "dimensions of 0": _tensor(b"FP32", bytes(_FILLED)) + sized(7, b""),
    "dimensions of 2^62": _tensor(b"FP32", (b"\xff" * 8 + b"\x7f") * (_FILLED // 9)),
    "empty elements": _tensor(b"BYTES", varint(_FILLED // 4)) + sized(7, bytes(_FILLED // 4 * 4)),
    "elements of 1 byte": _tensor(b"BYTES", varint(_FILLED // 5))
    + sized(7, b"\1\0\0\0x" * (_FILLED // 5)),
    "empty typed elements": _tensor(b"BYTES", varint(99_900), sized(5, sized(8, b"") * 99_900)),
    "an element out of range, behind others": _tensor(
        b"INT8", varint(_FILLED), sized(5, sized(2, b"\1" * (_FILLED - 2) + b"\xff\x7f"))
    ),
    "elements of 10 bytes": _tensor(
        b"UINT64", varint(_FILLED // 10), sized(5, sized(5, LONG * (_FILLED // 10)))
    ),
    "elements of a type that is never typed": _tensor(
        b"FP16", varint(_FILLED // 4), sized(5, sized(6, bytes(_FILLED // 4 * 4)))
    ),
    "inputs": _tensor(b"FP32", b"\1") * 3000 + sized(7, bytes(4)) * 3000,
    "inputs in shared memory": _tensor(b"FP32", b"\1", _IN_MEMORY) * 3000,
    "outputs": sized(1, b"m") + b"".join(sized(6, sized(1, b"%07d" % at)) for at in range(9000)),
    "a long datatype": _tensor(b"F" * _FILLED, b"\1"),
}
"""Requests that decode quickly but are expensive to check afterwards."""


def protobuf(folder: Path, *, messages: int = 200_000, tests: int, note: str) -> Outcome:
    """Compare the codecs with google's on many messages, and measure others."""
    outcome = run_tests(folder, tests=_COMPARED, note=note, codec_messages=tests)
    outcome.figures += hold(folder, messages=messages).figures
    return outcome


def hold(
    folder: Path,
    *,
    messages: int = 200_000,
    read: Read | None = None,
    shapes: Mapping[str, bytes] = MappingProxyType(BOMBS | LATER),
) -> Outcome:
    """Read mutated requests and, of each shape that is slow to read, one of a mebibyte."""
    random, reading = Random("hold"), read or _reader()
    slowest: list[tuple[float, int, str, bytes]] = []
    # As a started server does: exclude long-lived objects from garbage collection.
    gc.collect()
    gc.freeze()
    for number, (name, data) in enumerate(_messages(random, messages, shapes)):
        heapq.heappush(slowest, (_ms(reading, data), number, name, data))
        if len(slowest) > _AGAIN:
            heapq.heappop(slowest)
    found = [
        (min(first, *(_ms(reading, data) for _ in range(_TIMES))), name, data)
        for first, _, name, data in slowest
    ]
    gc.unfreeze()
    worst, name, data = max(found)
    (folder / "slowest").write_bytes(data)
    outcome = Outcome()
    outcome.note("messages", f"{messages} mutated, {len(shapes)} shapes of a mebibyte")
    outcome.at_most("longest hold of the event loop", round(worst, 1), _MOST_MS, " ms")
    shown = f"{name}, {len(data)} octets from {data[:_SHOWN].hex()}: {reading(data)}"
    outcome.note("the message that took it", shown)
    return outcome


def _ms(read: Read, data: bytes) -> float:
    began = time.thread_time()
    read(data)
    return (time.thread_time() - began) * 1e3


def _reader() -> Read:
    """Return a reader with the server's default settings, for structure and tensors."""
    defaults = Settings(repository=Path())
    codec = InferCodec(max_fields=defaults.max_message_fields, max_depth=defaults.max_message_depth)

    def read(data: bytes) -> str:
        try:
            codec.decode(data).request()
        except (MalformedMessage, TooManyFields, XlaserveError) as error:
            return type(error).__name__
        return "read"

    return read


def _messages(
    random: Random, count: int, shapes: Mapping[str, bytes]
) -> Iterator[tuple[str, bytes]]:
    for name, data in shapes.items():
        yield name, data
        # Prefixes too: a shorter message may stay within the codec's limits and so reach the tensor
        # checks.
        for part in (2, 4, 8, 16):
            yield f"{name}, 1 part of {part}", data[: len(data) // part]
    google: Any = Google()(ModelInferRequest)
    for at in range(0, count, _MUTATIONS):
        valid = data = random_message(random, google)
        other = random_message(random, google)
        for _ in range(min(_MUTATIONS, count - at)):
            yield "mutated", data[:_MOST_BYTES]
            data = mutate(random, data if random.random() < 0.3 else valid, other)
