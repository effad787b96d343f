import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlaserve.models.buckets import MAX_BATCH_SIZE, bucket_for, buckets_up_to

sizes = st.integers(1, MAX_BATCH_SIZE)


@pytest.mark.parametrize(
    ("max_batch_size", "expected"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (3, (1, 2, 3)),
        (5, (1, 2, 3, 4, 5)),
        (7, (1, 2, 3, 4, 6, 7)),
        (64, (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)),
    ],
)
def test_buckets_are_powers_of_two_and_midpoints(
    max_batch_size: int, expected: tuple[int, ...]
) -> None:
    assert expected == buckets_up_to(max_batch_size)


@given(sizes)
def test_largest_bucket_is_the_maximum(max_batch_size: int) -> None:
    assert max_batch_size == buckets_up_to(max_batch_size)[-1]


@given(sizes, st.data())
def test_padding_is_at_most_half_of_the_rows(max_batch_size: int, data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, max_batch_size))

    bucket = bucket_for(buckets_up_to(max_batch_size), rows)

    assert rows <= bucket <= max(rows * 3 / 2, 1)


def test_number_of_buckets_is_bounded() -> None:
    """Each costs a compilation, so that the largest batch must not ask for many."""
    assert 32 == len(buckets_up_to(MAX_BATCH_SIZE))


def test_no_bucket_holds_more_rows_than_the_maximum() -> None:
    with pytest.raises(ValueError, match="9 rows, but the largest bucket has 8"):
        bucket_for(buckets_up_to(8), 9)


def test_empty_batch_takes_the_first_bucket() -> None:
    assert 1 == bucket_for(buckets_up_to(8), 0)
