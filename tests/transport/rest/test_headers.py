"""Request headers look the same to calls on both paths."""

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from xlaserve.http.headers import BlockHeaders, ReadHeaders

FIELDS = [
    (b"Host", b"a:80"),
    (b"X-Empty", b""),
    (b"x-twice", b"1"),
    (b"X-Padded", b" \t a b \t"),
    (b"X-TWICE", b"2, 3"),
    (b"X-Bytes", b"\xff\xc3\xa9"),
    (b"Authorization", b"Bearer a.b:c"),
]
BLOCK = (
    b"POST /x-line: y HTTP/1.1\r\n" + b"".join(b"%b:%b\r\n" % field for field in FIELDS) + b"\r\n"
)
EXPECTED = {
    "host": "a:80",
    "x-empty": "",
    "x-twice": "1, 2, 3",
    "x-padded": "a b",
    "x-bytes": "\udcffé",
    "authorization": "Bearer a.b:c",
    "post /x-line": None,
    "": None,
    "x-absent": None,
}


@pytest.mark.parametrize("name", EXPECTED)
def test_both_paths_read_a_header_alike(name: str) -> None:
    """Repeated headers form one list (RFC 9110, 5.3)."""
    read = CIMultiDict(
        (field.decode(), value.strip().decode(errors="surrogateescape")) for field, value in FIELDS
    )
    general, fast = ReadHeaders(CIMultiDictProxy(read)), BlockHeaders(BLOCK)

    assert EXPECTED[name] == general.get(name) == fast.get(name) == fast.get(name)
