# Much of jax is typed, but not all that is called here.
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

from xlaserve.errors import InvalidModel, InvalidTensor, LoadCancelled
from xlaserve.models import artifact, loaders, programs, single_file, sizes
from xlaserve.models.config import ConfigTensor, ModelConfig
from xlaserve.models.export import export_model
from xlaserve.models.loaded import LoadContext, LoadedModel, Stage
from xlaserve.models.signature import Signature
from xlaserve.models.single_file import signature_of
from xlaserve.tensors import DATATYPES, Tensor, TensorSpec

Load = Callable[..., LoadedModel]
Run = Callable[..., dict[str, Tensor]]

FP32 = DATATYPES["FP32"]
W = np.arange(4 * 300, dtype=np.float32).reshape(4, 300) / 1000
SMALL = ModelConfig(max_batch_size=3)


def _arrays(*shapes: str, dtype: Any = np.float32) -> list[jax.ShapeDtypeStruct]:
    """Return arrays of shapes such as `b, 4`, whose symbols are the same in all of them."""
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


# --- what it takes and gives -------------------------------------------------------------------


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
    """In the order of JAX, which sorts them."""
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
            "input 'input_1' has the shape (3, 4), its first dimension is not the batch",
        ),
        (
            lambda x, y: y,
            ["3, 4", "b, 4"],
            "input 'input_0' has the shape (3, 4), its first dimension is not the batch",
        ),
        (
            lambda x, y: x,
            ["a, 4", "b, 4"],
            "input 'input_1' has the shape (b, 4), its first dimension is not the batch",
        ),
        (
            lambda x: x,
            ["2*b, 4"],
            "input 'input_0' has the shape (2*b, 4), its first dimension is not the batch",
        ),
        (
            lambda x: x,
            ["b, n"],
            "input 'input_0' has the shape (b, n), but only the batch, as the first dimension, "
            "may be open",
        ),
        (
            lambda x: x,
            ["3, n"],
            "input 'input_0' has the shape (3, n), but only the batch, as the first dimension, "
            "may be open",
        ),
        (
            lambda x: x.sum(),
            ["b, 4"],
            "output 'output_0' has the shape (), its first dimension is not the batch",
        ),
        (
            lambda x: jnp.concatenate([x, x]),
            ["b, 4"],
            "output 'output_0' has the shape (2*b, 4), its first dimension is not the batch",
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
            "output 'output_0' has dtype float8_e4m3fn, which V2 has no name for",
        ),
        (
            lambda x: {"key": jax.random.key(0)},
            "output 'key' has dtype key<fry>, which V2 has no name for",
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
    ("fn", "shape", "kind"),
    [
        (lambda parameters, inputs: inputs, lambda x: ([x], [x]), "input"),
        (lambda named, x: x, lambda x: ({"x": x}, x), "input"),
        (lambda named: named["x"]["y"], lambda x: ({"x": {"y": x}},), "input"),
        (lambda: jnp.zeros(3), lambda x: (), "input"),
        (lambda x: {"y": [x]}, lambda x: (x,), "output"),
        (lambda x: (x, None), lambda x: (x,), "output"),
        (lambda x: (), lambda x: (x,), "output"),
    ],
)
def test_other_trees_are_refused(
    fn: Callable[..., object], shape: Callable[[object], tuple[object, ...]], kind: str
) -> None:
    with pytest.raises(InvalidModel) as caught:
        _signature(_export(fn, *shape(*_arrays("3"))))
    assert f"m.jaxexp: expected arrays, or one dict of arrays, as its {kind}s" == str(caught.value)


def test_keyword_arguments_are_refused() -> None:
    (x,) = _arrays("3")
    exported = jax.export.export(jax.jit(lambda x, y: x + y))(x, y=x)

    with pytest.raises(InvalidModel, match="expected arrays, or one dict of arrays, as its inputs"):
        _signature(exported)


