"""The dynamic table: entries noted lazily count as if they had been inserted (RFC 7541 4)."""

from typing import TypeAlias

from hypothesis import given
from hypothesis import strategies as st
from support.hpack_pair import LayoutPair, string

from xlaserve.grpc.http2.dynamic_table import BlockValues, DynamicTable, Insertion
from xlaserve.grpc.http2.header_fields import Field, name_from

NAME = name_from(b"a")
INSERTION = Insertion(0, "a", NAME.size, NAME)
TWO = (INSERTION, Insertion(1, "a", NAME.size, NAME))
_ALL = 1 << 30

Step: TypeAlias = list[bytes] | int | None
"""The values of a block, a new table size, or None to insert the pending entries."""


def values_of(*values: bytes) -> BlockValues:
    return BlockValues(list(values), (), [], None)


def note(table: DynamicTable, values: list[bytes]) -> None:
    size = sum(NAME.size + len(value) for value in values)
    table.add_later(TWO[: len(values)], values_of(*values), size)


VALUES = st.lists(st.integers(0, 4200).map(lambda size: b"v" * size), min_size=1, max_size=2)
STEPS: st.SearchStrategy[Step] = st.one_of(
    VALUES, VALUES, VALUES, st.none(), st.sampled_from([0, 33, 100, 1000, 4096])
)


@given(st.lists(STEPS, max_size=30))
def test_the_table_is_what_it_would_be_if_entries_had_been_made_at_once(steps: list[Step]) -> None:
    table = DynamicTable()
    model: list[Field] = []
    most = table.max_bytes
    for step in steps:
        if isinstance(step, list):
            note(table, step)
            model = [NAME.field(value) for value in reversed(step)] + model
        elif step is None:
            table.settle()
        else:
            table.resize(step)
            most = step
        while sum(size for _, _, size, _ in model) > most:
            model.pop()

        assert model == table.newest(_ALL)
        assert model[:2] == table.newest(2)
        assert sum(size for _, _, size, _ in model) == table.size()
    table.settle()

    assert model == list(table.entries)


def test_no_more_is_noted_than_the_limit() -> None:
    """Otherwise a client could fill the memory with blocks that nothing refers to."""
    table = DynamicTable()
    for _ in range(1000):
        note(table, [b"v" * 100])

    assert table.max_bytes // (NAME.size + 100) + 1 == len(table._later)


def test_entries_are_not_made_before_they_are_asked_for() -> None:
    class Refusing(BlockValues):
        def all(self) -> list[bytes]:
            raise AssertionError

    table = DynamicTable()
    for _ in range(100):
        table.add_later((INSERTION,), Refusing([], (), [], None), 1000)

    assert 100 == table.changes


def test_a_long_value_is_not_kept_for_a_short_entry_of_its_block() -> None:
    """The table would hold memory beyond its limit."""
    pair = LayoutPair()
    for number in range(10):
        pair.compare(
            b"\x83\x40\x01a\x01%d\x00\x01b" % (number % 10) + string(b"w" * 5000, coded=False)
        )

    assert pair.read
    assert pair.ours.table.last is None
