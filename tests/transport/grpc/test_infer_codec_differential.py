"""Damaged requests give the same result, or the same error text, as the generic codec."""

from collections import Counter
from collections.abc import Iterator
from functools import cache
from random import Random
from typing import Any

import numpy as np
import pytest
from support.infer import directly, generically, outcome
from support.mutation import mutate, random_message
from support.protobuf import Google

from xlaserve.grpc.infer.infer_codec import InferCodec
from xlaserve.grpc.protobuf.codec import WireCodec
from xlaserve.tensors import DATATYPES, to_bytes
from xlaserve_proto.inference import ModelInferRequest

SHARDS = 6
MESSAGES = 4_000
"""Messages per shard."""
MUTATIONS = 25
"""Mutations per valid message; the valid message itself is the first case."""


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
def test_both_codecs_agree(shard: int, capsys: pytest.CaptureFixture[str]) -> None:
    random = Random(f"infer codec {shard}")
    counts: Counter[str] = Counter()
    readers = [
        (
            generically(WireCodec(max_fields=fields, max_depth=depth)),
            directly(InferCodec(max_fields=fields, max_depth=depth, max_cached=cached)),
        )
        for fields, depth, cached in ((100_000, 100, 1024), (100, 10, 2), (30, 3, 1))
    ]
    for data in _messages(random):
        for bounds, (generic, direct) in enumerate(readers):
            expected = outcome(generic, data)
            got = outcome(direct, random.choice((data, memoryview(bytearray(data)))))
            assert expected == got, data.hex()
            counts[_kind(expected) if not bounds else "within less"] += 1

    with capsys.disabled():
        print(f"\nshard {shard}: {dict(sorted(counts.items()))}", end=" ")
    assert min(counts[kind] for kind in ("structure", "tensors", "read")) > MESSAGES // 20


def _kind(expected: tuple[object, ...]) -> str:
    return "structure" if expected[0] == "structure" else "tensors" if len(expected) > 3 else "read"


def _messages(random: Random) -> Iterator[bytes]:
    for _ in range(MESSAGES // MUTATIONS):
        valid = data = _valid(random)
        other = _valid(random)
        for _ in range(MUTATIONS):
            yield data
            data = mutate(random, data if random.random() < 0.2 else valid, other)


@cache
def _google() -> Google:
    return Google()


def _valid(random: Random) -> bytes:
    """Serialize a request, mostly as clients write them, otherwise with any field set."""
    message_class = _google()(ModelInferRequest)
    if random.random() < 0.2:
        return random_message(random, message_class)
    message: Any = message_class(model_name="m", id=random.choice(("", "42")))
    typed = random.random() < 0.5
    for name in random.choice((("x",), ("x", "y"))):
        row = random.choice(tuple(DATATYPES.values()))
        shape = random.choice(((), (1,), (2, 3), (70,)))
        array = np.ones(shape, np.int8).astype(row.dtype)
        array = np.full(shape, b"one", np.object_) if row.name == "BYTES" else array
        tensor = message.inputs.add(name=name, datatype=row.name, shape=shape)
        if typed and row.contents:
            getattr(tensor.contents, row.contents).extend(array.ravel().tolist())
        elif not typed:
            message.raw_input_contents.append(bytes(to_bytes(row, array)))
        if random.random() < 0.3:
            tensor.parameters["p"].int64_param = random.randrange(3)
    if random.random() < 0.3:
        message.outputs.add(name="z").parameters["q"].string_param = "r"
        message.parameters["s"].bool_param = True
    return bytes(message.SerializeToString())
