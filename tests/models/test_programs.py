from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from xlaserve.authoring.export import export_model
from xlaserve.errors import InvalidModel
from xlaserve.model_config.buckets import FIXED
from xlaserve.model_config.config import ModelConfig
from xlaserve.runtime.exported import jax_export
from xlaserve.runtime.loaded import LoadedModel
from xlaserve.runtime.programs import programs
from xlaserve.runtime.programs.program_table import Program, Table, bucket_shape
from xlaserve.runtime.programs.programs import warmed
from xlaserve.tensors import DATATYPES, Tensor, TensorSpec

Load = Callable[..., LoadedModel]
Run = Callable[..., dict[str, Tensor]]

X = TensorSpec("x", DATATYPES["FP32"], (-1, 4))


def test_bucket_takes_the_place_of_the_batch() -> None:
    assert (6, 4) == bucket_shape(X, 6)


def test_fixed_shape_stays_what_it_is() -> None:
    assert (3, 4) == bucket_shape(TensorSpec("x", DATATYPES["FP32"], (3, 4)), FIXED)


class _Executable:
    """Records the shapes of the inputs of each call."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, leaves: Sequence[jax.Array], inputs: list[Tensor]) -> list[Tensor]:
        self.shapes += [array.shape for array in inputs]
        return inputs


def test_bucket_is_executed_before_it_is_measured() -> None:
    """The first execution is slower than later ones: page faults, threads, caches."""
    executable: Any = _Executable()

    seconds = warmed(executable, [], [X], 6)

    assert len(executable.shapes) > 2
    assert {(6, 4)} == set(executable.shapes)
    assert 0 < seconds


# --- executables for requests --------------------------------------------------------------------


def _table(**milliseconds: float) -> Table:
    """Return a table from arguments such as `rows_1=2.0` (milliseconds), added in this order."""
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
    """Larger batches must be cheaper per row; tiny ones only share the overhead of a call."""
    assert expected == table.batch_limit()


def test_what_was_not_measured_gathers_as_much_as_there_is() -> None:
    """The time per row is unknown, and a batch costs only one execution."""
    unknown = tuple(Program(lambda leaves, inputs: [], rows, (), inf) for rows in (1, 2, 4))

    assert 4 == Table((1, 2, 4), unknown).batch_limit()


def test_loop_that_follows_its_inputs_is_not_warmed_up(
    tmp_path: Path, load: Load, run: Run
) -> None:
    """The loop would not terminate on zeros; on its own rows it does, even if padded."""

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


# --- batches executed in pieces ------------------------------------------------------------------


def _split(**milliseconds: float) -> Table:
    table = Table(may_split=True)
    executable: Any = None
    for name, value in milliseconds.items():
        program = Program(executable, int(name.removeprefix("rows_")), (), value / 1000)
        table = table.with_program(program)
    return table


@pytest.mark.parametrize(
    ("table", "rows", "expected"),
    [
        (_split(rows_8=80, rows_1=1), 5, [1] * 5),
        (_split(rows_8=80, rows_1=1), 1, [1]),
        (_split(rows_1=4, rows_4=8, rows_8=80), 7, [4, 4]),
        (_split(rows_1=4, rows_2=5, rows_4=8, rows_8=80), 5, [4, 1]),
        (_split(rows_1=10, rows_4=38, rows_8=90), 8, [8]),
        (_split(rows_1=10, rows_2=13, rows_8=100), 8, [2] * 4),
        (_split(rows_1=10.7, rows_32=82.7), 2, [1, 1]),
        (_split(rows_1=10.7, rows_32=82.7), 5, [32]),
        (_split(rows_1=10.7, rows_32=82.7), 32, [32]),
        (_split(rows_1=0.01, rows_8=0.99), 8, [8]),
        (_split(rows_1=0.01, rows_8=1), 8, [1] * 8),
        (_split(rows_1=1, rows_8=inf), 8, [8]),
        (_table(rows_1=1, rows_8=80), 8, [8]),
    ],
    ids=[
        *("ones", "one", "padded", "rest", "no gain", "twos"),
        *("few rows in a large bucket", "more of them", "all of them", "tiny", "no longer tiny"),
        *("not measured", "not allowed"),
    ],
)
def test_batch_is_split_where_pieces_are_quicker(
    table: Table, rows: int, expected: list[int]
) -> None:
    assert expected == [piece.rows for piece in table.pieces_for(rows)]


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Simulate execution times proportional to the squared rows; return the rows per piece."""
    fetched: list[int | None] = []

    def seconds(call: object, leaves: object, arguments: Sequence[Tensor]) -> float:
        return float(len(arguments[0]) ** 2)

    def to_host(array: jax.Array, rows: int | None = None) -> Tensor:
        fetched.append(rows)
        return np.asarray(array)[:rows]

    monkeypatch.setattr(programs, "_seconds", seconds)
    monkeypatch.setattr(jax_export, "to_host", to_host)
    return fetched


def test_split_batch_is_answered_as_a_whole_one(
    affine_directory: Path, load: Load, run: Run, pieces: list[int | None]
) -> None:
    model = load(affine_directory, ModelConfig(parameters={"batch_sizes": "2,6"}))
    x = np.arange(20, dtype=np.float32).reshape(5, 4)

    found = run(model, {"x": x})["y"]
    alone = [run(model, {"x": row[None]})["y"] for row in x]

    assert np.allclose(np.concatenate(alone), found, atol=1e-5)
    assert [2, 2, 1] == pieces[:3]
    assert {2: 0, 6: 2} == {bucket.rows: bucket.split_rows for bucket in model.info.buckets}
    assert (12, 5, 2) == (model.expected_seconds(5), model.padded_rows(5), model.padded_rows(1))


def test_batches_stay_whole_where_the_configuration_says_so(
    affine_directory: Path, load: Load, run: Run, pieces: list[int | None]
) -> None:
    config = ModelConfig(parameters={"batch_sizes": "2,6", "split_batches": "false"})
    model = load(affine_directory, config)

    run(model, {"x": np.zeros((6, 4), np.float32)})

    assert [None] == pieces
    assert (36, 6) == (model.expected_seconds(5), model.padded_rows(5))


def test_rows_that_depend_on_one_another_are_never_split(
    tmp_path: Path, load: Load, run: Run, pieces: list[int | None]
) -> None:
    path = tmp_path / "m" / "1"

    def centred(params: None, x: jax.Array) -> jax.Array:
        return x - x.mean(axis=0, keepdims=True)

    inputs = {"x": ("FP32", [-1, 2])}
    export_model(
        centred, None, inputs, path, outputs=["y"], max_batch_size=4, batch_independent=False
    )
    model = load(path)

    assert [[-1.0, -1.0], [1.0, 1.0]] == run(model, {"x": np.array([[0, 0], [2, 2]], np.float32)})[
        "y"
    ].tolist()
    assert [None] == pieces


def test_unknown_word_for_splitting_is_refused(affine_directory: Path, load: Load) -> None:
    with pytest.raises(InvalidModel, match="'split_batches': expected true or false, got 'maybe'"):
        load(affine_directory, ModelConfig(parameters={"split_batches": "maybe"}))
