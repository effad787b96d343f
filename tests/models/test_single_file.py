# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.export import Exported

from xlaserve.artifact import artifact, sizes
from xlaserve.artifact.plain_artifact import Names
from xlaserve.artifact.signature import Signature
from xlaserve.authoring.export import export_model
from xlaserve.errors import InvalidModel, InvalidTensor, LoadCancelled
from xlaserve.model_config.config import ConfigTensor, ModelConfig
from xlaserve.runtime import loaders
from xlaserve.runtime.exported import single_file
from xlaserve.runtime.exported.single_file import signature_of
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.loaded import LoadedModel, Stage
from xlaserve.runtime.programs import programs
from xlaserve.tensors import DATATYPES, Tensor, TensorSpec

Load = Callable[..., LoadedModel]
Run = Callable[..., dict[str, Tensor]]

FP32 = DATATYPES["FP32"]
W = np.arange(4 * 300, dtype=np.float32).reshape(4, 300) / 1000
SMALL = ModelConfig(max_batch_size=3)
WITHOUT_SIZES = (
    "but dimensions other than a leading batch need sizes: set compiled_shapes or "
    "max_on_demand_shapes at export or as parameters of its configuration"
)


def _arrays(*shapes: str, dtype: Any = np.float32) -> list[jax.ShapeDtypeStruct]:
    """Return arrays of shapes such as `b, 4`; equal symbols are shared between them."""
    scope = jax.export.SymbolicScope()
    return [
        jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape, scope=scope), dtype)
        for shape in shapes
    ]


def _export(
    fn: Callable[..., object],
    *arguments: object,
    platforms: Sequence[str] = ("cpu", "cuda"),
    **options: Any,
) -> Exported:
    return jax.export.export(jax.jit(fn), platforms=platforms, **options)(*arguments)


def _write(directory: Path, exported: Exported) -> Path:
    path = directory / "affine.jaxexp"
    path.write_bytes(exported.serialize())
    return path


def _affine(x: jax.Array) -> jax.Array:
    return x @ W


@pytest.fixture
def affine(tmp_path: Path) -> Path:
    """Return a file with `input_0` FP32[-1,4] -> `output_0` FP32[-1,300]."""
    return _write(tmp_path, _export(_affine, *_arrays("b, 4")))


# --- signature -----------------------------------------------------------------------------------


def _signature(exported: Exported) -> Signature:
    return signature_of(exported, "m.jaxexp")


def test_arrays_are_numbered() -> None:
    exported = _export(lambda x, y: (y, x), *_arrays("b, 4", "b"))

    found = _signature(exported)

    assert (
        TensorSpec("input_0", FP32, (-1, 4)),
        TensorSpec("input_1", FP32, (-1,)),
    ) == found.inputs
    assert (
        TensorSpec("output_0", FP32, (-1,)),
        TensorSpec("output_1", FP32, (-1, 4)),
    ) == found.outputs


def test_dicts_have_names() -> None:
    """The order is JAX's, which sorts keys."""
    x, n = _arrays("b, 4", "b")
    exported = _export(lambda d: {"sum": d["x"].sum(1) + d["n"]}, {"x": x, "n": n})

    found = _signature(exported)

    assert (TensorSpec("n", FP32, (-1,)), TensorSpec("x", FP32, (-1, 4))) == found.inputs
    assert (TensorSpec("sum", FP32, (-1,)),) == found.outputs


@pytest.mark.parametrize(
    ("shape", "expected"), [("b, 4", 64), ("rows, 4", 64), ("3, 4", 0), ("", 0)]
)
def test_symbolic_first_dimension_is_a_batch(shape: str, expected: int) -> None:
    assert expected == _signature(_export(lambda x: [x], *_arrays(shape))).max_batch_size


