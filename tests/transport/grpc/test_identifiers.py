"""Model ids in request headers, as grpclib passes them on."""

from base64 import b64encode

import pytest
from grpclib.metadata import decode_metadata
from hypothesis import given
from hypothesis import strategies as st
from multidict import MultiDict

from xlaserve.errors import InvalidRequest
from xlaserve.grpc.identifiers import (
    MAX_ID_BYTES,
    MAX_LOGGED_BYTES,
    model_id,
    split_binary_lists,
    vmodel_id,
)

Headers = list[tuple[str, str]]


def text(value: str, name: str = "mm-model-id") -> Headers:
    return [(name, value)]


def binary(value: str | bytes, name: str = "mm-model-id-bin", *, padded: bool = False) -> Headers:
    octets = value.encode() if isinstance(value, str) else value
    encoded = b64encode(octets).decode()
    return [(name, encoded if padded else encoded.rstrip("="))]


def joined(*headers: Headers) -> Headers:
    """Join headers of the same name, as a proxy may."""
    return [(headers[0][0][0], ", ".join(value for [(_, value)] in headers))]


def metadata(headers: Headers) -> MultiDict[str | bytes]:
    return decode_metadata(split_binary_lists(headers))


LONG = "x" * 1024
LONGEST = "é" * (MAX_ID_BYTES // 2)

IDS: dict[str, tuple[Headers, str | None]] = {
    "no header": ([("x-other", "m")], None),
    "only a virtual model": (text("v", "mm-vmodel-id"), None),
    "text": (text("m"), "m"),
    "text with spaces, slashes and dots": (text("a b/../c"), "a b/../c"),
    "text with a comma": (text("a,b"), "a,b"),
    "long text": (text(LONG), LONG),
    "binary": (binary("m"), "m"),
    "binary, padded": (binary("m", padded=True), "m"),
    "binary, two bytes in the last quantum": (binary("mm"), "mm"),
    "binary, no rest": (binary("mmm"), "mmm"),
    "binary beyond ASCII": (binary("modèle/日本 \U0001f600"), "modèle/日本 \U0001f600"),
    "binary with a zero": (binary("a\0b"), "a\0b"),
    "binary with a comma": (binary("a,b"), "a,b"),
    "longest binary": (binary(LONGEST), LONGEST),
    "both": (binary("m") + text("m"), "m"),
    "both, the other way round": (text("m") + binary("m"), "m"),
    "both, with a virtual model": (binary("m") + text("m") + text("v", "mm-vmodel-id"), "m"),
}


@pytest.mark.parametrize(("headers", "expected"), IDS.values(), ids=IDS)
def test_headers_hold_an_id_or_none(headers: Headers, expected: str | None) -> None:
    """The model id of the ModelMesh runtime interface: text, UTF-8 in base64, or both."""
    assert expected == model_id(metadata(headers))


REFUSED: dict[str, tuple[Headers, str]] = {
    "text, twice": (text("m") + text("m"), "header mm-model-id is repeated"),
    "text, twice, one of them empty": (text("m") + text(""), "header mm-model-id is repeated"),
    "binary, twice": (binary("m") + binary("m"), "header mm-model-id-bin is repeated"),
    "binary, a list": (joined(binary("a"), binary("b")), "header mm-model-id-bin is repeated"),
    "binary, a padded list": (
        joined(binary("a", padded=True), binary("b", padded=True)),
        "header mm-model-id-bin is repeated",
    ),
    "binary, a list of what could be one": (
        joined(binary("abc"), binary("def")),
        "header mm-model-id-bin is repeated",
    ),
    "binary, a list that ends in nothing": (
        joined(binary("a"), binary("")),
        "header mm-model-id-bin is repeated",
    ),
    "both, the text twice": (
        binary("m") + text("m") + text("m"),
        "header mm-model-id is repeated",
    ),
    "both, the binary twice": (
        binary("m") + text("m") + binary("m"),
        "header mm-model-id-bin is repeated",
    ),
    "text, empty": (text(""), "header mm-model-id is empty"),
    "binary, empty": (binary(""), "header mm-model-id-bin is empty"),
    "both, the text empty": (binary("m") + text(""), "header mm-model-id is empty"),
    "both, the binary empty": (binary("") + text("m"), "header mm-model-id-bin is empty"),
    "text, too long": (
        text("x" * (MAX_ID_BYTES + 1)),
        "header mm-model-id: expected at most 4096 bytes, got 4097",
    ),
    "binary, too long in bytes": (
        binary(LONGEST + "x"),
        "header mm-model-id-bin: expected at most 4096 bytes, got 4097",
    ),
    "binary, not UTF-8": (
        binary(b"ab\xff"),
        "header mm-model-id-bin: expected UTF-8, got another byte at 2",
    ),
    "binary, a surrogate": (
        binary(b"\xed\xa0\x80"),
        "header mm-model-id-bin: expected UTF-8, got another byte at 0",
    ),
    "both, the binary not UTF-8": (
        binary(b"\xff") + text("m"),
        "header mm-model-id-bin: expected UTF-8",
    ),
    "text beyond ASCII": (
        text("modèle"),
        "header mm-model-id: expected ASCII, got another byte at 3",
    ),
    "text with a surrogate": (text("\udcff"), "header mm-model-id: expected ASCII"),
    "both, different": (
        binary("a") + text("b"),
        "two models: mm-model-id-bin is 'a', mm-model-id is 'b'",
    ),
    "both, different in a space": (binary("a ") + text("a"), "mm-model-id-bin is 'a '"),
    "both, the binary cut": (binary(LONG[1:]) + text(LONG), "mm-model-id is 'xxx"),
}


@pytest.mark.parametrize(("headers", "expected"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_one_id_is_refused(headers: Headers, expected: str) -> None:
    """The error names the header, and stays short however long the id is."""
    with pytest.raises(InvalidRequest) as refusal:
        model_id(metadata(headers))

    assert expected in str(refusal.value)
    assert len(str(refusal.value)) < 250


@given(st.text(min_size=1, max_size=MAX_ID_BYTES // 4))
def test_any_id_arrives_as_it_was_sent(value: str) -> None:
    """A text form accompanies it if the id has one."""
    plain = text(value) if value.isascii() else []

    assert value == model_id(metadata(binary(value) + plain))
    assert value == model_id(metadata(plain + binary(value, padded=True)))


# --- virtual models ----------------------------------------------------------------------------

VIRTUAL: dict[str, tuple[Headers, str | None]] = {
    "none": (text("m") + binary("m"), None),
    "text": (text("v", "mm-vmodel-id"), "v"),
    "binary": (binary("é", "mm-vmodel-id-bin"), "é"),
    "both": (text("t", "mm-vmodel-id") + binary("b", "mm-vmodel-id-bin"), "b"),
    "repeated": (text("a", "mm-vmodel-id") + text("b", "mm-vmodel-id"), "a"),
    "empty": (text("", "mm-vmodel-id"), None),
    "binary empty, text not": (
        text("t", "mm-vmodel-id") + binary("", "mm-vmodel-id-bin"),
        "t",
    ),
    "not UTF-8": (binary(b"a\xff", "mm-vmodel-id-bin"), "a�"),
    "not ASCII": (text("\udcff", "mm-vmodel-id"), "���"),
    "long": (text("x" * 9999, "mm-vmodel-id"), "x" * MAX_LOGGED_BYTES),
    "long and binary": (
        binary("x" * 9999, "mm-vmodel-id-bin"),
        "x" * MAX_LOGGED_BYTES,
    ),
}


@pytest.mark.parametrize(("headers", "expected"), VIRTUAL.values(), ids=VIRTUAL)
def test_virtual_model_is_for_logs(headers: Headers, expected: str | None) -> None:
    assert expected == vmodel_id(metadata(headers))


# --- lists -------------------------------------------------------------------------------------


def test_only_binary_headers_are_lists() -> None:
    """gRPC over HTTP/2, Requests: only binary headers are split at commas."""
    headers = [("accept", "a,b"), ("x-bin", "YQ==,Yg, "), ("y-bin", "YQ"), (":path", "/a,b")]

    assert [
        ("accept", "a,b"),
        ("x-bin", "YQ=="),
        ("x-bin", "Yg"),
        ("x-bin", ""),
        ("y-bin", "YQ"),
        (":path", "/a,b"),
    ] == split_binary_lists(headers)
