# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
import numpy as np
import pytest
from jax.core import ShapedArray

from xlaserve.artifact import shapes
from xlaserve.artifact.shapes import OpenDimensions
from xlaserve.errors import InvalidModel, InvalidTensor
from xlaserve.model_config.config import ModelConfig
from xlaserve.runtime.exported import single_file
from xlaserve.runtime.exported.outputs import DeviceTensor
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.loaded import LoadedModel
from xlaserve.tensors import DATATYPES, Tensor, TensorSpec

Load = Callable[..., LoadedModel]
Run = Callable[..., dict[str, Tensor]]

SPECS = tuple(TensorSpec(name, DATATYPES["FP32"], (-1, -1, 4)) for name in ("x", "y"))


def _config(sizes: str, **parameters: str) -> ModelConfig:
    return ModelConfig(max_batch_size=2, parameters={"compiled_shapes": sizes, **parameters})


def _avals(*written: str) -> list[Any]:
    scope = jax.export.SymbolicScope()
    found = [jax.export.symbolic_shape(shape, scope=scope) for shape in written]
    return [ShapedArray(shape, np.float32) for shape in found]


@pytest.fixture
def attention(tmp_path: Path) -> Path:
    """Return a file that centres `x`, FP32[-1,-1,4], over its second dimension, and adds `y`."""
    scope = jax.export.SymbolicScope()
    shape = jax.export.symbolic_shape("b, s, 4", scope=scope)
    argument = jax.ShapeDtypeStruct(shape, np.float32)
    function = jax.jit(lambda x, y: x - x.mean(axis=1, keepdims=True) + y)
    path = tmp_path / "m.jaxexp"
    path.write_bytes(jax.export.export(function)(argument, argument).serialize())
    return path


def _inputs(rows: int, size: int, other: int | None = None) -> dict[str, Tensor]:
    random = np.random.default_rng(rows * size)
    return {
        "input_0": random.random((rows, size, 4), np.float32),
        "input_1": random.random((rows, other or size, 4), np.float32),
    }


def test_listed_sizes_are_served_exactly(
    attention: Path, load: Load, run: Run, compilations: list[str]
) -> None:
    """Rows may be padded, but other dimensions may not: zeros would change the mean."""
    model = load(attention, _config("3, 8"))
    compiled = len(compilations)

    assert 4 == compiled
    for rows, size in ((1, 3), (2, 3), (1, 8), (2, 8)):
        inputs = _inputs(rows, size)
        x, y = inputs.values()
        found = run(model, inputs)["output_0"]
        assert np.allclose(x - x.mean(axis=1, keepdims=True) + y, found, atol=1e-5)
    assert compiled == len(compilations)
    assert [(1, (3,)), (2, (3,)), (1, (8,)), (2, (8,))] == [
        (bucket.rows, bucket.sizes) for bucket in model.info.buckets
    ]
    assert model.batch_limit in (1, 2)


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        (_inputs(1, 4), "'input_0': expected dimension 1 of size 3, 8 (compiled_shapes)"),
        (_inputs(1, 3, 8), "'input_1': expected dimension 1 of size 3 (compiled_shapes), got FP32"),
    ],
)
def test_other_sizes_are_refused_by_name(
    attention: Path, load: Load, run: Run, inputs: dict[str, Tensor], text: str
) -> None:
    with pytest.raises(InvalidTensor) as caught:
        run(load(attention, _config("3,8", batch_sizes="2")), inputs)
    assert text in str(caught.value)


def test_without_sizes_an_open_dimension_is_refused(attention: Path, load: Load) -> None:
    with pytest.raises(
        InvalidModel,
        match="but dimensions other than a leading batch need sizes: set compiled_shapes or"
        " max_on_demand_shapes at export or as parameters of its configuration",
    ):
        load(attention)


def test_sizes_that_are_left_out_come_with_the_rest(attention: Path, run: Run) -> None:
    # Measured times decide whether a batch is split into pieces, which are not padded.
    parameters = {"compiled_shapes": "3,8", "split_batches": "false"}
    config = ModelConfig(max_batch_size=4, parameters=parameters)
    context = LoadContext("m", "1", config, background_compile=True)
    model = single_file.load(attention, context)

    before = [model.padded_rows(rows) for rows in (1, 2, 3)]
    model.compile_rest()
    after = [model.padded_rows(rows) for rows in (1, 2, 3)]

    assert ([1, 4, 4], [1, 2, 3]) == (before, after)
    assert 8 == len(model.info.buckets)
    model.close()


def test_resident_of_the_model_before_is_taken(attention: Path, load: Load, run: Run) -> None:
    model = load(attention, _config("3"))
    inputs = _inputs(1, 3)
    zeros = np.zeros((1, 3, 4), np.float32)

    middle = model.execute(inputs, resident=True)["output_0"]
    found = run(model, {"input_0": middle, "input_1": zeros})["output_0"]

    assert isinstance(middle, DeviceTensor)
    centred = middle.numpy() - middle.numpy().mean(axis=1, keepdims=True)
    assert np.allclose(centred, found, atol=1e-5)


# --- valid configurations ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "avals", "expected"),
    [
        (
            "8, 4",
            _avals("b, s, 4", "b, s, 4"),
            OpenDimensions(((4,), (8,)), ((0, 1, 0), (1, 1, 0))),
        ),
        ('{"s": [4]}', _avals("b, s, 4", "b, 4, 4"), OpenDimensions(((4,),), ((0, 1, 0),))),
        (
            '{"t": [1, 2], "s": [4]}',
            _avals("b, s, 4", "b, t, 4"),
            OpenDimensions(((4, 1), (4, 2)), ((0, 1, 0), (1, 1, 1))),
        ),
    ],
)
def test_sizes_are_listed_by_dimension(
    written: str, avals: list[Any], expected: OpenDimensions
) -> None:
    assert expected == shapes.read(_config(written), SPECS, avals)


def test_sizes_take_the_place_of_what_is_open() -> None:
    found = shapes.read(_config("4"), SPECS, _avals("b, s, 4", "b, s, 4"))

    assert [(-1, 7, 4), (-1, 7, 4)] == [spec.shape for spec in found.specs(SPECS, (7,))]


@pytest.mark.parametrize(
    ("written", "avals", "text"),
    [
        ("x", _avals("b, s, 4", "b, s, 4"), "expected sizes for each of s, got 'x'"),
        ("", _avals("b, s, 4", "b, s, 4"), "expected sizes for each of s, got ''"),
        ("0", _avals("b, s, 4", "b, s, 4"), "expected sizes for each of s, got '0'"),
        ("4,4", _avals("b, s, 4", "b, s, 4"), "expected sizes for each of s, got '4,4'"),
        ("4", _avals("b, s, 4", "b, t, 4"), "expected sizes for each of s, t, got '4'"),
        ("4", _avals("b, 4, 4", "b, 4, 4"), "expected dynamic dimensions besides the batch, got"),
        (
            "4",
            _avals("b, s + 1, 4", "b, s, 4"),
            "'x': cannot choose a size for 's + 1', an expression",
        ),
        (
            ",".join(map(str, range(1, 66))),
            _avals("b, s, 4", "b, s, 4"),
            "expected at most 64 combinations, got 65",
        ),
    ],
)
def test_sizes_that_cannot_be_are_refused(written: str, avals: list[Any], text: str) -> None:
    with pytest.raises(InvalidModel) as caught:
        shapes.read(_config(written), SPECS, avals)
    assert text in str(caught.value)