@pytest.mark.parametrize(
    ("fn", "shapes", "expected"),
    [
        (
            lambda x, y: x,
            ["b, 4", "3, 4"],
            "input 'input_1' has the shape (3, 4), and its first dimension is not the batch",
        ),
        (
            lambda x, y: y,
            ["3, 4", "b, 4"],
            "input 'input_0' has the shape (3, 4), and its first dimension is not the batch",
        ),
        (
            lambda x, y: x,
            ["a, 4", "b, 4"],
            "input 'input_1' has the shape (b, 4), and its first dimension is not the batch",
        ),
        (
            lambda x: x,
            ["2*b, 4"],
            "input 'input_0' has the shape (2*b, 4), and its first dimension is not the batch",
        ),
        (
            lambda x: x,
            ["b, n"],
            "input 'input_0' has the shape (b, n), " + WITHOUT_SIZES,
        ),
        (
            lambda x: x,
            ["3, n"],
            "input 'input_0' has the shape (3, n), " + WITHOUT_SIZES,
        ),
        (
            lambda x: x.sum(),
            ["b, 4"],
            "output 'output_0' has the shape (), and its first dimension is not the batch",
        ),
        (
            lambda x: jnp.concatenate([x, x]),
            ["b, 4"],
            "output 'output_0' has the shape (2*b, 4), and its first dimension is not the batch",
        ),
    ],
)
def test_other_open_dimensions_are_refused_by_tensor(
    fn: Callable[..., object], shapes: list[str], expected: str
) -> None:
    with pytest.raises(InvalidModel) as caught:
        _signature(_export(fn, *_arrays(*shapes)))
    assert expected == str(caught.value)


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (
            lambda x: x.astype(jnp.float8_e4m3fn),
            "output 'output_0' has dtype float8_e4m3fn, which the V2 protocol does not have: make "
            "it FP16 or FP32, and cast in the function",
        ),
        (
            lambda x: {"key": jax.random.key(0)},
            "output 'key' has dtype key<fry>, which the V2 protocol does not have",
        ),
    ],
)
def test_dtype_without_a_name_is_refused_by_tensor(
    fn: Callable[..., object], expected: str
) -> None:
    with pytest.raises(InvalidModel) as caught:
        _signature(_export(fn, *_arrays("4")))
    assert expected == str(caught.value)


@pytest.mark.parametrize(
    ("fn", "arguments", "keywords", "inputs", "outputs"),
    [
        (lambda x: {"y": [x, x]}, 1, {}, "input_0", "y.0 y.1"),
        (lambda x: (x, None), 1, {}, "input_0", "output_0"),
        (lambda x: ({"a": x}, [x]), 1, {}, "input_0", "output_0.a output_1.0"),
        (lambda x, y: x + y, 1, {"y": "x"}, "input_0 y", "output_0"),
        (lambda *, y: y["a"][1], 0, {"y": {"a": "xx"}}, "y.a.0 y.a.1", "output_0"),
        (lambda t: t["b"]["1"], [{"b": {"1": "x"}, "a": "x"}], {}, "a b.1", "output_0"),
        (lambda t, x: t["a"] + x, [{"a": "x"}, "x"], {}, "input_0.a input_1", "output_0"),
    ],
)
def test_nested_arrays_have_the_names_of_their_paths(
    fn: Callable[..., object], arguments: Any, keywords: Any, inputs: str, outputs: str
) -> None:
    """Keys, positions and keywords, in JAX's order."""
    (x,) = _arrays("3")
    tree = ["x"] * arguments if isinstance(arguments, int) else arguments
    args, kwargs = _planted((tree, keywords), x)
    found = _signature(jax.export.export(jax.jit(fn))(*args, **kwargs))

    assert inputs.split() == [spec.name for spec in found.inputs]
    assert outputs.split() == [spec.name for spec in found.outputs]


def _planted(tree: Any, leaf: object) -> Any:
    if isinstance(tree, dict):
        return {key: _planted(branch, leaf) for key, branch in tree.items()}
    if tree == "x":
        return leaf
    return [_planted(branch, leaf) for branch in tree]


