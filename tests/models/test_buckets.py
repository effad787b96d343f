import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlaserve.errors import InvalidModel
from xlaserve.model_config import buckets
from xlaserve.model_config.buckets import FIXED, MAX_BATCH_SIZE, buckets_up_to
from xlaserve.model_config.config import ModelConfig
from xlaserve_proto import inference

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

    bucket = min(size for size in buckets_up_to(max_batch_size) if size >= rows)

    assert rows <= bucket <= max(rows * 3 / 2, 1)


def test_number_of_buckets_is_bounded() -> None:
    """Each costs a compilation, so a large batch limit must not create many."""
    assert 32 == len(buckets_up_to(MAX_BATCH_SIZE))


# --- as configured -----------------------------------------------------------------------------


def _preferring(*sizes: int, **parameters: str) -> ModelConfig:
    batching = inference.ModelDynamicBatching(preferred_batch_size=list(sizes))
    return ModelConfig(
        parameters=parameters, message=inference.ModelConfig(dynamic_batching=batching)
    )


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (ModelConfig(), (1, 2, 3, 4, 6, 8, 12, 16)),
        (ModelConfig(parameters={"batch_sizes": "1, 8"}), (1, 8, 16)),
        (ModelConfig(parameters={"batch_sizes": "4"}), (4, 16)),
        (_preferring(5, 8), (1, 2, 3, 4, 5, 6, 8, 12, 16)),
        (_preferring(5, batch_sizes="16"), (5, 16)),
        (ModelConfig(message=inference.ModelConfig()), (1, 2, 3, 4, 6, 8, 12, 16)),
        (ModelConfig(parameters={"batch_independent": "false"}), tuple(range(1, 17))),
    ],
)
def test_configuration_decides_the_buckets(config: ModelConfig, expected: tuple[int, ...]) -> None:
    """The largest batch always has a bucket."""
    assert expected == buckets.plan(16, config).sizes


def test_without_a_batch_there_is_one_bucket() -> None:
    found = buckets.plan(0, ModelConfig())

    assert ((FIXED,), (FIXED,), ()) == (found.sizes, found.first, found.rest)


@pytest.mark.parametrize(
    ("limit", "config", "text"),
    [
        (16, ModelConfig(parameters={"batch_sizes": "1,x"}), 'expected sizes like "1,8,32"'),
        (16, ModelConfig(parameters={"batch_sizes": ""}), 'expected sizes like "1,8,32"'),
        (16, ModelConfig(parameters={"batch_sizes": "0"}), "batch_sizes: expected 1 to 16, got 0"),
        (16, ModelConfig(parameters={"batch_sizes": "17"}), "expected 1 to 16, got 17"),
        (16, _preferring(17), "preferred_batch_size: expected 1 to 16, got 17"),
        (0, ModelConfig(parameters={"batch_sizes": "1"}), "the model has no batch dimension"),
        (16, ModelConfig(parameters={"batch_independent": "no"}), "expected true or false"),
        (65, ModelConfig(parameters={"batch_independent": "false"}), "expected at most 64 for"),
        (
            8,
            ModelConfig(parameters={"batch_independent": "false", "batch_sizes": "1"}),
            "is compiled for every size",
        ),
        (
            100,
            ModelConfig(parameters={"batch_sizes": ",".join(map(str, range(1, 100)))}),
            "expected at most 64 batch sizes, got 100",
        ),
    ],
)
def test_buckets_that_cannot_be_are_refused(limit: int, config: ModelConfig, text: str) -> None:
    with pytest.raises(InvalidModel) as caught:
        buckets.plan(limit, config)
    assert text in str(caught.value)


def test_smallest_and_largest_come_first() -> None:
    """They suffice for serving; the others only save padding."""
    found = buckets.plan(64, ModelConfig())

    assert (1, 64) == found.first
    assert sorted(found.sizes) == sorted({*found.first, *found.rest})
    assert (16, 32, 6) == found.rest[:3]


def test_dependent_rows_leave_nothing_for_later() -> None:
    found = buckets.plan(8, ModelConfig(parameters={"batch_independent": "false"}))

    assert (found.sizes, ()) == (found.first, found.rest)


@given(sizes)
def test_each_bucket_is_compiled_once(max_batch_size: int) -> None:
    found = buckets.plan(max_batch_size, ModelConfig())

    assert sorted(found.sizes) == sorted((*found.first, *found.rest))


@pytest.mark.parametrize(
    ("max_batch_size", "listed", "expected"),
    [(0, None, (1,)), (8, None, (1,)), (0, "5,1,70", (1, 5, 70)), (8, "8", (8,))],
)
def test_numbers_of_rows_that_are_compiled_by_themselves(
    max_batch_size: int, listed: str | None, expected: tuple[int, ...]
) -> None:
    parameters = {} if listed is None else {"batch_sizes": listed}

    assert expected == buckets.exact(max_batch_size, ModelConfig(parameters=parameters))


@pytest.mark.parametrize(("max_batch_size", "listed"), [(8, "9"), (0, "0"), (0, "65537")])
def test_numbers_of_rows_beyond_the_limits_are_refused(max_batch_size: int, listed: str) -> None:
    with pytest.raises(InvalidModel, match="batch_sizes: expected at most 64 sizes of 1 to"):
        buckets.exact(max_batch_size, ModelConfig(parameters={"batch_sizes": listed}))