@pytest.mark.parametrize("name", ["", "x" * 1025])
def test_names_are_bounded(name: str) -> None:
    (x,) = _arrays("3")

    with pytest.raises(InvalidModel, match=f"one input has a name of {len(name)} characters"):
        _signature(_export(lambda named: named[name], {name: x}))


# --- loaded ------------------------------------------------------------------------------------


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
    """As the schema of a mesh has it: whole shapes, and no batch size."""
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
            "input 'input_0': expected FP32[-1,4] as the artifact has it, "
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


# --- other files -------------------------------------------------------------------------------


def test_cut_file_is_refused(affine: Path) -> None:
    """Up to the name of the function, which is the last that is in it and which nothing needs."""
    content = affine.read_bytes()
    end = len(content) - len("_affine") - 8
    for size in {*range(0, end, 97), end}:
        with pytest.raises(InvalidModel, match=r"^affine\.jaxexp cannot be read by the jax "):
            artifact.deserialize(bytearray(content[:size]), name=affine.name)


@pytest.mark.parametrize("content", [b"", b"garbage", b"\0" * 100, bytes(range(256)) * 8])
def test_file_that_is_no_artifact_is_refused(tmp_path: Path, load: Load, content: bytes) -> None:
    path = tmp_path / "m.jaxexp"
    path.write_bytes(content)

    with pytest.raises(InvalidModel, match=r"^m\.jaxexp cannot be read by the jax .* Export it"):
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
        f"'{name}' is no model: one that is a single file is an artifact of jax.export, *.jaxexp, "
        "or an ONNX model, *.onnx"
    )

    for ask in (load, loaders.predict_size):
        with pytest.raises(InvalidModel) as caught:
            ask(tmp_path / name, ModelConfig(backend=asked))
        assert expected == str(caught.value)


def test_artifact_of_a_version_directory_is_no_model_alone(tmp_path: Path, load: Load) -> None:
    inputs = {"x": ("FP32", [-1, 4])}
    directory = export_model(lambda p, x: x @ p, W, inputs, tmp_path / "1", outputs=["y"])

    with pytest.raises(InvalidModel, match=r"^model\.jaxexp: expected arrays, or one dict"):
        load(directory / "model.jaxexp")


def test_artifact_for_another_device_is_refused(tmp_path: Path, load: Load) -> None:
    exported = _export(_affine, *_arrays("b, 4"), platforms=("cuda",))

    with pytest.raises(InvalidModel, match="was exported for cuda, this server runs on cpu"):
        load(_write(tmp_path, exported))


def test_artifact_that_calls_foreign_code_is_refused(tmp_path: Path, load: Load) -> None:
    check = jax.export.DisabledSafetyCheck.custom_call("evil")
    (x,) = _arrays("3")
    exported = _export(lambda x: jax.ffi.ffi_call("evil", x)(x), x, disabled_checks=[check])

    with pytest.raises(InvalidModel, match=r"^affine\.jaxexp calls 'evil', which is not among"):
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
    """FP32 [4,300]; XLA keeps one copy for the three executables."""
    memory = load(affine, SMALL).info.memory

    assert 4800 < memory.executables_bytes - 3 * sizes.EXECUTABLE_BYTES < 3 * 4800
    assert 0 == memory.parameters_bytes


def test_constants_are_not_written_as_text(affine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megabytes of it would hold up all threads, to look for the names of functions."""
    texts: list[str] = []
    monkeypatch.setattr(artifact, "check_custom_calls", lambda text, name: texts.append(text))

    artifact.deserialize(bytearray(affine.read_bytes()))

    assert "stablehlo.dot" in texts[0]
    assert len(texts[0]) < W.nbytes


@pytest.fixture
def artifacts(monkeypatch: pytest.MonkeyPatch) -> list[Exported]:
    """Collect the artifacts that are read."""
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
    """They keep every artifact that was compiled, and a mesh loads and unloads for ever."""
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