@pytest.mark.parametrize(
    ("fn", "tree", "expected"),
    [
        (lambda x: (), "x", "expected at least one output, got a tree without arrays"),
        (
            lambda d: d["a"],
            {"a": {"b": "x"}, "c.d": "x"},
            "input 'c.d': expected a non-empty key without '.', which joins nested keys; rename it",
        ),
        (
            lambda x: {"a": {"": x}},
            "x",
            "output '': expected a non-empty key without '.', which joins nested keys; rename it",
        ),
    ],
)
def test_trees_that_give_no_names_are_refused(
    fn: Callable[..., object], tree: Any, expected: str
) -> None:
    (x,) = _arrays("3")
    exported = _export(fn, _planted(tree, x))
    with pytest.raises(InvalidModel) as caught:
        _signature(exported)
    assert f"m.jaxexp: {expected}" == str(caught.value)


def test_function_without_arrays_is_refused() -> None:
    with pytest.raises(InvalidModel, match="expected at least one input, got a tree without"):
        _signature(_export(lambda: jnp.zeros(3)))


def test_names_that_collide_are_refused() -> None:
    """A keyword argument may have the name of a positional one."""
    (x,) = _arrays("3")
    exported = jax.export.export(jax.jit(lambda x, **more: x))(x, **{"input_0": x})
    with pytest.raises(InvalidModel, match="two inputs have the name 'input_0'; rename a key"):
        _signature(exported)


@pytest.mark.parametrize("name", ["", "x" * 1025])
def test_names_are_bounded(name: str) -> None:
    (x,) = _arrays("3")

    with pytest.raises(InvalidModel, match=f"a name of 1 to 1024 characters, got {len(name)}"):
        _signature(_export(lambda named: named[name], {name: x}))


def test_names_beside_it_are_those_of_its_arrays() -> None:
    exported = _export(lambda d: (d["a"], d["b"]), dict(zip("ab", _arrays("3", "b"), strict=True)))
    found = signature_of(
        _export(lambda x: (x, x), *_arrays("b, 4")), "m", Names(["image"], ["p", "q"])
    )
    assert (["image"], ["p", "q"]) == (
        [spec.name for spec in found.inputs],
        [spec.name for spec in found.outputs],
    )
    for names, expected in (
        (Names(["one"]), "m: expected the names of 2 inputs, a, b in this order, got one"),
        (Names(["one", "one"]), "m: two inputs have the name 'one'; rename a key of their tree"),
    ):
        with pytest.raises(InvalidModel) as caught:
            signature_of(exported, "m", names)
        assert expected == str(caught.value)


# --- version directories -------------------------------------------------------------------------


def _version(directory: Path, name: str = "affine.jaxexp") -> Path:
    directory.mkdir(parents=True)
    (directory / name).write_bytes(_export(_affine, *_arrays("b, 4")).serialize())
    return directory


def test_plain_file_in_a_version_directory_is_a_model(tmp_path: Path, load: Load, run: Run) -> None:
    directory = _version(tmp_path / "m" / "1")
    (directory / "names.json").write_text('{"inputs": ["x"], "outputs": ["y"]}')
    model = load(directory, SMALL)
    x = np.ones((2, 4), np.float32)

    assert np.allclose(x @ W, run(model, {"x": x})["y"], atol=1e-5)
    assert loaders.predict_size(directory) == loaders.predict_size(directory / "affine.jaxexp")


def test_model_jaxexp_is_the_one_of_several(tmp_path: Path, load: Load) -> None:
    directory = _version(tmp_path / "m" / "1", "model.jaxexp")
    (directory / "older.jaxexp").write_bytes(b"not read")

    assert 3 == load(directory, SMALL).info.max_batch_size


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["other.jaxexp"], "model.json is missing"),
        (["params.safetensors"], "model.json is missing"),
        (["model.stablehlo"], "model.json is missing"),
    ],
)
def test_version_directory_that_is_no_one_plain_file_is_refused(
    tmp_path: Path, load: Load, files: list[str], expected: str
) -> None:
    """Without its manifest, the version's parameters are in another file."""
    directory = _version(tmp_path / "m" / "1")
    for file in files:
        (directory / file).write_bytes(b"")

    with pytest.raises(InvalidModel, match=expected):
        load(directory, SMALL)


