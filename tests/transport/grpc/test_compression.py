"""Compressed gRPC messages: gzip and deflate, within the message size limit."""

import gzip
import zlib
from random import Random

import pytest
from grpclib import GRPCError
from grpclib.const import Status

from xlaserve.grpc.compression import answer_encoding, compress, decompress
from xlaserve.grpc.http2.messages import PREFIX, PREFIX_BYTES
from xlaserve.net.ledger import Ledger

LIMIT = 1 << 20
GZIP = (("grpc-encoding", "gzip"),)
DEFLATE = (("grpc-encoding", "deflate"),)


@pytest.mark.parametrize("message", [b"", b"abc", bytes(LIMIT)])
async def test_a_message_is_as_it_was_before(message: bytes) -> None:
    assert message == await decompress(gzip.compress(message), GZIP, LIMIT)
    assert message == await decompress(zlib.compress(message), DEFLATE, LIMIT)


async def test_members_are_one_message() -> None:
    """RFC 1952, section 2.2."""
    assert b"abcd" == await decompress(gzip.compress(b"ab") + gzip.compress(b"cd"), GZIP, LIMIT)


REFUSED = {
    "no encoding": (gzip.compress(b"a"), (), Status.INTERNAL),
    "another encoding": (b"", (("grpc-encoding", "snappy"),), Status.UNIMPLEMENTED),
    "not gzip": (zlib.compress(b"a"), GZIP, Status.INTERNAL),
    "cut off": (gzip.compress(b"a")[:-1], GZIP, Status.INTERNAL),
    "nothing": (b"", GZIP, Status.INTERNAL),
    "more behind it": (gzip.compress(b"a") + b"more", GZIP, Status.INTERNAL),
    "a long one that is not gzip": (bytes(5000), GZIP, Status.INTERNAL),
    "too long": (gzip.compress(bytes(LIMIT + 1)), GZIP, Status.RESOURCE_EXHAUSTED),
    "not deflate": (gzip.compress(b"a"), DEFLATE, Status.INTERNAL),
    "deflate that is cut off": (zlib.compress(b"a")[:-1], DEFLATE, Status.INTERNAL),
    "more behind deflate": (zlib.compress(b"a") * 2, DEFLATE, Status.INTERNAL),
    "a bomb": (zlib.compress(bytes(50 * LIMIT), 9), DEFLATE, Status.RESOURCE_EXHAUSTED),
    "no known name": (zlib.compress(b"a"), (("grpc-encoding", "x-gzip"),), Status.UNIMPLEMENTED),
    "too long in two": (gzip.compress(bytes(LIMIT)) * 2, GZIP, Status.RESOURCE_EXHAUSTED),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_cannot_be_inflated_is_refused(name: str) -> None:
    message, headers, status = REFUSED[name]
    with pytest.raises(GRPCError) as refused:
        await decompress(message, headers, LIMIT)

    assert status is refused.value.status


async def test_members_may_be_as_long_as_a_step() -> None:
    """At the end of such a member zlib reports the remaining bytes twice."""
    member = gzip.compress(bytes(1 << 20))

    assert bytes(2 << 20) == await decompress(member * 2, GZIP, 2 * LIMIT)


async def test_memory_is_reserved_before_it_is_taken_and_no_more_in_the_end() -> None:
    asked: list[int] = []
    inflated = await decompress(gzip.compress(bytes(LIMIT)), GZIP, LIMIT, asked.append)

    assert LIMIT == len(inflated) == sum(asked)
    assert asked[0] < LIMIT // 2, "the first step is a small one"
    assert [] == [step for step in asked[:-1] if step <= 0]


async def test_a_bomb_is_defused_where_memory_ends() -> None:
    asked: list[int] = []

    def reserve(count: int) -> None:
        asked.append(count)
        if sum(asked) > LIMIT // 2:
            raise GRPCError(Status.RESOURCE_EXHAUSTED, "no memory")

    with pytest.raises(GRPCError, match="no memory"):
        await decompress(gzip.compress(bytes(LIMIT)), GZIP, LIMIT, reserve)

    assert sum(asked) <= 2 * (LIMIT // 2)


@pytest.mark.parametrize(
    ("encoding", "accepted", "expected"),
    [
        ("gzip", "identity, deflate, gzip", "gzip"),
        ("deflate", "deflate", "deflate"),
        ("gzip", "identity,deflate", ""),
        ("gzip", None, ""),
        ("identity", "identity,gzip", ""),
        (None, "gzip", ""),
        ("snappy", "snappy", ""),
    ],
)
def test_answers_have_the_encoding_of_their_request_if_the_client_takes_it(
    encoding: str | None, accepted: str | None, expected: str
) -> None:
    headers = {"grpc-encoding": encoding, "grpc-accept-encoding": accepted}
    sent = [(name, value) for name, value in headers.items() if value is not None]

    assert expected == answer_encoding(sent)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize("size", [300, 20_000, LIMIT])
async def test_an_answer_is_compressed_behind_its_prefix(encoding: str, size: int) -> None:
    message = bytes(size)
    sent = bytes(await compress(encoding, PREFIX.pack(0, size) + message, Ledger(1 << 30).open()))
    is_compressed, length = PREFIX.unpack(sent[:PREFIX_BYTES])

    assert (1, len(sent) - PREFIX_BYTES) == (is_compressed, length)
    assert length < size
    headers = (("grpc-encoding", encoding),)
    assert message == await decompress(sent[PREFIX_BYTES:], headers, LIMIT)


@pytest.mark.parametrize("message", [b"", b"short", Random(1).randbytes(40_000)])
async def test_what_would_not_be_shorter_stays_as_it_is(message: bytes) -> None:
    plain = PREFIX.pack(0, len(message)) + message

    assert plain == await compress("gzip", plain, Ledger(1 << 30).open())
