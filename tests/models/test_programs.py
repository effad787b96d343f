from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from xlaserve.models.buckets import FIXED
from xlaserve.models.config import ModelConfig
from xlaserve.models.export import export_model
from xlaserve.models.loaded import LoadedModel
from xlaserve.models.program_table import Program, Table, bucket_shape
from xlaserve.models.programs import warmed
from xlaserve.tensors import DATATYPES, Tensor, TensorSpec

Load = Callable[..., LoadedModel]
Run = Callable[..., dict[str, Tensor]]

X = TensorSpec("x", DATATYPES["FP32"], (-1, 4))


def test_bucket_takes_the_place_of_the_batch() -> None:
    assert (6, 4) == bucket_shape(X, 6)


def test_fixed_shape_stays_what_it_is() -> None:
    assert (3, 4) == bucket_shape(TensorSpec("x", DATATYPES["FP32"], (3, 4)), FIXED)


class _Executable:
    """Remembers with what it was called."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, leaves: Sequence[jax.Array], inputs: list[Tensor]) -> list[Tensor]:
        self.shapes += [array.shape for array in inputs]
        return inputs


def test_bucket_is_executed_before_it_is_measured() -> None:
    """The first execution is slower than the others: pages, threads, caches."""
    executable: Any = _Executable()

    seconds = warmed(executable, [], [X], 6)

    assert len(executable.shapes) > 2
    assert {(6, 4)} == set(executable.shapes)
    assert 0 < seconds


# --- the executables that requests may use -----------------------------------------------------


def _table(**milliseconds: float) -> Table:
    """Return a table from `rows_1=...` and so on, added in this order."""
    table = Table()
    executable: Any = None
    for name, value in milliseconds.items():
        program = Program(executable, int(name.removeprefix("rows_")), (), value / 1000)
        table = table.with_program(program)
    return table


def test_next_larger_bucket_serves_until_there_is_a_better_one() -> None:
    table = _table(rows_8=1, rows_1=1)
    more = table.with_program(Program(table.programs[0].call, 4, (), 0.001))

    assert [1, 8, 8, 8] == [table.program_for(rows).rows for rows in (0, 2, 4, 9)]
    assert [1, 4, 4, 8] == [more.program_for(rows).rows for rows in (0, 2, 4, 9)]
    assert (1, 8) == table.buckets


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (_table(rows_1=1), 1),
        (_table(rows_1=10, rows_4=12, rows_8=14), 8),
        (_table(rows_1=10, rows_4=12, rows_8=24), 4),
        (_table(rows_1=10, rows_4=60, rows_8=20, rows_16=80), 8),
        (_table(rows_1=10, rows_2=20, rows_4=40), 1),
        (_table(rows_1=0.01, rows_8=0.08), 8),
    ],
    ids=["one", "flat", "then linear", "odd one out", "no gain", "tiny"],
)
def test_batches_stop_where_the_time_per_row_does(table: Table, expected: int) -> None:
    """A larger batch that is not cheaper per row only waits longer; tiny ones share what a call
    costs around the computation."""
    assert expected == table.batch_limit()


def test_what_was_not_measured_gathers_as_much_as_there_is() -> None:
    """Nothing is known of the time per row, and a batch costs one execution."""
    programs = tuple(Program(lambda leaves, inputs: [], rows, (), inf) for rows in (1, 2, 4))

    assert 4 == Table((1, 2, 4), programs).batch_limit()


def test_loop_that_follows_its_inputs_is_not_warmed_up(
    tmp_path: Path, load: Load, run: Run
) -> None:
    """On zeros this one would never end; on its rows it does, padded or not."""

    def until_it_is_large(params: None, x: jax.Array) -> jax.Array:
        def one(row: jax.Array) -> jax.Array:
            return jax.lax.while_loop(lambda v: abs(v).max() < 100, lambda v: v * 2, row)

        return jax.vmap(one)(x)

    inputs = {"x": ("FP32", [-1, 2])}
    path = tmp_path / "m" / "1"
    export_model(until_it_is_large, None, inputs, path, outputs=["y"], max_batch_size=4)
    model = load(path, ModelConfig(parameters={"batch_sizes": "4"}))

    assert model.info.loops_follow_inputs
    assert [0.0] == [bucket.seconds for bucket in model.info.buckets]
    assert (inf, 4) == (model.expected_seconds(1), model.batch_limit)
    assert [[128.0, 64.0]] == run(model, {"x": np.array([[2, 1]], np.float32)})["y"].tolist()