def test_file_name_of_the_configuration_is_obeyed(tmp_path: Path, load: Load) -> None:
    directory = _version(tmp_path / "m" / "1")

    load(directory, ModelConfig(max_batch_size=1, default_model_filename="affine.jaxexp"))
    with pytest.raises(InvalidModel, match=r"other\.jaxexp is missing"):
        load(directory, ModelConfig(default_model_filename="other.jaxexp"))


@pytest.mark.parametrize("text", ["[]", "{", '{"inputs": [1]}', '{"input": ["x"]}'])
def test_names_that_are_not_valid_are_refused(tmp_path: Path, load: Load, text: str) -> None:
    directory = _version(tmp_path / "m" / "1")
    (directory / "names.json").write_text(text)

    with pytest.raises(InvalidModel, match=r"^names\.json is not valid: "):
        load(directory, SMALL)


# --- loading -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_every_number_of_rows_gives_what_numpy_gives(
    affine: Path, load: Load, run: Run, rows: int
) -> None:
    model = load(affine, SMALL)
    x = np.random.default_rng(rows).standard_normal((rows, 4)).astype(np.float32)

    found = run(model, {"input_0": x})["output_0"]

    assert ("jax_export", 3) == (model.info.platform, model.info.max_batch_size)
    assert np.allclose(x @ W, found, atol=1e-5)


def test_rows_beyond_the_batch_size_are_refused(affine: Path, load: Load, run: Run) -> None:
    with pytest.raises(InvalidTensor, match="'input_0': expected a batch of 3 rows, got 4 rows"):
        run(load(affine, SMALL), {"input_0": np.zeros((4, 4), np.float32)})


def test_batch_is_of_64_rows_where_nothing_else_is_said(tmp_path: Path) -> None:
    stages: list[Stage] = []
    path = _write(tmp_path, _export(lambda x: x + x, *_arrays("b")))
    model = loaders.load(path, LoadContext("m", "1", ModelConfig(), on_stage=stages.append))
    model.close()

    assert 64 == model.info.max_batch_size
    assert Stage("warming", 12, 12) == stages[-1]


def test_dict_of_arrays_is_filled_by_name(tmp_path: Path, load: Load, run: Run) -> None:
    x, n = _arrays("b, 2", "b, 2")
    exported = _export(lambda d: {"minus": d["x"] - d["n"], "x": d["x"]}, {"x": x, "n": n})
    model = load(_write(tmp_path, exported), SMALL)

    found = run(model, {"x": np.full((2, 2), 5, np.float32), "n": np.ones((2, 2), np.float32)})

    assert [[4, 4], [4, 4]] == found["minus"].tolist()
    assert [[5, 5], [5, 5]] == found["x"].tolist()


@pytest.mark.parametrize(
    ("datatype", "dtype"), [("INT64", np.int64), ("BF16", ml_dtypes.bfloat16), ("BOOL", np.bool_)]
)
def test_fixed_shapes_of_any_datatype(
    tmp_path: Path, load: Load, run: Run, datatype: str, dtype: Any
) -> None:
    (x,) = _arrays("2, 3", dtype=dtype)
    model = load(_write(tmp_path, _export(lambda x: (x, x[0, 0]), x)))
    value = np.eye(2, 3).astype(dtype)

    found = run(model, {"input_0": value})

    assert (TensorSpec("input_0", DATATYPES[datatype], (2, 3)),) == model.info.inputs
    assert 0 == model.info.max_batch_size
    assert np.array_equal(value, found["output_0"])
    assert ((), dtype) == (found["output_1"].shape, found["output_1"].dtype)


