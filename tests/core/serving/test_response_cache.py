"""Cached responses: their keys, their limits, and their eviction."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlaserve.net.ledger import Kind, Ledger
from xlaserve.serving.infer_call import InferCall
from xlaserve.serving.inference import InferOutput
from xlaserve.serving.response_cache import (
    ENTRY_BYTES,
    MOST_EXACT_BYTES,
    Key,
    ResponseCache,
    key_of,
)
from xlaserve.tensors import BYTES, DATATYPES, Tensor

FP32 = DATATYPES["FP32"]


def keyed(
    inputs: dict[str, Any], parameters: dict[str, Any] | None = None, chosen: tuple[str, ...] = ()
) -> Key:
    call = InferCall()
    call.inputs = inputs
    call.parameters = parameters or {}
    if chosen:
        specs: Any = tuple(SimpleNamespace(name=name) for name in chosen)
        call.chosen = specs
    return key_of(call, ("x", "z"))


def floats(*values: float) -> Tensor:
    return np.array([values], np.float32)


def texts(*values: bytes) -> Tensor:
    return np.array([values], BYTES.dtype)


NAN = np.array([[0x7FC00000]], np.uint32).view(np.float32)
OTHER_NAN = np.array([[0x7FC00001]], np.uint32).view(np.float32)
LONG = np.zeros((1, MOST_EXACT_BYTES), np.float32)
NEARLY = LONG.copy()
NEARLY[0, -1] = -0.0

DIFFERENT: dict[str, tuple[Key, Key]] = {
    "another sign of zero": (keyed({"x": floats(0.0)}), keyed({"x": floats(-0.0)})),
    "another sign of the last zero of many": (keyed({"x": LONG}), keyed({"x": NEARLY})),
    "another NaN": (keyed({"x": NAN}), keyed({"x": OTHER_NAN})),
    "another shape": (keyed({"x": floats(1, 2)}), keyed({"x": floats(1, 2).T})),
    "another shape of many": (keyed({"x": LONG}), keyed({"x": LONG.reshape(2, -1)})),
    "texts that are equal when joined": (
        keyed({"x": texts(b"ab", b"c")}),
        keyed({"x": texts(b"a", b"bc")}),
    ),
    "a text that looks like two": (
        keyed({"x": texts(b"a\x01\x00\x00\x00b")}),
        keyed({"x": texts(b"a", b"b")}),
    ),
    "an input that is absent": (keyed({"x": floats(1)}), keyed({"z": floats(1)})),
    "inputs that are exchanged": (
        keyed({"x": floats(1), "z": floats(2)}),
        keyed({"x": floats(2), "z": floats(1)}),
    ),
    "another output": (
        keyed({"x": floats(1)}, chosen=("y",)),
        keyed({"x": floats(1)}, chosen=("w",)),
    ),
    "outputs in another order": (
        keyed({"x": floats(1)}, chosen=("y", "w")),
        keyed({"x": floats(1)}, chosen=("w", "y")),
    ),
    "a parameter": (keyed({"x": floats(1)}), keyed({"x": floats(1)}, {"t": 0})),
    "true and one": (
        keyed({"x": floats(1)}, {"t": True}),
        keyed({"x": floats(1)}, {"t": 1}),
    ),
    "one and its text": (keyed({"x": floats(1)}, {"t": 1}), keyed({"x": floats(1)}, {"t": "1"})),
    "parameters of zero": (
        keyed({"x": floats(1)}, {"t": 0.0}),
        keyed({"x": floats(1)}, {"t": -0.0}),
    ),
    "the bytes of a hash": (
        keyed({"x": LONG}),
        keyed({"x": np.frombuffer(bytes(keyed({"x": LONG})[3][1]), np.uint8)}),  # type: ignore[index]
    ),
}


@pytest.mark.parametrize(("one", "other"), DIFFERENT.values(), ids=DIFFERENT)
def test_requests_that_differ_have_keys_that_do(one: Key, other: Key) -> None:
    assert one != other


def test_requests_that_are_equal_have_equal_keys() -> None:
    """Equality covers NaN, any order of inputs, and parameters that do not affect the answer."""
    one = keyed({"x": NAN, "z": LONG}, {"a": 1, "b": "2", "priority": 1, "timeout": 5})
    other = keyed({"z": LONG.copy(), "x": NAN.copy()}, {"b": "2", "a": 1, "priority": 2})

    assert one == other
    assert hash(one) == hash(other)


@given(
    st.lists(st.binary(max_size=4), min_size=1, max_size=4),
    st.lists(st.binary(max_size=4), min_size=1, max_size=4),
)
def test_keys_of_texts_are_equal_only_where_the_texts_are(
    one: list[bytes], other: list[bytes]
) -> None:
    assert (one == other) == (keyed({"x": texts(*one)}) == keyed({"x": texts(*other)}))


# # --- stored answers ---


def answer(size: int = 1, value: float = 1.0) -> tuple[InferOutput, ...]:
    return (InferOutput("y", FP32, np.full((1, size), value, np.float32)),)


def kept(section: Any, key: str) -> Any:
    found = section.find((key,))
    return None if found is None else float(found.outputs[0].data[0, 0])


def room(answers: int, size: int = 1) -> int:
    return answers * (ENTRY_BYTES + 4 * size)


def test_the_one_that_was_not_asked_for_longest_is_evicted() -> None:
    ledger = Ledger(1 << 20)
    cache = ResponseCache(room(2), ledger)
    section = cache.section()
    for name, value in (("a", 1.0), ("b", 2.0)):
        section.keep((name,), answer(value=value))
    section.find(("a",))
    section.keep(("c",), answer(value=3.0))

    assert [1.0, None, 3.0] == [kept(section, name) for name in "abc"]
    assert room(2) == cache.held == ledger.held_for(Kind.CACHED) == ledger.held
    assert 1 == cache.evictions


@pytest.mark.parametrize("limit", [0, 1, ENTRY_BYTES + 3])
def test_an_answer_that_does_not_fit_is_not_kept_and_evicts_nothing(limit: int) -> None:
    cache = ResponseCache(limit, Ledger(1 << 20))
    section = cache.section()
    section.keep(("a",), answer())

    assert (None, 0, 0) == (kept(section, "a"), len(cache), cache.held)
    fitting = ResponseCache(room(1), Ledger(1 << 20))
    section = fitting.section()
    section.keep(("a",), answer())
    section.keep(("large",), answer(2))
    assert 1.0 == kept(section, "a")


def test_what_is_kept_is_a_copy_that_nobody_changes() -> None:
    """The output is a view of a batch or message, whose buffer is reused."""
    section = ResponseCache(1 << 20, Ledger(1 << 20)).section()
    batch = np.ones((4, 1), np.float32)
    section.keep(("a",), (InferOutput("y", FP32, batch[:1]),))
    batch[:] = 7
    found = section.find(("a",))
    assert found is not None

    data = found.outputs[0].data
    assert 1.0 == data[0, 0]
    assert data.base is None
    with pytest.raises(ValueError, match="read-only"):
        data[0, 0] = 5


def test_instances_do_not_find_what_others_answered() -> None:
    cache = ResponseCache(1 << 20, Ledger(1 << 20))
    one, other = cache.section(), cache.section()
    one.keep(("a",), answer())

    assert (1.0, None) == (kept(one, "a"), kept(other, "a"))


def test_a_section_that_is_closed_is_empty_and_stays_so() -> None:
    cache = ResponseCache(1 << 20, Ledger(1 << 20))
    one, other = cache.section(), cache.section()
    one.keep(("a",), answer())
    other.keep(("a",), answer(value=2.0))
    one.close()
    one.keep(("b",), answer())

    assert (None, None, 2.0) == (kept(one, "a"), kept(one, "b"), kept(other, "a"))
    assert room(1) == cache.held


def test_everything_is_given_back_under_pressure_and_nothing_is_kept_then() -> None:
    ledger = Ledger(1 << 20)
    cache = ResponseCache(1 << 18, ledger)
    section = cache.section()
    section.keep(("a",), answer())
    account = ledger.open()
    account.hold(ledger.high)

    assert (0, 1) == (cache.held, cache.evictions)
    assert ledger.is_pressed
    section.keep(("b",), answer())
    assert 0 == len(cache)
    account.release(ledger.high)
    section.keep(("b",), answer())
    assert 1.0 == kept(section, "b")


@given(
    st.integers(0, 4 * ENTRY_BYTES),
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(1, 400), st.booleans()),
        max_size=40,
    ),
)
def test_it_never_holds_more_than_its_limit_and_counts_what_it_holds(
    limit: int, steps: list[tuple[int, int, int, bool]]
) -> None:
    ledger = Ledger(1 << 20)
    cache = ResponseCache(limit, ledger)
    sections = [cache.section() for _ in range(3)]
    for section, name, size, closes in steps:
        sections[section].keep((name, "key"), answer(size, value=size))
        call = InferCall()
        call.kept = sections[section].find((name, "key"))
        call.instance = cast(Any, None)
        cache.keep_written(call, b"m" * (size % 7), "", b"a" * size)
        if closes and section == 2:
            sections[section].close()
        entries = [entry for one in sections for entry in one.entries.values()]

        assert sum(entry.size for entry in entries) == cache.held == ledger.held
        assert cache.held <= limit
        assert len(entries) == len(cache)
        assert all(e.outputs[0].data.shape[1] == e.outputs[0].data[0, 0] for e in entries)
        written = {message: entry for entry in entries for message in entry.messages}
        assert written == {message: one.entry for message, one in cache.written.items()}
