"""Content types: the meaning of tensor elements."""

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlaserve.tensors import TensorDataError
from xlaserve.tensors.content_types import CONTENT_TYPES, decode, decode_all, encode, encode_all


def texts(*elements: bytes) -> Any:
    return np.array(elements, np.object_).reshape(-1, 1)


@pytest.mark.parametrize(
    ("content_type", "value", "written"),
    [
        ("str", ["cat", "naïve", ""], [b"cat", "naïve".encode(), b""]),
        ("base64", [b"\xff\x00", b""], [b"/wA=", b""]),
        ("datetime", [datetime(2026, 1, 2, 3, 4)], [b"2026-01-02T03:04:00"]),
        ("datetime", [datetime(2026, 1, 2, tzinfo=UTC)], [b"2026-01-02T00:00:00+00:00"]),
    ],
)
def test_it_is_written_as_mlserver_writes_it_and_read_back(
    content_type: str, value: Any, written: list[bytes]
) -> None:
    """Each element is a row (MLServer's shape is [N, 1])."""
    tensor = encode(value, content_type)

    assert (len(written), 1) == tensor.shape
    assert written == tensor[:, 0].tolist()
    assert value == decode(tensor, content_type)


def test_a_document_has_no_row() -> None:
    """MLServer's shape of `hg_json` is [1] (HuggingfaceSingleJSONCodec)."""
    tensor = encode({"a": [1, None, "b"]}, "hg_json")

    assert [b'{"a": [1, null, "b"]}'] == tensor.tolist()
    assert {"a": [1, None, "b"]} == decode(tensor, "hg_json")


def test_arrays_are_arrays() -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3)

    assert array is decode(array, "np")
    np.testing.assert_array_equal(array, encode(array.tolist(), "np"))


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]))), st.lists(st.binary()))
def test_every_text_and_binary_comes_back(words: list[str], binaries: list[bytes]) -> None:
    assert words == decode(encode(words, "str"), "str")
    assert binaries == decode(encode(binaries, "base64"), "base64")


@pytest.mark.parametrize(
    ("tensor", "content_type", "problem"),
    [
        (texts(b"\xff"), "str", r"expected a text in UTF-8, got b'\\xff'"),
        (texts(b"Y!Q=="), "base64", "expected base64, got b'Y!Q=='"),
        (texts(b"YQ"), "base64", "expected base64, got b'YQ'"),
        (texts(b"yesterday"), "datetime", "expected an ISO 8601 time, got b'yesterday'"),
        (texts(b"{"), "hg_json", "expected a document of JSON, got b'{'"),
        (texts(b"[" * 100_000), "hg_json", "expected a document of JSON"),
        (texts(b"1", b"2"), "hg_json", "expected one element, a document of JSON, got 2 elements"),
        (np.zeros((1, 1)), "str", "expected a tensor of BYTES, got float64"),
        (texts(b"x"), "xml", "expected a content_type of np, str, base64, .* got 'xml'"),
        (texts(b"x"), "pd", "expected a content_type of np"),
    ],
)
def test_what_cannot_be_read_says_what_was_expected(
    tensor: Any, content_type: str, problem: str
) -> None:
    with pytest.raises(TensorDataError, match=problem):
        decode(tensor, content_type)


@pytest.mark.parametrize(
    ("value", "content_type", "problem"),
    [
        ("cat", "str", "expected a list of texts, got str"),
        ([1], "str", "expected texts, got int"),
        (["a"], "base64", "expected binaries, got str"),
        ([1.5], "datetime", "expected times, got float"),
        ({1, 2}, "hg_json", "expected JSON-serializable elements, got set"),
    ],
)
def test_what_cannot_be_written_says_what_was_expected(
    value: Any, content_type: str, problem: str
) -> None:
    with pytest.raises(TensorDataError, match=problem):
        encode(value, content_type)


def test_a_tensor_has_its_own_content_type_or_that_of_the_request() -> None:
    tensors = {"a": texts(b"x"), "b": texts(b"eA==")}
    found = decode_all(tensors, {"b": "base64"}, "str")

    assert {"a": ["x"], "b": [b"x"]} == found
    again = encode_all(found, {"b": "base64"}, "str")
    assert {"a": [[b"x"]], "b": [[b"eA=="]]} == {k: v.tolist() for k, v in again.items()}
    with pytest.raises(TensorDataError, match="expected 'b': base64, got b'x'"):
        decode_all(tensors | {"b": texts(b"x")}, {"b": "base64"}, "str")


def test_a_data_frame_has_a_column_for_each_tensor() -> None:
    pytest.importorskip("pandas")
    tensors = {"n": np.array([[1], [2]], np.int64), "s": texts(b"cat", b"dog")}
    frame = decode_all(tensors, {"s": "str"}, "pd")

    assert [("n", [1, 2]), ("s", ["cat", "dog"])] == [(c, frame[c].tolist()) for c in frame]
    again = encode_all(frame, of_request="pd")
    assert [[1], [2]] == again["n"].tolist()
    assert [[b"cat"], [b"dog"]] == again["s"].tolist()


def test_without_pandas_a_data_frame_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(TensorDataError, match="expected pandas, which content_type pd needs"):
        decode_all({"n": np.zeros((1, 1))}, of_request="pd")


def test_the_page_names_every_content_type() -> None:
    """Model authors look them up in docs/python-models.md."""
    page = (Path(__file__).parents[1] / "docs" / "python-models.md").read_text()

    assert [] == [name for name in (*CONTENT_TYPES, "pd") if f"`{name}`" not in page]