@pytest.mark.parametrize("field", ["backend", "platform"])
def test_configuration_may_name_the_kind(affine: Path, load: Load, field: str) -> None:
    config = ModelConfig(max_batch_size=1, **{field: "jax_export"})  # type: ignore[arg-type]

    assert "jax_export" == load(affine, config).info.platform


def test_configuration_that_says_the_same_is_accepted(affine: Path, load: Load) -> None:
    """In the form of a mesh's schema: whole shapes, and no batch size."""
    config = ModelConfig(
        inputs=(ConfigTensor("input_0", FP32, (-1, 4)),),
        outputs=(ConfigTensor("output_0", FP32, (-1, 300)),),
        max_batch_size=0,
    )

    assert 64 == load(affine, config).info.max_batch_size


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (
            ConfigTensor("image", FP32, (4,)),
            "input 'image' is not in the artifact, which has 'input_0'",
        ),
        (
            ConfigTensor("input_0", FP32, (5,)),
            "input 'input_0': expected FP32[-1,4] as in the artifact, "
            "got FP32[-1,5] from the configuration",
        ),
    ],
)
def test_configuration_that_disagrees_is_refused(
    affine: Path, load: Load, tensor: ConfigTensor, expected: str
) -> None:
    with pytest.raises(InvalidModel) as caught:
        load(affine, ModelConfig(max_batch_size=3, inputs=(tensor,)))
    assert expected == str(caught.value)


def test_batch_size_for_fixed_shapes_is_refused(tmp_path: Path, load: Load) -> None:
    path = _write(tmp_path, _export(lambda x: x, *_arrays("3, 4")))

    with pytest.raises(InvalidModel, match="max_batch_size 3, but the artifact has fixed shapes"):
        load(path, SMALL)


# --- invalid files -------------------------------------------------------------------------------


def test_cut_file_is_refused(affine: Path) -> None:
    """Cuts up to the function's name, which is last in the file and not needed."""
    content = affine.read_bytes()
    end = len(content) - len("_affine") - 8
    for size in {*range(0, end, 97), end}:
        with pytest.raises(
            InvalidModel, match=r"^affine\.jaxexp cannot be read by the installed jax "
        ):
            artifact.deserialize(bytearray(content[:size]), name=affine.name)


@pytest.mark.parametrize("content", [b"", b"garbage", b"\0" * 100, bytes(range(256)) * 8])
def test_file_that_is_no_artifact_is_refused(tmp_path: Path, load: Load, content: bytes) -> None:
    path = tmp_path / "m.jaxexp"
    path.write_bytes(content)

    with pytest.raises(
        InvalidModel, match=r"^m\.jaxexp cannot be read by the installed jax .* export it again"
    ):
        load(path)


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        *(("jaxexp", ""), ("model.json", "")),
        *(("model.onnx", "jax_export"), ("jaxexp", "jax_export"), ("model.json", "jax_export")),
    ],
)
def test_file_with_another_suffix_is_no_model(
    tmp_path: Path, load: Load, name: str, asked: str
) -> None:
    (tmp_path / name).write_bytes(b"")
    expected = (
        f"'{name}' is not a model: a single-file model is a jax.export artifact, *.jaxexp, "
        "an ONNX model, *.onnx, or a torch.export program, *.pt2"
    )

    for ask in (load, loaders.predict_size):
        with pytest.raises(InvalidModel) as caught:
            ask(tmp_path / name, ModelConfig(backend=asked))
        assert expected == str(caught.value)


def test_artifact_of_a_version_directory_is_no_model_alone(tmp_path: Path, load: Load) -> None:
    inputs = {"x": ("FP32", [-1, 4])}
    directory = export_model(lambda p, x: x @ p, W, inputs, tmp_path / "1", outputs=["y"])

    with pytest.raises(InvalidModel, match="its parameters in other files: copy the whole"):
        load(directory / "model.jaxexp")


