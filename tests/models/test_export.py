# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import structlog
from flax import nnx
from jax.experimental import io_callback

from xlaserve.artifact import manifest
from xlaserve.authoring import lowering, read_back
from xlaserve.authoring.export import Exportable, export_model, load_exportable
from xlaserve.errors import InvalidModel, InvalidTensor
from xlaserve.model_config.config import ModelConfig
from xlaserve.row_proofs.verdict import Independence, Verdict
from xlaserve.runtime.loaded import LoadedModel
from xlaserve.runtime.programs import proving
from xlaserve.tensors import DATATYPES, TensorSpec

Load = Callable[..., LoadedModel]
Run = Callable[..., dict[str, "np.ndarray[Any, Any]"]]

X = {"x": ("FP32", [-1, 4])}
ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)


def _double(params: None, x: jax.Array) -> jax.Array:
    return x + x


def _scaled(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return x * params["scale"]


def _export(path: Path, fn: Callable[..., object] = _double, **fields: Any) -> Path:
    given: dict[str, Any] = {"params": None, "inputs": X, "outputs": ["y"], "max_batch_size": 3}
    return Exportable(fn, **(given | fields)).write(path / "m" / "1")


def _refused(path: Path, fn: Callable[..., object] = _double, **fields: Any) -> str:
    with pytest.raises(InvalidModel) as caught:
        _export(path, fn, **fields)
    assert [] == [*path.iterdir()]
    return str(caught.value)


@pytest.fixture
def _x64_off() -> Iterator[None]:
    """Restore JAX's 32-bit default, as outside of the server."""
    with jax.enable_x64(False):
        yield


# --- exported files ------------------------------------------------------------------------------


def test_version_directory_has_four_files_for_all_to_read(tmp_path: Path) -> None:
    path = _export(tmp_path)

    modes = {file.name: file.stat().st_mode & 0o777 for file in path.iterdir()}

    names = ["model.json", "model.jaxexp", "model.stablehlo", "params.safetensors"]
    assert modes == dict.fromkeys(names, 0o644)
    assert 0o755 == path.stat().st_mode & 0o777
    assert [path] == list(path.parent.iterdir())


def test_parameters_are_arguments_and_not_part_of_the_artifact(tmp_path: Path) -> None:
    """As constants, they would take five times their size when loaded."""
    params = {"scale": np.ones((1000, 4), np.float32)}

    path = _export(tmp_path, lambda params, x: x * params["scale"][0][None], params=params)

    assert 16_000 < (path / "params.safetensors").stat().st_size < 16_500
    assert (path / "model.jaxexp").stat().st_size < 5_000
    assert (path / "model.stablehlo").stat().st_size < 5_000


def test_same_model_is_the_same_bytes(tmp_path: Path) -> None:
    moment = datetime(2026, 1, 31, tzinfo=UTC)
    contents = []
    for name in ("a", "b"):
        path = tmp_path / name / "1"
        export_model(_double, None, X, path, outputs=["y"], exported_at=moment)
        contents.append({file.name: file.read_bytes() for file in path.iterdir()})

    assert contents[0] == contents[1]


def test_artifact_does_not_tell_where_its_source_lies(tmp_path: Path) -> None:
    artifact = (_export(tmp_path) / "model.jaxexp").read_bytes()

    assert b".py" not in artifact
    assert str(Path.home()).encode() not in artifact


def test_manifest_says_what_was_exported(tmp_path: Path) -> None:
    path = tmp_path / "1"
    moment = datetime(2026, 1, 31, 12, tzinfo=UTC)
    export_model(_double, None, X, path, outputs=["y"], max_batch_size=3, exported_at=moment)

    found = manifest.read(path)

    assert (TensorSpec("x", DATATYPES["FP32"], (-1, 4)),) == found.inputs
    assert (TensorSpec("y", DATATYPES["FP32"], (-1, 4)),) == found.outputs
    assert (3, ("cpu", "cuda", "tpu")) == (found.max_batch_size, found.platforms)
    assert (jax.__version__, "2026-01-31T12:00:00Z") == (found.jax_version, found.exported_at)


def test_existing_version_is_kept_unless_it_is_to_be_overwritten(tmp_path: Path) -> None:
    path = _export(tmp_path)
    before = (path / "model.json").read_bytes()

    with pytest.raises(FileExistsError, match="already exists"):
        _export(tmp_path)
    assert before == (path / "model.json").read_bytes()


def test_overwriting_replaces_the_whole_directory(tmp_path: Path) -> None:
    path = _export(tmp_path)
    (path / "labels.txt").write_text("left from before")

    export_model(_double, None, X, path, outputs=["z"], overwrite=True)

    assert 4 == len(list(path.iterdir()))
    assert "z" == manifest.read(path).outputs[0].name
    assert [path] == list(path.parent.iterdir())


@pytest.mark.parametrize("version", ["latest", "0", "01", "-1", "1.5"])
def test_version_must_be_a_positive_number(tmp_path: Path, version: str) -> None:
    with pytest.raises(InvalidModel, match="expected a path MODEL/VERSION"):
        export_model(_double, None, X, tmp_path / version, outputs=["y"])


# --- forms of functions, parameters and results --------------------------------------------------


@pytest.mark.parametrize("fn", [_double, jax.jit(_double)])
def test_function_may_be_plain_or_jitted(
    tmp_path: Path, load: Load, run: Run, fn: Callable[..., object]
) -> None:
    model = load(_export(tmp_path, fn))

    assert np.array_equal(2 * ROWS, run(model, {"x": ROWS})["y"])


def test_inputs_are_arguments_in_declared_order(tmp_path: Path, load: Load, run: Run) -> None:
    inputs = {"z": ("FP32", [-1, 4]), "a": ("FP32", [-1, 4])}
    path = _export(tmp_path, lambda params, z, a: z - a, inputs=inputs)

    found = run(load(path), {"a": ROWS, "z": 3 * ROWS})

    assert np.array_equal(2 * ROWS, found["y"])


def test_inputs_may_be_specs(tmp_path: Path, load: Load) -> None:
    specs = (TensorSpec("x", DATATYPES["FP32"], (-1, 4)),)

    assert specs == load(_export(tmp_path, inputs=specs)).info.inputs


def test_names_may_have_any_characters(tmp_path: Path, load: Load, run: Run) -> None:
    inputs = {"serving_default/x:0 \u2192": ("FP32", [-1, 4])}
    path = _export(tmp_path, inputs=inputs, outputs=["StatefulPartitionedCall:0"])

    found = run(load(path), {"serving_default/x:0 \u2192": ROWS})

    assert ["StatefulPartitionedCall:0"] == list(found)


@pytest.mark.parametrize(
    ("fn", "outputs", "expected"),
    [
        (lambda p, x: {"z": x, "a": x}, None, ["z", "a"]),
        (lambda p, x: {"z": x, "a": x}, ["a", "z"], ["a", "z"]),
        (lambda p, x: {"z": x, "a": x}, ["a"], ["a"]),
        (lambda p, x: (x, x), ["z", "a"], ["z", "a"]),
        (lambda p, x: [x, x], ["z", "a"], ["z", "a"]),
        (lambda p, x: x, ["z"], ["z"]),
    ],
)
def test_outputs_are_named_by_a_dict_or_in_order(
    tmp_path: Path, fn: Callable[..., object], outputs: Sequence[str] | None, expected: list[str]
) -> None:
    path = _export(tmp_path, fn, outputs=outputs)

    assert expected == [spec.name for spec in manifest.read(path).outputs]


def test_flax_module_with_statistics_and_random_keys(tmp_path: Path, load: Load, run: Run) -> None:
    """The state from nnx.split is the parameters: it has BatchNorm's means and Dropout's key."""

    class Net(nnx.Module):
        def __init__(self) -> None:
            rngs = nnx.Rngs(0)
            self.norm = nnx.BatchNorm(4, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.dropout(self.norm(x))

    net = Net()
    net.norm.mean[...] = jnp.arange(4, dtype=jnp.float32)
    net.eval()
    definition, state = nnx.split(net)
    path = _export(tmp_path, lambda s, x: nnx.merge(definition, s)(x), params=state)

    found = run(load(path), {"x": ROWS})["y"]

    assert "dropout/rngs/key/value" in manifest.read(path).parameters
    assert np.allclose(np.asarray(net(jnp.asarray(ROWS))), found)


@pytest.mark.usefixtures("_x64_off")
@pytest.mark.slow
def test_equinox_module_is_a_tree_of_parameters(tmp_path: Path, load: Load, run: Run) -> None:
    mlp = eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0))
    path = _export(tmp_path, lambda m, x: jax.vmap(m)(x), params=mlp)

    found = run(load(path), {"x": ROWS})["y"]

    assert np.allclose(np.asarray(jax.vmap(mlp)(jnp.asarray(ROWS))), found, atol=1e-5)


