"""Buckets that are compiled after a load, while requests are served."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from support.plain_models import load_plain

from xlaserve.errors import InvalidModel, LoadCancelled, OutOfMemory
from xlaserve.model_config.config import ModelConfig
from xlaserve.runtime.exported.jax_export import JaxExportModel
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.loaded import LoadedModel, Stage
from xlaserve.runtime.programs import programs
from xlaserve.tensors import Tensor

Run = Callable[..., dict[str, Tensor]]


@pytest.fixture
def model(affine_directory: Path, compilations: list[str]) -> Iterator[JaxExportModel]:
    """The affine model, ready to serve: two of its five buckets are compiled.

    Batches stay whole: whether pieces of them are quicker is measured, and not of these tests.
    """
    compilations.clear()
    config = ModelConfig(parameters={"split_batches": "false"})
    context = LoadContext("m", "1", config, background_compile=True)
    loaded = load_plain(affine_directory, context)
    yield loaded
    loaded.close()


def _rows(count: int) -> Tensor:
    return np.arange(count * 4, dtype=np.float32).reshape(count, 4)


def _compiled(model: LoadedModel) -> list[int]:
    return [bucket.rows for bucket in model.info.buckets]


def _check_all(model: LoadedModel, reference: LoadedModel, run: Run) -> None:
    for count in range(1, 7):
        x = {"x": _rows(count)}
        assert np.allclose(run(reference, x)["y"], run(model, x)["y"], atol=1e-5)


def test_smallest_and_largest_bucket_are_enough_to_serve(
    model: JaxExportModel, affine_model: LoadedModel, run: Run, compilations: list[str]
) -> None:
    """Rows without their own bucket use the next larger one; nothing is compiled for them."""
    assert 2 == len(compilations)
    assert [1, 6] == _compiled(model)
    assert [1, 6, 6] == [model.padded_rows(rows) for rows in (1, 2, 6)]
    _check_all(model, affine_model, run)
    assert 2 == len(compilations)


def test_rest_is_compiled_once(
    model: JaxExportModel, affine_model: LoadedModel, run: Run, compilations: list[str]
) -> None:
    before = model.info

    model.compile_rest()
    model.compile_rest()

    assert 5 == len(compilations)
    assert [1, 2, 3, 4, 6] == _compiled(model)
    assert before.compile_seconds < model.info.compile_seconds
    assert before.memory.executables_bytes < model.info.memory.executables_bytes
    assert model.info.memory.total_bytes == sum(model.info.memory.per_device.values())
    _check_all(model, affine_model, run)


def test_memory_is_that_of_a_load_that_compiled_all(
    model: JaxExportModel, affine_model: LoadedModel
) -> None:
    model.compile_rest()

    assert affine_model.info.memory == model.info.memory


def test_each_bucket_adds_no_more_than_was_to_be_reserved(model: JaxExportModel) -> None:
    """Nor much less; behind the last one nothing is to be reserved."""
    held: list[int] = []
    added: list[int] = []

    def before_each() -> None:
        held.append(sum(model.info.memory.per_device.values()))
        added.append(sum(model.next_bucket_bytes.values()))

    model.compile_rest(before_each)
    grown = [after - before for before, after in itertools.pairwise(held)]

    assert 3 == len(grown)
    assert added.pop() == 0
    assert all(0 < real <= wanted < 2 * real for real, wanted in zip(grown, added, strict=True))
    model.close()
    assert {} == model.next_bucket_bytes


def test_each_bucket_serves_as_soon_as_it_is_warm(model: JaxExportModel) -> None:
    """The bucket that saves the most padding comes first."""
    seen: list[tuple[str, list[int]]] = []

    model.compile_rest(on_stage=lambda stage: seen.append((str(stage), _compiled(model))))

    assert [
        ("compiling 1 of 3", [1, 6]),
        ("warming 1 of 3", [1, 6]),
        ("compiling 2 of 3", [1, 3, 6]),
        ("warming 2 of 3", [1, 3, 6]),
        ("compiling 3 of 3", [1, 2, 3, 6]),
        ("warming 3 of 3", [1, 2, 3, 6]),
    ] == seen


def test_requests_are_served_meanwhile(
    model: JaxExportModel, affine_model: LoadedModel, run: Run
) -> None:
    with ThreadPoolExecutor(1) as pool:
        rest = pool.submit(model.compile_rest)
        while not rest.done():
            _check_all(model, affine_model, run)
        rest.result()

    assert [1, 2, 3, 4, 6] == _compiled(model)


def test_cancelled_rest_keeps_what_it_has_and_can_go_on(model: JaxExportModel) -> None:
    def after_one() -> None:
        if 3 in _compiled(model):
            raise LoadCancelled("m")

    with pytest.raises(LoadCancelled):
        model.compile_rest(after_one)
    assert [1, 3, 6] == _compiled(model)

    model.compile_rest()
    assert [1, 2, 3, 4, 6] == _compiled(model)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("RESOURCE_EXHAUSTED: Out of memory", OutOfMemory), ("INTERNAL: no such luck", InvalidModel)],
)
def test_rest_that_fails_leaves_the_model_serving(
    model: JaxExportModel,
    affine_model: LoadedModel,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    expected: type[Exception],
) -> None:
    def failing(*args: object) -> object:
        raise jax.errors.JaxRuntimeError(text)

    monkeypatch.setattr(programs, "warmed", failing)
    before = model.info

    with pytest.raises(expected, match=text):
        model.compile_rest()

    assert before == model.info
    _check_all(model, affine_model, run)


def test_close_ends_the_rest_and_leaves_nothing(affine_directory: Path) -> None:
    gc.collect()
    before = len(jax.live_arrays())
    context = LoadContext("m", "1", ModelConfig(), background_compile=True)
    model = load_plain(affine_directory, context)
    leaves = [weakref.ref[object](leaf) for copy in model._copies for leaf in copy.leaves]
    compiling, closing = threading.Event(), threading.Event()

    def hold(stage: Stage) -> None:
        compiling.set()
        assert closing.wait(10)

    with ThreadPoolExecutor(2) as pool:
        rest = pool.submit(model.compile_rest, on_stage=hold)
        assert compiling.wait(10)
        closed = pool.submit(model.close)
        while not model._stock._closed:
            pass
        closing.set()
        closed.result()
        rest.result()
    gc.collect()

    assert [1, 6] == _compiled(model)
    assert before == len(jax.live_arrays())
    assert [None, None] == [leaf() for leaf in leaves]


def test_rest_of_a_closed_model_is_nothing(model: JaxExportModel, compilations: list[str]) -> None:
    model.close()
    compilations.clear()

    model.compile_rest()

    assert [] == compilations


def test_without_a_background_a_load_compiles_all(
    affine_model: LoadedModel, compilations: list[str]
) -> None:
    affine_model.compile_rest()

    assert [] == compilations
    assert [1, 2, 3, 4, 6] == _compiled(affine_model)


def test_close_does_not_wait_for_the_turn_of_the_rest(model: JaxExportModel) -> None:
    """A load that makes room holds the rest of all models back until it has its room."""
    waiting, closed = threading.Event(), threading.Event()

    def wait_for_a_turn() -> None:
        waiting.set()
        assert closed.wait(10), "close waits for the rest"

    with ThreadPoolExecutor(1) as pool:
        rest = pool.submit(model.compile_rest, wait_for_a_turn)
        assert waiting.wait(10)
        model.close()
        closed.set()
        rest.result()

    assert [1, 6] == _compiled(model)
