"""Time the codec on the worst messages of one mebibyte, and on typical ones, next to google's upb.

Prints the milliseconds of the slowest of several runs for each shape of bomb, and whether it was
decoded or refused; then microseconds for typical requests, and the ratio to upb. All times are CPU
times of this thread, so other processes do not count. Needs the `test` dependency group, for
protobuf.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import resources
from statistics import median

import betterproto
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

from xlaserve.errors.message import TooManyFields
from xlaserve.grpc.protobuf.codec import WireCodec
from xlaserve_proto import inference as pb

ONE_MIB = 1 << 20
TARGET_MS = 50


def varint(value: int) -> bytes:
    """Encode a varint."""
    octets = bytearray()
    while value > 0x7F:
        octets.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*octets, value))


def sized(number: int, body: bytes) -> bytes:
    """Encode a length-delimited field."""
    return varint(number << 3 | 2) + varint(len(body)) + body


def contents(body: bytes) -> bytes:
    """Wrap fields in the typed contents of a request's only input."""
    return sized(5, sized(5, body))


def fill(step: bytes) -> bytes:
    """Repeat bytes up to a mebibyte."""
    return step * (ONE_MIB // len(step))


LONG = b"\xff" * 9 + b"\x01"
"""A varint of ten bytes."""

BOMBS = {
    "unknown varints of 1 byte": fill(b"\x78\x01"),
    "unknown varints of 10 bytes": fill(b"\x78" + LONG),
    "unknown varints, tags of 5 bytes": fill(b"\xf8\xff\xff\xff\x0f" + LONG),
    "unknown empty bytes": fill(b"\x7a\x00"),
    "unknown bytes, sizes of 5 bytes": fill(b"\x7a" + b"\x80" * 4 + b"\x00"),
    "unknown groups, 100 deep": fill(b"\x7b" * 100 + b"\x7c" * 100),
    "unknown groups, tags of 5 bytes": fill(
        b"\xfb\xff\xff\xff\x0f" * 100 + b"\xfc\xff\xff\xff\x0f" * 100
    ),
    "empty inputs": fill(b"\x2a\x00"),
    "inputs with empty contents": fill(b"\x2a\x02\x2a\x00"),
    "one input, merged": sized(5, fill(b"\x2a\x00")),
    "empty map entries": fill(b"\x22\x00"),
    "map keys": b"".join(sized(4, sized(1, b"%05d" % i)) for i in range(ONE_MIB // 9)),
    "map keys and values": b"".join(
        sized(4, sized(1, b"%05d" % i) + b"\x12\x02\x08\x01") for i in range(ONE_MIB // 13)
    ),
    "a oneof, flipped": sized(4, sized(2, fill(b"\x08\x01\x10\x01"))),
    "empty raw contents": fill(b"\x3a\x00"),
    "raw contents of 8 bytes": fill(sized(7, bytes(8))),
    "empty bytes elements": contents(fill(b"\x42\x00")),
    "bytes elements of 8 bytes": contents(fill(sized(8, bytes(8)))),
    "the same string again": fill(sized(1, b"abcdef")),
    "one string of UTF-8": sized(1, fill("é".encode())),
    "packed varints of 1 byte": contents(sized(3, fill(b"\x05"))),
    "packed varints of 2 bytes": contents(sized(3, fill(b"\xff\x05"))),
    "packed varints of 10 bytes": contents(sized(3, fill(LONG))),
    "packed varints of 1 and 10 bytes": contents(sized(3, fill(b"\x05" * 4 + LONG))),
    "packed bools": contents(sized(1, fill(b"\x01"))),
    "packed floats": contents(sized(6, fill(b"\0\0\xc0\x3f"))),
    "packed fields of 2 bytes": contents(fill(sized(3, b"\xff\x01"))),
    "packed fields of 64 bytes": contents(fill(sized(3, b"\xff\x01" * 32))),
    "packed fields of 70 bytes": contents(fill(sized(3, b"\xff\x01" * 35))),
    "packed fields of 1 float": contents(fill(sized(6, b"\0\0\xc0\x3f"))),
    "single varints of 1 byte": contents(fill(b"\x18\x01")),
    "single varints of 3 bytes": contents(fill(b"\x18\xff\xff\x01")),
    "single varints of 10 bytes": contents(fill(b"\x18" + LONG)),
    "single floats": contents(fill(b"\x35\0\0\xc0\x3f")),
}
"""Shapes of ModelInferRequest that are expensive to decode."""

STRINGS = {"strings of 8 bytes": fill(sized(3, "é".encode() * 4))}
"""Shapes of ServerMetadataResponse: it has a list of strings, which no request has."""

SHAPES: dict[type[betterproto.Message], dict[str, bytes]] = {
    pb.ModelInferRequest: BOMBS,
    pb.ServerMetadataResponse: STRINGS,
}


def tensors(count: int, elements: int, *, raw: bool) -> pb.ModelInferRequest:
    """Make a typical request."""
    values = np.arange(elements, dtype=np.float32)
    request = pb.ModelInferRequest(model_name="model")
    for index in range(count):
        tensor = pb.ModelInferRequestInferInputTensor(
            name=f"INPUT{index}", datatype="FP32", shape=[1, elements]
        )
        if raw:
            request.raw_input_contents.append(values.tobytes())
        else:
            tensor.contents = pb.InferTensorContents(fp32_contents=values.tolist())
        request.inputs.append(tensor)
        request.outputs.append(pb.ModelInferRequestInferRequestedOutputTensor(f"OUTPUT{index}"))
    return request


USUAL = {
    "1 input of 16 floats, raw": tensors(1, 16, raw=True),
    "2 inputs of 16 floats, raw": tensors(2, 16, raw=True),
    "1 input of 150528 floats, raw": tensors(1, 150_528, raw=True),
    "1 input of 16 floats, typed": tensors(1, 16, raw=False),
    "1 input of 150528 floats, typed": tensors(1, 150_528, raw=False),
    "1000 inputs of 16 floats, raw": tensors(1000, 16, raw=True),
}


@dataclass(frozen=True, slots=True)
class Bench:
    """The codec under test, and the number of runs."""

    codec: WireCodec
    runs: int

    def worst_ms(self, message_type: type[betterproto.Message], data: bytes) -> tuple[str, float]:
        """Return the outcome of decoding a message, and the time of its slowest run."""
        took = []
        outcome = "read"
        for _ in range(self.runs):
            started = time.thread_time()
            try:
                self.codec.decode_message(message_type, data)
            except TooManyFields:
                outcome = "refused"
            took.append(time.thread_time() - started)
        return outcome, max(took) * 1e3

    def median_us(self, call: Callable[[], object]) -> float:
        """Return the median time of a call, over batches of about 10 ms."""
        started = time.thread_time()
        call()
        batch = max(1, int(0.01 / (time.thread_time() - started)))
        took = []
        for _ in range(self.runs):
            started = time.thread_time()
            for _ in range(batch):
                call()
            took.append((time.thread_time() - started) / batch)
        return median(took) * 1e6


def google_class(name: str) -> type[Message]:
    """Return Google's class for a message of the contracts."""
    data = resources.files("xlaserve_proto").joinpath("descriptor_set.binpb").read_bytes()
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(data).file:
        pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))


def print_bombs(bench: Bench) -> float:
    """Print a line for each shape of bomb, and return the worst time."""
    print(f"{'one mebibyte of':36} {'':8} {'ms':>7} {'upb ms':>7}")
    worst = 0.0
    for message_type, shapes in SHAPES.items():
        google = google_class(f"inference.{message_type.__name__}")
        for name, data in shapes.items():
            outcome, took = bench.worst_ms(message_type, data)
            upb = bench.median_us(partial(google.FromString, data)) / 1e3
            print(f"{name:36} {outcome:8} {took:7.1f} {upb:7.2f}")
            worst = max(worst, took)
    return worst


def print_usual(bench: Bench) -> None:
    """Print a line for each typical request."""
    google = google_class("inference.ModelInferRequest")
    print(f"\n{'request, us':36} {'decode':>9} {'upb':>8} {'ratio':>6} {'encode':>9} {'upb':>8}")
    for name, request in USUAL.items():
        data = bench.codec.encode_message(request)
        decode = bench.median_us(partial(bench.codec.decode_message, pb.ModelInferRequest, data))
        encode = bench.median_us(partial(bench.codec.encode_message, request))
        upb = bench.median_us(partial(google.FromString, data))
        upb_encode = bench.median_us(google.FromString(data).SerializeToString)
        ratio = decode / upb
        print(f"{name:36} {decode:9.1f} {upb:8.1f} {ratio:6.1f} {encode:9.1f} {upb_encode:8.1f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="of each measurement (default 5)")
    bench = Bench(WireCodec(), parser.parse_args().runs)
    # As a started server does: exclude long-lived objects from garbage collection.
    gc.collect()
    gc.freeze()
    worst = print_bombs(bench)
    print_usual(bench)
    print(f"\nworst: {worst:.1f} ms, the target is {TARGET_MS} ms")
    return 0 if worst <= TARGET_MS else 1


if __name__ == "__main__":
    sys.exit(main())
