"""Content codings in both directions, including decompression bombs."""

import gzip
import os
import zlib
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlaserve.errors import InvalidBody, TooLarge, XlaserveError
from xlaserve.http.compression import UnsupportedEncoding, accepted_coding, inflate, request_coding
from xlaserve.net.compression import deflate

LIMIT = 1 << 20


@given(st.sampled_from(["gzip", "deflate"]), st.lists(st.binary(max_size=500), max_size=4))
def test_what_is_packed_is_unpacked(coding: str, parts: list[bytes]) -> None:
    assert b"".join(parts) == inflate(coding, deflate(coding, parts), LIMIT)


def test_every_form_that_clients_send_is_read() -> None:
    """Python's zlib writes deflate with a header, some other libraries without."""
    bare = zlib.compressobj(wbits=-15)

    assert b"abc" == bytes(inflate("gzip", gzip.compress(b"abc"), LIMIT))
    assert b"abc" == bytes(inflate("x-gzip", gzip.compress(b"abc"), LIMIT))
    assert b"abc" == bytes(inflate("deflate", zlib.compress(b"abc"), LIMIT))
    assert b"abc" == bytes(inflate("deflate", bare.compress(b"abc") + bare.flush(), LIMIT))


def test_several_members_are_one_body() -> None:
    """RFC 1952, section 2.2."""
    assert b"abcd" == bytes(inflate("gzip", gzip.compress(b"ab") + gzip.compress(b"cd"), LIMIT))


def test_members_without_end_are_refused() -> None:
    """Each member costs time, even an empty one."""
    assert b"" == bytes(inflate("gzip", gzip.compress(b"") * 10_000, LIMIT))
    with pytest.raises(InvalidBody, match="10000 members"):
        inflate("gzip", gzip.compress(b"") * 10_001, LIMIT)


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_a_body_may_be_as_large_as_the_limit_and_no_larger(coding: str) -> None:
    packed = deflate(coding, [bytes(LIMIT)])

    assert LIMIT == len(inflate(coding, packed, LIMIT))
    with pytest.raises(TooLarge, match="max_message_bytes"):
        inflate(coding, packed, LIMIT - 1)


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
@pytest.mark.parametrize("cut", [0, 1, 10, -1])
def test_a_body_that_ends_early_is_refused(coding: str, cut: int) -> None:
    packed = deflate(coding, [os.urandom(1000)])

    with pytest.raises(InvalidBody):
        inflate(coding, packed[:cut], LIMIT)


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_what_follows_the_body_is_refused(coding: str) -> None:
    with pytest.raises(InvalidBody):
        inflate(coding, deflate(coding, [b"abc"]) + b"more", LIMIT)


@given(st.sampled_from(["gzip", "deflate"]), st.binary(max_size=200))
def test_bytes_at_random_are_unpacked_or_refused(coding: str, data: bytes) -> None:
    with suppress(XlaserveError):
        assert len(inflate(coding, data, 1000)) <= 1000


@pytest.mark.parametrize("coding", ["br", "gzip, deflate", "GZIP2", "x" * 1000])
def test_other_codings_are_not_implemented(coding: str) -> None:
    with pytest.raises(UnsupportedEncoding):
        request_coding(coding)


@pytest.mark.parametrize(("header", "coding"), [("", "identity"), (" GZip ", "gzip")])
def test_the_coding_of_a_request(header: str, coding: str) -> None:
    assert coding == request_coding(header)


@pytest.mark.parametrize(
    ("header", "coding"),
    [
        ("", "identity"),
        ("br", "identity"),
        ("gzip, deflate", "gzip"),
        ("deflate", "deflate"),
        ("gzip;q=0.1, deflate;q=0.5", "deflate"),
        ("gzip;q=0", "identity"),
        ("gzip;q=nonsense", "identity"),
        ("*", "identity"),
    ],
)
def test_the_coding_of_an_answer(header: str, coding: str) -> None:
    """RFC 9110, section 12.5.3."""
    assert coding == accepted_coding(header)