@pytest.mark.usefixtures("_x64_off")
def test_random_numbers_come_from_a_stored_key(tmp_path: Path, load: Load, run: Run) -> None:
    def noisy(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return x + jax.random.normal(params["key"], (1, 4))

    key = jax.random.key(3)
    model = load(_export(tmp_path, noisy, params={"key": key}))

    expected = ROWS + np.asarray(jax.random.normal(key, (1, 4), jnp.float32))
    assert np.allclose(expected, run(model, {"x": ROWS})["y"])


# --- datatypes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in DATATYPES if name != "BYTES"])
def test_every_datatype_is_what_it_says(tmp_path: Path, load: Load, run: Run, name: str) -> None:
    path = _export(tmp_path, lambda p, x: x, inputs={"x": (name, [-1])})
    values = np.array([0, 1, 1]).astype(DATATYPES[name].dtype)

    found = run(load(path), {"x": values})["y"]

    assert values.dtype == found.dtype
    assert np.array_equal(values, found)


@pytest.mark.parametrize(("name", "value"), [("INT64", -(2**62) - 1), ("UINT64", 2**64 - 1)])
def test_large_integers_keep_every_bit(
    tmp_path: Path, load: Load, run: Run, name: str, value: int
) -> None:
    path = _export(tmp_path, lambda p, x: x * 1, inputs={"x": (name, [-1])})
    values = np.array([value], DATATYPES[name].dtype)

    assert values == run(load(path), {"x": values})["y"]


@pytest.mark.usefixtures("_x64_off")
@pytest.mark.parametrize(
    ("params", "inputs", "x64", "expected"),
    [
        (None, "FP32", None, "FP32"),
        (None, "FP32", True, "FP64"),
        (None, "FP64", None, "FP64"),
        (np.ones(1, np.float64), "FP32", None, "FP64"),
        (np.ones(1, np.float64), "FP32", False, "FP32"),
    ],
)
def test_wide_types_exist_only_where_something_is_wide(
    tmp_path: Path, params: object, inputs: str, x64: bool | None, expected: str
) -> None:
    """A constant without a dtype is FP32 in plain JAX, and must not make a model FP64."""

    def fn(params: object, x: jax.Array) -> jax.Array:
        with jax.numpy_dtype_promotion("standard"):
            return x + jnp.zeros((1, 4))

    path = _export(tmp_path, fn, params=params, inputs={"x": (inputs, [-1, 4])}, x64=x64)

    assert expected == manifest.read(path).outputs[0].datatype.name


@pytest.mark.usefixtures("_x64_off")
def test_narrow_model_gives_the_same_when_served_beside_wide_ones(tmp_path: Path) -> None:
    """The server enables 64-bit types, and the batch size is part of the computation."""
    path = _export(tmp_path, lambda p, x: x / x.shape[1] + jnp.arange(4, dtype=x.dtype)[None])

    with jax.enable_x64(True):
        from xlaserve.model_config.config import ModelConfig
        from xlaserve.runtime import loaders
        from xlaserve.runtime.load_context import LoadContext

        model = loaders.load(path, LoadContext("m", "1", ModelConfig()))
        found = model.execute({"x": ROWS})["y"]

    assert isinstance(found, np.ndarray)
    assert np.float32 == found.dtype
    assert np.allclose(ROWS / 4 + np.arange(4), found)


def test_weakly_typed_parameter_gives_way_to_the_input(tmp_path: Path) -> None:
    weak = jax.jit(lambda: 2.0)()
    assert weak.weak_type

    path = _export(
        tmp_path,
        lambda p, x: x * p,
        params=weak,
        inputs={"x": ("BF16", [-1])},
        x64=False,
    )

    assert "BF16" == manifest.read(path).outputs[0].datatype.name


# --- refusals ------------------------------------------------------------------------------------


def _mixing(params: None, x: jax.Array) -> jax.Array:
    return x - x.mean(axis=0, keepdims=True)


def _needing_its_size(params: None, x: jax.Array) -> jax.Array:
    return x if x.shape[0] > 4 else x + x


def _calling_back(params: None, x: jax.Array) -> object:
    return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def _in_a_loop(call: Callable[[jax.Array], None]) -> Callable[[None, jax.Array], Any]:
    """Return a function that calls Python from a branch of a loop."""

    def called(x: jax.Array) -> jax.Array:
        call(x)
        return x + 1

    def function(params: None, x: jax.Array) -> Any:
        return jax.lax.fori_loop(0, 3, lambda i, x: jax.lax.cond(i > 1, called, lambda x: x, x), x)

    return function


def _failing(params: None, x: jax.Array) -> jax.Array:
    raise ZeroDivisionError("an error of the author")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"inputs": {}}, "a model has at least one input"),
        ({"inputs": {"x": ("FP31", [-1])}}, "input 'x': unknown datatype 'FP31'"),
        ({"inputs": {"x": ("BYTES", [-1])}}, "input 'x' is BYTES, which JAX arrays cannot hold"),
        ({"inputs": {"x": ("FP32", [-1, -1])}}, "only the first dimension may be -1"),
        ({"inputs": {"x": ("FP32", [-2])}}, "only the first dimension may be -1"),
        ({"inputs": {"x": ("FP32", [4])}}, "with max_batch_size 3 its first dimension is -1"),
        (
            {"inputs": {"x": ("FP32", [-1]), "y": ("FP32", [2])}, "max_batch_size": 0},
            "either all inputs start with -1 or none: give input '",
        ),
        ({"max_batch_size": 65_537}, "max_batch_size is not between 0 and 65536"),
        (
            {"outputs": None},
            "the function does not return a dict, so name its outputs: outputs=[...]",
        ),
        ({"outputs": ["a", "b"]}, "the function returns 1 outputs, got the names ['a', 'b']"),
        ({"outputs": ["y", "y"], "fn": lambda p, x: (x, x)}, "returns 2 outputs, got the names ["),
        ({"fn": lambda p, x: {"z": x}}, "the function returns no 'y', it returns ['z']"),
        ({"fn": lambda p, x: {"y": ["x"]}}, "output 'y.0' is a str, expected an array"),
        ({"fn": lambda p, x: None}, "output 'y' is a NoneType, expected an array"),
        (
            {"fn": lambda p, x: jax.lax.complex(x, x)},
            "output 'y' has dtype complex64, which the V2 protocol does not have",
        ),
        (
            {"fn": lambda p, x: x.sum()},
            "output 'y' has the shape (), and its first dimension is not",
        ),
        (
            {"fn": lambda p, x: x.T},
            "output 'y' has the shape (4, b), and its first dimension is not",
        ),
        ({"fn": lambda p, x: jnp.concatenate([x, x])}, "output 'y' has the shape (2*b, 4)"),
        (
            {"fn": lambda p, x: x @ x.T},
            "output 'y' has the shape (b, b), but dimensions other than",
        ),
        (
            {"fn": _mixing, "batch_independent": True},
            "batch_independent: rows are declared independent, but they are not: mixed: "
            "stablehlo.reduce reduces over the rows: output 'y' of a row changes",
        ),
        ({"fn": _needing_its_size}, "cannot be exported (its batch dimension has no fixed size"),
        ({"fn": _calling_back}, "cannot be exported: jax.pure_callback calls Python, which an"),
        (
            {"fn": _in_a_loop(lambda x: jax.debug.print("x {}", x))},
            "cannot be exported: jax.debug.print calls Python, which an artifact cannot contain:"
            " remove",
        ),
        (
            {"fn": _in_a_loop(lambda x: jax.debug.callback(print, x))},
            "cannot be exported: jax.debug.callback calls Python",
        ),
        (
            {"fn": _in_a_loop(lambda x: io_callback(print, None, x))},
            "cannot be exported: jax.experimental.io_callback calls Python",
        ),
        ({"fn": _failing}, "an error of the author"),
        ({"platforms": ["cuda"]}, "platforms cuda: expected cpu among them"),
        ({"platforms": ["cpu", "abacus"]}, "abacus"),
        ({"inputs": {"x": ("INT64", [-1])}, "x64": False}, "input 'x' is INT64[-1], which needs"),
    ],
)
def test_what_cannot_be_served_is_refused(
    tmp_path: Path, fields: Mapping[str, Any], expected: str
) -> None:
    assert expected in _refused(tmp_path, **fields)