def test_artifact_for_another_device_is_refused(tmp_path: Path, load: Load) -> None:
    exported = _export(_affine, *_arrays("b, 4"), platforms=("cuda",))

    with pytest.raises(InvalidModel, match="was exported for cuda, this server runs on cpu"):
        load(_write(tmp_path, exported))


def test_artifact_that_calls_foreign_code_is_refused(tmp_path: Path, load: Load) -> None:
    check = jax.export.DisabledSafetyCheck.custom_call("evil")
    (x,) = _arrays("3")
    exported = _export(lambda x: jax.ffi.ffi_call("evil", x)(x), x, disabled_checks=[check])

    with pytest.raises(
        InvalidModel, match=r"^affine\.jaxexp calls 'evil', which models may not call"
    ):
        load(_write(tmp_path, exported))


def test_artifact_is_bounded(affine: Path, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (single_file, sizes):
        monkeypatch.setattr(module, "LIMIT_ARTIFACT_BYTES", 100)

    for ask in (load, loaders.predict_size):
        with pytest.raises(InvalidModel, match=r"^affine\.jaxexp has .* more than the 100 allowed"):
            ask(affine)


# --- memory ------------------------------------------------------------------------------------


def test_predicted_size_has_room_for_the_compiler(affine: Path) -> None:
    expected = 12 * sizes.EXECUTABLE_BYTES + 8 * affine.stat().st_size

    assert {"cpu:0": expected} == loaders.predict_size(affine)


def test_constants_are_measured_once(affine: Path, load: Load) -> None:
    """FP32 [4,300]; XLA keeps one copy for three executables."""
    memory = load(affine, SMALL).info.memory

    assert 4800 < memory.executables_bytes - 3 * sizes.EXECUTABLE_BYTES < 3 * 4800
    assert 0 == memory.parameters_bytes


def test_constants_are_not_written_as_text(affine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megabytes of text, just to look for function names, would block all threads."""
    texts: list[str] = []
    monkeypatch.setattr(artifact, "check_custom_calls", lambda text, name: texts.append(text))

    artifact.deserialize(bytearray(affine.read_bytes()))

    assert "stablehlo.dot" in texts[0]
    assert len(texts[0]) < W.nbytes


@pytest.fixture
def artifacts(monkeypatch: pytest.MonkeyPatch) -> list[Exported]:
    """Record the artifacts that are read."""
    found: list[Exported] = []
    deserialize = artifact.deserialize

    def collecting(data: bytearray, jax_version: str = "", *, name: str = "") -> Exported:
        found.append(deserialize(data, jax_version, name=name))
        return found[-1]

    monkeypatch.setattr(artifact, "deserialize", collecting)
    return found


def test_constants_do_not_stay_in_the_caches_of_jax(
    affine: Path, load: Load, artifacts: list[Exported]
) -> None:
    """JAX's caches keep every compiled artifact, while a mesh loads and unloads indefinitely."""
    load(affine, SMALL)

    assert [b""] == [exported.mlir_module_serialized for exported in artifacts]


def test_constants_of_a_load_that_ends_early_do_not_stay(
    affine: Path, artifacts: list[Exported]
) -> None:
    stages: list[str] = []

    def check_cancelled() -> None:
        if "compiling 1 of 3" in stages:
            raise LoadCancelled("m")

    context = LoadContext(
        "m",
        "1",
        SMALL,
        on_stage=lambda stage: stages.append(str(stage)),
        check_cancelled=check_cancelled,
    )

    with pytest.raises(LoadCancelled):
        single_file.load(affine, context)
    assert [b""] == [exported.mlir_module_serialized for exported in artifacts]


def test_error_of_the_compiler_names_the_file(
    affine: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*args: object) -> object:
        raise RuntimeError("INTERNAL: no such luck\nmore")

    monkeypatch.setattr(programs, "warmed", failing)

    with pytest.raises(InvalidModel) as caught:
        load(affine, SMALL)
    assert "affine.jaxexp cannot be compiled or run: INTERNAL: no such luck" == str(caught.value)
