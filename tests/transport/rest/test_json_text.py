import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlaserve.errors import InvalidBody
from xlaserve.http.json import json_text
from xlaserve.http.json.json_text import (
    blank_strings,
    check_depth,
    check_elements,
    check_elements_around_data,
    count_octets,
)

AWKWARD = st.text(alphabet='[]{}"\\,:a\n')
VALUES: st.SearchStrategy[Any] = st.recursive(
    AWKWARD | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(AWKWARD, inner, max_size=3),
    max_leaves=20,
)


def depth_of(value: object) -> int:
    match value:
        case dict():
            return 1 + max(map(depth_of, value.values()), default=0)
        case list():
            return 1 + max(map(depth_of, value), default=0)
    return 0


def elements_of(value: object) -> tuple[int, int]:
    """Return the number of commas between elements of a value, and the number of its arrays."""
    inner = list(value.values()) if isinstance(value, dict) else value
    if not isinstance(inner, list):
        return 0, 0
    found = [elements_of(one) for one in inner]
    commas = sum(one for one, _ in found) + max(0, len(inner) - 1)
    return commas, sum(one for _, one in found) + isinstance(value, list)


@given(VALUES, st.integers(1, 6), st.integers(0, 6))
def test_elements_are_counted_exactly(value: object, elements: int, arrays: int) -> None:
    """Commas and brackets within strings do not count."""
    commas, lists = elements_of(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_text, "MOST_ELEMENTS", elements)
        patch.setattr(json_text, "MOST_ARRAYS", arrays)
        text = json.dumps(value).encode()
        is_refused = False
        try:
            check_elements(text)
        except InvalidBody as error:
            is_refused = True
            assert str(error).endswith(f"got {commas + 1 if commas >= elements else lists}")

    # A text no longer than the permitted number of arrays is not scanned.
    assert is_refused == (len(text) > arrays and (commas >= elements or lists > arrays))


KEYS = st.sampled_from(["data", "inputs", '"data":[', "x"])
TENSORS: st.SearchStrategy[Any] = st.recursive(
    AWKWARD | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=20,
)
REQUESTS = TENSORS | st.dictionaries(
    KEYS, st.lists(st.dictionaries(KEYS, TENSORS, max_size=3) | TENSORS, max_size=3), max_size=3
)


def around_data(request: Any) -> Any:
    """Return a request in which each data array is replaced by 0."""
    if not isinstance(request, dict):
        return request
    return {
        key: [_without_data(one) for one in value] if isinstance(value, list) else value
        for key, value in request.items()
    }


def _without_data(tensor: Any) -> Any:
    if not isinstance(tensor, dict) or not isinstance(tensor.get("data"), list):
        return tensor
    return {**tensor, "data": 0}


@given(REQUESTS, st.integers(1, 6), st.integers(0, 6), st.sampled_from([None, 1]))
def test_elements_are_counted_around_the_data_of_inputs(
    value: object, elements: int, arrays: int, indent: int | None
) -> None:
    commas, lists = elements_of(around_data(value))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_text, "MOST_ELEMENTS", elements)
        patch.setattr(json_text, "MOST_ARRAYS", arrays)
        text = json.dumps(value, indent=indent).encode()
        is_refused = False
        try:
            check_elements_around_data(text)
        except InvalidBody:
            is_refused = True

    assert is_refused == (len(text) > arrays and (commas >= elements or lists > arrays))


@given(VALUES, st.integers(0, 6), st.booleans())
def test_depth_is_exact(value: object, limit: int, ascii_only: bool) -> None:
    """Brackets within strings do not nest, whatever escapes they contain."""
    text = json.dumps(value, ensure_ascii=ascii_only).encode()

    if depth_of(value) <= limit:
        check_depth(text, limit)
    else:
        with pytest.raises(InvalidBody, match=f"more than {limit} levels"):
            check_depth(text, limit)


@pytest.mark.parametrize("size", [10, 4000, 70_000, 200_000])
def test_depth_is_exact_in_long_texts(size: int) -> None:
    """The text is scanned in pieces: a string may span several of them."""
    wide = b'["' + b"[" * size + b'\\"{",' + b"[]," * size + b"[[1]]]"

    check_depth(wide, 3)
    with pytest.raises(InvalidBody):
        check_depth(wide, 2)


@pytest.mark.parametrize("depth", [101, 10_000, 1_000_000])
@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'[{"\\"]":'])
def test_texts_that_are_far_too_deep_are_refused(depth: int, opening: bytes) -> None:
    with pytest.raises(InvalidBody, match="more than 100 levels deep"):
        check_depth(opening * depth, 100)


def test_refusing_a_deep_text_takes_little_memory() -> None:
    """Only a few times the text itself: nested values are never built."""
    text = b"[" * 1_000_000
    tracemalloc.start()
    try:
        with pytest.raises(InvalidBody):
            check_depth(text, 100)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 8 * len(text)


@given(VALUES)
def test_blanked_texts_keep_their_length_and_structure(value: object) -> None:
    text = json.dumps(value).encode()

    blank = blank_strings(text)

    assert len(text) == len(blank)
    assert b'"' not in blank
    assert skeleton(value) == blank.translate(None, b"_0123456789-nul ").decode()


def skeleton(value: object) -> str:
    match value:
        case dict():
            return "{" + ",".join(":" + skeleton(item) for item in value.values()) + "}"
        case list():
            return "[" + ",".join(map(skeleton, value)) + "]"
    return ""


def test_a_quote_behind_an_escaped_backslash_ends_its_string() -> None:
    text = rb'["a\\\"",["\\"],"]",""]'

    assert rb"[_______,[____],___,__]" == blank_strings(text)


@pytest.mark.parametrize("size", [0, 1, 1000, 4096, 65536, 200_001])
def test_octets_are_counted_in_short_and_in_long_texts(size: int) -> None:
    text = (b"a[{[" * size)[:size]

    assert text.count(b"[") + text.count(b"{") == count_octets(text, b"[{")
    assert text.count(b"[") == count_octets(memoryview(text), b"[")
