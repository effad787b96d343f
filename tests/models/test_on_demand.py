"""Shapes compiled on their first request, for a single model."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest

from xlaserve.errors import InvalidModel, InvalidTensor, LoadCancelled
from xlaserve.model_config.config import ModelConfig
from xlaserve.runtime.devices.sites import Site
from xlaserve.runtime.exported import single_file
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.loaded import LoadedModel, OnDemand
from xlaserve.tensors import Tensor

Load = Callable[..., LoadedModel]


@pytest.fixture
def centring(tmp_path: Path) -> Path:
    """Return a file that centres `input_0`, FP32[-1,-1,4], over its second dimension."""
    shape = jax.export.symbolic_shape("b, s, 4")
    argument = jax.ShapeDtypeStruct(shape, np.float32)
    function = jax.jit(lambda x: x - x.mean(axis=1, keepdims=True))
    path = tmp_path / "m.jaxexp"
    path.write_bytes(jax.export.export(function)(argument).serialize())
    return path


def config(limit: str, **parameters: str) -> ModelConfig:
    return ModelConfig(max_batch_size=2, parameters={"max_on_demand_shapes": limit, **parameters})


def inputs(rows: int, size: int) -> dict[str, Tensor]:
    return {"input_0": np.random.default_rng(size).random((rows, size, 4), np.float32)}


def shapes_of(model: LoadedModel) -> OnDemand:
    assert model.on_demand is not None
    return model.on_demand


def ask(model: LoadedModel, rows: int, size: int) -> Tensor:
    """Execute as the core does, and check the answer."""
    asked = inputs(rows, size)
    shapes = shapes_of(model)
    shape = shapes.shape_of(asked)
    executable = model if shape is None else shapes.find(shape) or shapes.compile(shape)
    output = executable.execute(asked)["output_0"]
    assert isinstance(output, np.ndarray)
    x = asked["input_0"]
    assert np.allclose(x - x.mean(axis=1, keepdims=True), output, atol=1e-6)
    return output


def kept(model: LoadedModel) -> list[tuple[int, tuple[int, ...]]]:
    return [(bucket.rows, bucket.sizes) for bucket in model.info.buckets]


def test_a_shape_is_compiled_once(centring: Path, load: Load, compilations: list[str]) -> None:
    """Nothing is compiled with the load; later, each shape at a batch size that fits the rows."""
    model = load(centring, config("4", batch_sizes="2"))
    counts = [len(compilations)]
    for rows, size in ((1, 5), (2, 5), (1, 5), (1, 7), (2, 7)):
        ask(model, rows, size)
        counts.append(len(compilations))

    assert [0, 1, 1, 1, 2, 2] == counts
    assert [(2, (5,)), (2, (7,))] == kept(model)
    assert 2 == model.info.on_demand_compilations
    assert model.info.compile_seconds == sum(b.compile_seconds for b in model.info.buckets) > 0


def test_the_one_that_was_not_asked_for_longest_is_dropped(centring: Path, load: Load) -> None:
    model = load(centring, config("2"))
    for size in (3, 4, 3, 5):
        ask(model, 1, size)
    two = model.info

    assert [(1, (3,)), (1, (5,))] == kept(model)

    ask(model, 1, 4)

    assert [(1, (5,)), (1, (4,))] == kept(model)
    assert 4 == model.info.on_demand_compilations
    assert model.info.compile_seconds > two.compile_seconds
    assert model.info.memory.executables_bytes == two.memory.executables_bytes


def test_what_is_dropped_serves_whoever_holds_it(centring: Path, load: Load) -> None:
    model = load(centring, config("1"))
    shapes = shapes_of(model)
    first = shapes.compile((1, (3,)))
    shapes.compile((1, (4,)))

    assert shapes.find((1, (3,))) is None
    assert (1, 3, 4) == np.shape(first.execute(inputs(1, 3))["output_0"])


def test_listed_sizes_are_compiled_with_the_load(centring: Path, load: Load) -> None:
    model = load(centring, config("2", compiled_shapes="3"))

    assert shapes_of(model).shape_of(inputs(1, 3)) is None
    assert [(1, (3,)), (2, (3,))] == kept(model)
    ask(model, 1, 3)
    ask(model, 2, 9)
    assert [(1, (3,)), (2, (3,)), (2, (9,))] == kept(model)


def test_memory_has_what_is_compiled(centring: Path, load: Load) -> None:
    model = load(centring, config("2"))
    before = model.info.memory.total_bytes
    ask(model, 2, 1000)
    memory = model.info.memory

    assert memory.total_bytes > before + 2 * 1000 * 4 * 4
    assert memory.total_bytes == sum(memory.per_device.values())


def test_every_copy_has_the_shape(centring: Path, load: Load, compilations: list[str]) -> None:
    model = load(centring, config("1", devices="0,1"))
    found = shapes_of(model).compile((1, (3,)))

    assert 2 == len(compilations)
    for replica in range(2):
        output = found.execute(inputs(1, 3), resident=True, replica=replica)["output_0"]
        assert {replica} == {device.id for device in output.array.devices()}  # type: ignore[union-attr]


@pytest.mark.parametrize("accelerator", [False, True])
def test_a_shape_is_dispatched_as_its_model_is(
    centring: Path, load: Load, monkeypatch: pytest.MonkeyPatch, accelerator: bool
) -> None:
    monkeypatch.setattr(Site, "is_accelerator", accelerator)
    model = load(centring, config("1", devices="0,1"))
    dispatching = shapes_of(model).compile((1, (3,))).dispatching

    if not accelerator:
        assert dispatching is None
        return
    assert dispatching is not None
    assert ("cpu:0", "cpu:1") == dispatching.queues
    asked = inputs(1, 3)
    found = [dispatching.dispatch(asked, replica=replica).fetch() for replica in range(2)]
    for outputs in found:
        assert np.array_equal(ask(model, 1, 3), np.asarray(outputs["output_0"]))


def test_threads_that_want_the_same_compile_it_once(
    centring: Path, load: Load, compilations: list[str]
) -> None:
    shapes = shapes_of(load(centring, config("4")))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(shapes.compile, [(1, (3,))] * 4))

    assert (1, 1) == (len(set(map(id, found))), len(compilations))


def test_rows_that_depend_on_one_another_are_not_padded(centring: Path, load: Load) -> None:
    model = load(centring, config("4", batch_independent="false"))
    ask(model, 1, 3)
    ask(model, 2, 3)

    assert [(1, (3,)), (2, (3,))] == kept(model)


def test_a_closed_model_compiles_nothing(centring: Path) -> None:
    model = single_file.load(centring, LoadContext("m", "1", config("4")))
    model.close()

    with pytest.raises(LoadCancelled):
        shapes_of(model).compile((1, (3,)))


def test_a_size_of_nothing_is_refused(centring: Path, load: Load) -> None:
    model = load(centring, config("4"))

    with pytest.raises(InvalidTensor, match="'input_0': expected dimension 1 of size 1 or more"):
        ask(model, 1, 0)


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        ("many", "'max_on_demand_shapes': expected a number of shapes, got 'many'"),
        ("-1", "expected a number of shapes, got '-1'"),
        ("9", "expected at most 8, the server's max_on_demand_shapes, got 9"),
        (
            "0",
            "but dimensions other than a leading batch need sizes: set compiled_shapes or"
            " max_on_demand_shapes at export or as parameters of its configuration",
        ),
    ],
)
def test_what_is_not_allowed_fails_the_load(centring: Path, limit: str, text: str) -> None:
    context = LoadContext("m", "1", config(limit), max_on_demand_shapes=8)
    with pytest.raises(InvalidModel) as caught:
        single_file.load(centring, context)
    assert text in str(caught.value)


def test_without_open_dimensions_there_is_nothing_to_ask_for(
    affine_directory: Path, load: Load
) -> None:
    with pytest.raises(InvalidModel, match="expected dynamic dimensions besides the batch, got"):
        load(affine_directory, config("4"))