@pytest.mark.parametrize("there", [False, True])
def test_failed_export_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    """The last check reads the written files; an existing model directory is kept."""
    if there:
        (tmp_path / "m").mkdir()

    def refuse(directory: Path) -> None:
        raise InvalidModel(f"{directory.name} cannot be read back")

    monkeypatch.setattr(read_back, "check", refuse)
    with pytest.raises(InvalidModel, match="1 cannot be read back"):
        _export(tmp_path)

    assert [tmp_path / "m"] * there == [*tmp_path.rglob("*")]


@pytest.mark.parametrize(
    "dtype", [jnp.int2, jnp.uint2, jnp.int4, jnp.float4_e2m1fn, jnp.float8_e8m0fnu]
)
def test_a_parameter_of_a_dtype_that_no_file_holds_is_refused(tmp_path: Path, dtype: Any) -> None:
    """It is refused before tracing, because JAX exports nothing for some dtypes."""

    def model(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        raise AssertionError("it is traced")

    text = _refused(tmp_path, model, params={"w": jnp.ones(2, dtype)})

    assert text.startswith(f"parameter 'w' has dtype {jnp.dtype(dtype)}, expected one of bool,")
    assert text.endswith("store it as one of these and convert it in the function")


def test_artifact_that_gives_something_else_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exported artifact is run on random inputs before any file is written."""
    traced = []

    def changing(params: None, x: jax.Array) -> jax.Array:
        traced.append(1)
        return x * len(traced)

    refused = _refused(tmp_path, changing)

    assert "the artifact's results differ from the function's (by up to" in refused


def test_fixed_shapes_may_mix_rows(tmp_path: Path, load: Load, run: Run) -> None:
    path = _export(tmp_path, _mixing, inputs={"x": ("FP32", [3, 4])}, max_batch_size=0)

    model = load(path)

    assert 0 == model.info.max_batch_size
    assert np.allclose(ROWS - ROWS.mean(axis=0), run(model, {"x": ROWS})["y"])


@pytest.mark.parametrize(("shape", "expected"), [([-1, 4], 64), ([3, 4], 0)])
def test_batch_size_has_a_default(tmp_path: Path, shape: list[int], expected: int) -> None:
    path = _export(tmp_path, inputs={"x": ("FP32", shape)}, max_batch_size=None)

    assert expected == manifest.read(path).max_batch_size


# --- load_exportable ---------------------------------------------------------------------------

SOURCE = """
from dataclasses import dataclass

from xlaserve.authoring.export import Exportable

import {neighbour}


@dataclass
class Config:
    size: int = 4


ready = Exportable(lambda params, x: x, None, {{"x": ("FP32", [-1, Config().size])}}, ["y"])


def made():
    return ready


def failing():
    return 3


number = 3
"""


def _source(directory: Path) -> Path:
    neighbour = f"neighbour_{directory.name}".replace("-", "_")
    (directory / f"{neighbour}.py").write_text("")
    path = directory / "a model.py"
    path.write_text(SOURCE.format(neighbour=neighbour))
    return path


@pytest.mark.parametrize("name", ["ready", "made"])
def test_exportable_is_found_in_a_file(tmp_path: Path, name: str) -> None:
    found = load_exportable(f"{_source(tmp_path)}:{name}")

    assert ["y"] == found.outputs


def test_exportable_is_found_in_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _source(tmp_path).rename(tmp_path / "some_module_of_a_test.py")
    monkeypatch.syspath_prepend(tmp_path)

    assert ["y"] == load_exportable("some_module_of_a_test:made").outputs


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("{path}", "expected FILE.py:NAME or MODULE:NAME, got"),
        ("{path}:", "expected FILE.py:NAME or MODULE:NAME, got"),
        ("{path}:a b", "expected FILE.py:NAME or MODULE:NAME, got"),
        ("{path}x.py:ready", "no such file"),
        ("{path}:absent", "has no 'absent'"),
        ("{path}:number", "is a int, expected an xlaserve.authoring.export.Exportable"),
        ("{path}:failing", "is a int, expected an xlaserve.authoring.export.Exportable"),
        ("no_such_module:ready", "no such module: 'no_such_module'"),
    ],
)
def test_reference_to_something_else_is_refused(
    tmp_path: Path, reference: str, expected: str
) -> None:
    with pytest.raises(InvalidModel) as caught:
        load_exportable(reference.format(path=_source(tmp_path)))
    assert expected in str(caught.value)


def test_manifest_is_plain_json(tmp_path: Path) -> None:
    document = json.loads((_export(tmp_path) / "model.json").read_text())

    assert ("jax_export", 4) == (document["kind"], document["format_version"])


# --- dynamic dimensions and dependent rows -------------------------------------------------------


def _centred(params: None, x: jax.Array, y: jax.Array) -> jax.Array:
    return x - x.mean(axis=1, keepdims=True) + y[:, :, None]


NAMED = {"x": ("FP32", [-1, "s", 2]), "y": ("FP32", [-1, "s"])}


def _centre(path: Path, **fields: Any) -> Path:
    return _export(path, _centred, inputs=NAMED, **fields)


def test_named_dimension_is_served_in_the_sizes_of_its_manifest(
    tmp_path: Path, load: Load, run: Run, compilations: list[str]
) -> None:
    directory = _centre(tmp_path, compiled_shapes={"s": [4, 2]})
    compilations.clear()
    model = load(directory)
    counted = len(compilations)
    x = np.random.default_rng(1).random((2, 4, 2), np.float32)
    found = run(model, {"x": x, "y": x[:, :, 0]})["y"]

    assert [(-1, -1, 2), (-1, -1)] == [spec.shape for spec in model.info.inputs]
    assert [(-1, -1, 2)] == [spec.shape for spec in model.info.outputs]
    assert (6, 6) == (counted, len(compilations))
    assert np.allclose(x - x.mean(axis=1, keepdims=True) + x[:, :, :1], found, atol=1e-6)


def test_configuration_beats_the_manifest(tmp_path: Path, load: Load) -> None:
    directory = _centre(tmp_path, compiled_shapes={"s": [4]}, max_on_demand_shapes=3)
    config = ModelConfig(parameters={"compiled_shapes": "5", "max_on_demand_shapes": "0"})
    plain, changed = load(directory), load(directory, config)

    assert {(4,)} == {bucket.sizes for bucket in plain.info.buckets}
    assert plain.on_demand is not None
    assert {(5,)} == {bucket.sizes for bucket in changed.info.buckets}
    assert changed.on_demand is None


def test_open_dimension_without_sizes_needs_a_configuration(tmp_path: Path, load: Load) -> None:
    directory = _centre(tmp_path)

    with pytest.raises(
        InvalidModel,
        match="but dimensions other than a leading batch need sizes: set compiled_shapes or"
        " max_on_demand_shapes at export or as parameters of its configuration",
    ):
        load(directory)
    assert load(directory, ModelConfig(parameters={"compiled_shapes": "5"})).info.buckets


def test_rows_that_depend_on_one_another_are_never_padded(
    tmp_path: Path, load: Load, run: Run
) -> None:
    """Every batch size gets its own program, and requests are not batched."""
    model = load(_export(tmp_path, _mixing, batch_independent=False))

    assert [1, 2, 3] == [bucket.rows for bucket in model.info.buckets]
    assert 0 == model.batch_limit
    for rows in (1, 2, 3):
        found = run(model, {"x": ROWS[:rows]})["y"]
        assert np.allclose(np.asarray(_mixing(None, jnp.asarray(ROWS[:rows]))), found)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, {}),
        ({"batch_independent": False}, {"batch_independent": False}),
        ({"batch_independent": True}, {"batch_independent": True}),
        (
            {"inputs": NAMED, "fn": _centred, "max_on_demand_shapes": 2},
            {"max_on_demand_shapes": 2},
        ),
        (
            {"inputs": NAMED, "fn": _centred, "compiled_shapes": {"s": [2]}},
            {"compiled_shapes": {"s": [2]}},
        ),
    ],
)
def test_manifest_says_what_is_particular_to_its_shapes(
    tmp_path: Path, fields: dict[str, Any], said: dict[str, Any]
) -> None:
    directory = _export(tmp_path, **fields)
    document = json.loads((directory / "model.json").read_text())
    particular = ("batch_independent", "compiled_shapes", "max_on_demand_shapes")

    assert {"independence": "proved"} == document["verdict"]
    assert said == {name: document[name] for name in particular if name in document}
    assert manifest.read(directory).inputs


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"inputs": {"x": ("FP32", ["s", 4])}}, "'x': its first dimension has a name"),
        ({"inputs": {"x": ("FP32", [-1, "b"])}}, "dimension 'b': expected a name other than 'b'"),
        ({"inputs": {"x": ("FP32", [-1, "2*s"])}}, "dimension '2*s': expected a name"),
        (
            {"compiled_shapes": {"s": [1]}},
            "expected sizes for none, since no dimension is dynamic, got s",
        ),
        (
            {"inputs": NAMED, "fn": _centred, "compiled_shapes": {"t": [1]}},
            "compiled_shapes: expected sizes for s, got t",
        ),
        (
            {"inputs": NAMED, "fn": _centred, "compiled_shapes": {"s": [0]}},
            "compiled_shapes 's': expected sizes, each once, got [0]",
        ),
        (
            {"fn": _mixing, "batch_independent": False, "max_batch_size": 65},
            "max_batch_size: expected at most 64 for rows that depend on one another, got 65",
        ),
    ],
)
def test_shapes_that_cannot_be_served_are_refused(
    tmp_path: Path, fields: dict[str, Any], text: str
) -> None:
    assert text in _refused(tmp_path, **fields)


# --- verdicts on rows ----------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [3, None])
def test_rows_that_are_mixed_are_exported_unbatched(tmp_path: Path, asked: int | None) -> None:
    """A notice names the operation and the author's source line."""
    notices: list[str] = []
    exportable = Exportable(_mixing, None, X, outputs=["y"], max_batch_size=asked)
    described = manifest.read(exportable.write(tmp_path / "m" / "1", on_notice=notices.append))

    assert described.verdict is not None
    assert ("mixed", "stablehlo.reduce", 0, None) == (
        described.verdict.independence,
        described.verdict.operation,
        described.max_batch_size,
        described.batch_independent,
    )
    line = inspect.getsourcelines(_mixing)[1] + 1
    (notice,) = notices
    assert notice.startswith(
        "rows are mixed: stablehlo.reduce reduces over the rows: output 'y' of a row changes by up "
    )
    assert ": the row [" in notice
    assert notice.endswith(
        f"there (test_export.py:{line}), in output 'y'; requests will not be batched;"
        f" max_batch_size is 0 instead of {asked or 64}; reduce over another axis than the first:"
        " x.max(axis=-1) instead of x.max()"
    )


def test_unbatched_export_is_logged_where_nobody_listens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with structlog.testing.capture_logs() as logged:
        _export(tmp_path, _mixing)

    assert ["exported, with a restriction"] == [entry["event"] for entry in logged]


def test_paths_of_the_author_are_not_in_the_artifact(tmp_path: Path) -> None:
    """The second export, which is analysed for the message, does contain them."""
    directory = _export(tmp_path, _mixing)

    for name in ("model.stablehlo", "model.jaxexp"):
        assert b"test_export" not in (directory / name).read_bytes()


def test_author_may_ask_for_no_batch(tmp_path: Path, load: Load) -> None:
    notices: list[str] = []
    exportable = Exportable(_double, None, X, outputs=["y"], max_batch_size=0)
    directory = exportable.write(tmp_path / "m" / "1", on_notice=notices.append)
    model = load(directory)

    assert ([], 0, 0) == (notices, model.info.max_batch_size, model.batch_limit)
    assert model.on_demand is not None
    assert model.info.verdict == Verdict(Independence.PROVED)


@pytest.fixture
def _nothing_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the analysis by one that cannot prove anything."""
    unknown = Verdict(Independence.UNKNOWN, operation="stablehlo.add", reason="has no rule")
    monkeypatch.setattr(lowering, "prove_each", lambda *_, **__: {"cpu": unknown})
    monkeypatch.setattr(proving, "prove", lambda *_, **__: unknown)


@pytest.mark.usefixtures("_nothing_proved")
def test_rows_of_which_nothing_is_proved_are_batched_where_that_is_declared(
    tmp_path: Path, load: Load
) -> None:
    """The author or the configuration declares it; a trial without a difference is not enough."""
    silent = _export(tmp_path / "silent")
    declared = _export(tmp_path / "declared", batch_independent=True)
    config = ModelConfig(max_batch_size=4, parameters={"batch_independent": "true"})
    models = [load(silent), load(declared), load(silent, config)]

    assert [0, 3, 4] == [model.info.max_batch_size for model in models]
    assert [True, False, False] == [model.on_demand is not None for model in models]
    assert [True, False, False] == [bool(model.info.notice) for model in models]


@pytest.mark.usefixtures("_nothing_proved")
def test_a_trial_refutes_what_is_declared(tmp_path: Path, load: Load) -> None:
    """At export and at load, because someone else may have declared it in the configuration."""
    text = _refused(tmp_path, _mixing, batch_independent=True)
    directory = _export(tmp_path, _mixing)
    verdict = manifest.read(directory).verdict
    config = ModelConfig(max_batch_size=4, parameters={"batch_independent": "true"})

    assert (
        "rows are declared independent, but they are not: mixed: stablehlo.add has no rule: output "
        "'y' of a row changes"
    ) in text
    assert verdict is not None
    assert ("mixed", "stablehlo.add") == (verdict.independence, verdict.operation)
    with pytest.raises(InvalidModel, match="not: output 'y' of a row changes by up to"):
        load(directory, config)


@pytest.mark.usefixtures("_nothing_proved")
def test_a_trial_has_the_other_dimensions_at_a_listed_size(tmp_path: Path, load: Load) -> None:
    directory = _centre(tmp_path, batch_independent=True, compiled_shapes={"s": [5, 4]})

    assert 3 == load(directory).info.max_batch_size


def test_numbers_of_rows_and_other_open_dimensions(tmp_path: Path, load: Load) -> None:
    """Any number of rows is compiled on demand, but only the listed sizes of other dimensions."""

    def mixing(params: None, x: jax.Array, y: jax.Array) -> jax.Array:
        return _centred(params, x - x.mean(axis=0, keepdims=True), y)

    directory = _export(tmp_path, mixing, inputs=NAMED, compiled_shapes={"s": [4, 5]})
    model = load(directory)
    shapes = [
        {"x": np.ones((rows, size, 2), np.float32), "y": np.ones((rows, size), np.float32)}
        for rows, size in ((1, 5), (7, 4), (7, 6))
    ]

    assert [(1, (4,)), (1, (5,))] == [(b.rows, b.sizes) for b in model.info.buckets]
    assert model.on_demand is not None
    assert model.on_demand.shape_of(shapes[0]) is None
    assert model.on_demand.shape_of(shapes[1]) is not None
    with pytest.raises(InvalidTensor, match="dimension 1 of size 4, 5"):
        model.on_demand.shape_of(shapes[2])


# --- platforms ---------------------------------------------------------------------------------


def _schur(params: None, x: jax.Array) -> jax.Array:
    return jax.lax.linalg.schur(x)[0]


def test_platforms_without_a_kernel_are_left_out_and_named(tmp_path: Path) -> None:
    """They are an error if the author requested them explicitly."""
    notices: list[str] = []
    made = Exportable(_schur, None, {"x": ("FP32", [2, 4, 4])}, outputs=["y"])
    path = made.write(tmp_path / "m" / "1", on_notice=notices.append)

    assert ("cpu",) == manifest.read(path).platforms
    assert [
        f"it will not run on {platform}, which has no kernel for 'schur'"
        for platform in ("cuda", "tpu")
    ] == sorted(notices)
    with pytest.raises(InvalidModel, match="not found for platform"):
        replace(made, platforms=("cpu", "tpu")).write(tmp_path / "asked" / "1")
