# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.monitoring
import numpy as np
import pytest
from support.plain_models import load_plain

from xlaserve.artifact.shapes import padded
from xlaserve.authoring.export import export_model
from xlaserve.errors import InvalidModel, InvalidTensor, OutOfMemory
from xlaserve.model_config.config import ConfigTensor, ModelConfig
from xlaserve.runtime.exported import jax_export, outputs
from xlaserve.runtime.exported.outputs import DeviceTensor
from xlaserve.runtime.failures import raise_if_exhausted
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.loaded import LoadedModel
from xlaserve.runtime.programs import programs
from xlaserve.tensors import DATATYPES, Tensor, TensorSpec

Load = Callable[..., LoadedModel]
Run = Callable[..., dict[str, Tensor]]


def _rows(count: int, columns: int = 4) -> Tensor:
    random = np.random.default_rng(count)
    return random.standard_normal((count, columns)).astype(np.float32)


def _affine(x: Tensor) -> Tensor:
    w = np.arange(4 * 300, dtype=np.float32).reshape(4, 300) / 1000
    return np.asarray(x @ w + np.linspace(-1, 1, 300, dtype=np.float32))


# --- execution -----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", range(1, 7))
def test_every_number_of_rows_gives_what_numpy_gives(
    affine_model: LoadedModel, run: Run, count: int
) -> None:
    x = _rows(count)

    found = run(affine_model, {"x": x})["y"]

    assert (np.float32, (count, 300)) == (found.dtype, found.shape)
    assert np.allclose(_affine(x), found, atol=1e-5)


def test_padding_is_the_last_row() -> None:
    """A loop that terminates on every row of a request may not terminate on zeros."""
    rows = np.arange(6, dtype=np.int32).reshape(3, 2)

    assert [[0, 1], [2, 3], [4, 5], [4, 5], [4, 5]] == padded(rows, 5).tolist()


def test_executing_compiles_nothing(
    affine_model: LoadedModel, run: Run, compilations: list[str]
) -> None:
    for count in range(1, 7):
        run(affine_model, {"x": _rows(count)})

    assert [] == compilations


def test_loading_compiles_each_bucket_once(
    affine_directory: Path, load: Load, compilations: list[str]
) -> None:
    """The five buckets are 1, 2, 3, 4 and 6."""
    load(affine_directory)

    assert 5 == len(compilations)


@pytest.mark.parametrize("count", [0, 7])
def test_rows_out_of_bounds(affine_model: LoadedModel, run: Run, count: int) -> None:
    if count:
        with pytest.raises(InvalidTensor, match="'x': expected a batch of 6 rows, got 7 rows"):
            run(affine_model, {"x": _rows(count)})
    else:
        assert (0, 300) == run(affine_model, {"x": _rows(0)})["y"].shape


def test_rows_of_all_inputs_are_the_same(tmp_path: Path, load: Load, run: Run) -> None:
    inputs = {"a": ("FP32", [-1, 4]), "b": ("FP32", [-1, 4])}
    path = tmp_path / "1"
    export_model(lambda p, a, b: a + b, None, inputs, path, outputs=["y"], max_batch_size=4)

    with pytest.raises(InvalidTensor, match="'b': expected a batch of 2 rows, got 3 rows"):
        run(load(path), {"a": _rows(2), "b": _rows(3)})


def test_inputs_may_be_unaligned_strided_or_read_only(affine_model: LoadedModel, run: Run) -> None:
    x = _rows(4)
    unaligned = np.frombuffer(b"?" + x.tobytes(), np.uint8)[1:].view(np.float32).reshape(4, 4)
    strided = np.asfortranarray(x)
    frozen = x.copy()
    frozen.flags.writeable = False

    expected = run(affine_model, {"x": x})["y"]

    for form in (unaligned, strided, frozen):
        assert np.array_equal(expected, run(affine_model, {"x": form})["y"])


@pytest.mark.parametrize("count", [4, 5])
def test_answer_does_not_change_with_the_buffer_of_the_request(
    tmp_path: Path, load: Load, run: Run, count: int
) -> None:
    """XLA reads aligned arrays in place; its results must not be views of them."""
    path = tmp_path / "1"
    inputs = {"x": ("FP32", [-1, 16])}
    export_model(lambda p, x: x, None, inputs, path, outputs=["y"], max_batch_size=6)
    memory = np.zeros(count * 64 + 64, np.uint8)
    start = -memory.ctypes.data % 64
    x = memory[start : start + count * 64].view(np.float32).reshape(count, 16)
    x[:] = 1

    for resident in (False, True):
        found = load(path).execute({"x": x}, resident=resident)["y"]
        x[:] = 2
        host = found if isinstance(found, np.ndarray) else found.numpy()

        assert np.all(host == 1)
        x[:] = 1


def test_many_threads_execute_at_once(affine_model: LoadedModel, run: Run) -> None:
    barrier = threading.Barrier(8)

    def many(seed: int) -> bool:
        barrier.wait()
        x = _rows(seed % 6 + 1)
        expected = _affine(x)
        return all(
            np.allclose(expected, run(affine_model, {"x": x})["y"], atol=1e-5) for _ in range(50)
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(many, range(8)))


def test_warm_up_measures_every_bucket(affine_directory: Path, load: Load) -> None:
    """Only of batches executed as a whole: pieces may be faster if the machine was disturbed."""
    model = load(affine_directory)
    seconds = [model.expected_seconds(rows) for rows in range(1, 100)]

    assert all(0 < second < 1 for second in seconds)
    assert seconds[4] == seconds[5] == seconds[-1]


# --- metadata ------------------------------------------------------------------------------------


def test_model_describes_itself(affine_model: LoadedModel) -> None:
    info = affine_model.info

    assert ("jax_export", 6) == (info.platform, info.max_batch_size)
    assert (TensorSpec("x", DATATYPES["FP32"], (-1, 4)),) == info.inputs
    assert (TensorSpec("y", DATATYPES["FP32"], (-1, 300)),) == info.outputs
    assert info.compile_seconds > 0


def test_memory_is_measured(affine_model: LoadedModel) -> None:
    """In FP32, [4,300] is an argument, and [300] is just too large to be a constant."""
    memory = affine_model.info.memory

    assert 4 * (4 * 300 + 300) == memory.parameters_bytes
    assert memory.temporaries_bytes >= 6 * 4 * (4 + 300)
    assert memory.executables_bytes > 0


# --- fixed shapes and configurations -----------------------------------------------------------


def test_fixed_shapes_are_one_bucket(
    tmp_path: Path, load: Load, run: Run, compilations: list[str]
) -> None:
    def fn(params: None, x: jax.Array, scale: jax.Array) -> dict[str, jax.Array]:
        return {"sum": (x * scale[None, None]).sum(), "x": x}

    path = tmp_path / "1"
    export_model(fn, None, {"x": ("FP32", [2, 3]), "scale": ("FP32", [])}, path)
    compilations.clear()
    model = load(path)

    found = run(model, {"x": np.ones((2, 3), np.float32), "scale": np.array(2, np.float32)})

    assert (0, 1) == (model.info.max_batch_size, len(compilations))
    assert [12] == [found["sum"]]
    assert () == found["sum"].shape


def test_fixed_shapes_stay_on_the_device(tmp_path: Path, load: Load) -> None:
    path = tmp_path / "1"
    export_model(lambda p, x: {"sum": x.sum(), "x": x}, None, {"x": ("FP32", [2])}, path)

    outputs = load(path).execute({"x": np.ones(2, np.float32)}, resident=True)

    (total, x) = (outputs["sum"], outputs["x"])
    assert isinstance(total, DeviceTensor)
    assert isinstance(x, DeviceTensor)
    assert (1, 2) == (total.rows, x.rows)
    assert 2 == total.numpy()


def test_configuration_decides_the_largest_batch(
    affine_directory: Path, load: Load, run: Run, compilations: list[str]
) -> None:
    model = load(affine_directory, ModelConfig(max_batch_size=2))

    assert (2, 2) == (model.info.max_batch_size, len(compilations))
    with pytest.raises(InvalidTensor):
        run(model, {"x": _rows(3)})


def test_configuration_that_disagrees_is_refused_before_compiling(
    affine_directory: Path, load: Load, compilations: list[str]
) -> None:
    config = ModelConfig(inputs=(ConfigTensor("x", DATATYPES["FP32"], (5,)),))

    with pytest.raises(InvalidModel, match=r"input 'x': expected FP32\[-1,4\] as in the artifact"):
        load(affine_directory, config)
    assert [] == compilations


# --- between two models of an ensemble -----------------------------------------------------------


@pytest.fixture
def fetches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Record the shapes of all arrays fetched from the device."""
    shapes: list[tuple[int, ...]] = []
    fetch = outputs.to_host

    def counting(array: jax.Array, rows: int | None = None) -> Tensor:
        shapes.append(array.shape)
        return fetch(array, rows)

    for module in (jax_export, outputs):
        monkeypatch.setattr(module, "to_host", counting)
    return shapes


def _sink(directory: Path, max_batch_size: int = 6, datatype: str = "FP32") -> Path:
    """Export a model that takes the affine model's output and returns the sum of each row."""

    def fn(params: None, z: jax.Array) -> jax.Array:
        return z.sum(axis=1, keepdims=True)

    inputs = {"z": (datatype, [-1, 300])}
    return export_model(
        fn, None, inputs, directory / "1", outputs=["sum"], max_batch_size=max_batch_size
    )


@pytest.mark.parametrize("count", [4, 5])
def test_array_stays_on_the_device_between_models(
    affine_model: LoadedModel,
    tmp_path: Path,
    load: Load,
    run: Run,
    fetches: list[tuple[int, ...]],
    count: int,
) -> None:
    """Only the last output is fetched, with or without padding."""
    sink = load(_sink(tmp_path))
    fetches.clear()

    middle = affine_model.execute({"x": _rows(count)}, resident=True)["y"]
    found = run(sink, {"z": middle})["sum"]

    bucket = {4: 4, 5: 6}[count]
    assert [(bucket, 1)] == fetches
    assert np.allclose(_affine(_rows(count)).sum(axis=1, keepdims=True), found, atol=1e-3)


def test_other_bucket_is_fetched_and_padded_anew(
    affine_model: LoadedModel, tmp_path: Path, load: Load, run: Run, fetches: list[tuple[int, ...]]
) -> None:
    """Five rows are padded to six in the first model; the second one's largest batch is five."""
    sink = load(_sink(tmp_path, max_batch_size=5))
    fetches.clear()

    middle = affine_model.execute({"x": _rows(5)}, resident=True)["y"]
    found = run(sink, {"z": middle})["sum"]

    assert [(6, 300), (5, 1)] == fetches
    assert np.allclose(_affine(_rows(5)).sum(axis=1, keepdims=True), found, atol=1e-3)


def test_resident_rows_are_the_real_ones(affine_model: LoadedModel) -> None:
    resident = affine_model.execute({"x": _rows(5)}, resident=True)["y"]

    assert isinstance(resident, DeviceTensor)
    assert (5, (6, 300)) == (resident.rows, resident.array.shape)
    assert np.allclose(_affine(_rows(5)), resident.numpy(), atol=1e-5)


class _Elsewhere:
    """A device tensor of another kind of model (a Resident)."""

    rows = 3

    def numpy(self) -> Tensor:
        return _rows(3)


def test_resident_of_another_kind_is_fetched(affine_model: LoadedModel, run: Run) -> None:
    found = run(affine_model, {"x": _Elsewhere()})["y"]

    assert np.allclose(_affine(_rows(3)), found, atol=1e-5)


# --- memory ------------------------------------------------------------------------------------


def test_nothing_is_left_of_a_closed_model(affine_directory: Path) -> None:
    gc.collect()
    before = len(jax.live_arrays())
    model = load_plain(affine_directory, LoadContext("m", "1", ModelConfig()))
    (copy,) = model._copies
    watched = [weakref.ref[object](leaf) for leaf in copy.leaves]
    watched += [weakref.ref[object](program.call) for program in copy.programs]
    del copy
    assert len(jax.live_arrays()) == before + 2

    model.close()
    del model
    gc.collect()

    assert before == len(jax.live_arrays())
    assert [None] * 7 == [reference() for reference in watched]


def test_nothing_is_left_of_a_load_that_fails(
    affine_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*args: object) -> object:
        raise RuntimeError("INTERNAL: no such luck")

    monkeypatch.setattr(programs, "warmed", failing)
    gc.collect()
    before = len(jax.live_arrays())

    with pytest.raises(InvalidModel, match="cannot be compiled or run: INTERNAL: no such luck"):
        jax_export.load(affine_directory, LoadContext("m", "1", ModelConfig()))
    gc.collect()

    assert before == len(jax.live_arrays())


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes."),
            "model 'm': out of memory, RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes.",
        ),
        (
            jax.errors.JaxRuntimeError("INTERNAL: a call failed: RESOURCE_EXHAUSTED: no room\nat"),
            "model 'm': out of memory, INTERNAL: a call failed: RESOURCE_EXHAUSTED: no room",
        ),
        (MemoryError(), "model 'm': out of memory, the host is out of memory"),
    ],
)
def test_exhausted_memory_is_an_error_of_its_own(error: Exception, expected: str) -> None:
    with pytest.raises(OutOfMemory) as caught:
        raise_if_exhausted("m", error)
    assert expected == str(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure"),
        jax.errors.JaxRuntimeError("INTERNAL: OOM in op 'RESOURCE_EXHAUSTED'"),
        jax.errors.JaxRuntimeError("INTERNAL: it failed\nRESOURCE_EXHAUSTED: says its name"),
        ValueError("RESOURCE_EXHAUSTED: out of memory"),
    ],
)
def test_other_errors_are_not_about_memory(error: Exception) -> None:
    raise_if_exhausted("m", error)


@pytest.mark.parametrize("text", ["RESOURCE_EXHAUSTED: Out of memory", "INTERNAL: no such luck"])
def test_error_of_an_execution_is_out_of_memory_or_passes(
    affine_model: LoadedModel, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    def failing(array: jax.Array, rows: int | None = None) -> Tensor:
        raise jax.errors.JaxRuntimeError(text)

    monkeypatch.setattr(jax_export, "to_host", failing)
    expected = OutOfMemory if "EXHAUSTED" in text else jax.errors.JaxRuntimeError

    with pytest.raises(expected, match=text):
        affine_model.execute({"x": _rows(1)})


def test_load_without_room_is_out_of_memory(
    affine_directory: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*args: object) -> object:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(programs, "warmed", exhausted)

    with pytest.raises(OutOfMemory, match="model 'm': out of memory, RESOURCE_EXHAUSTED"):
        load(affine_directory)


def test_artifact_of_several_platforms_runs_on_the_one_that_is_here(
    affine_directory: Path,
) -> None:
    context = LoadContext("m", "1", ModelConfig(), device="rocm")

    with pytest.raises(
        InvalidModel, match="was exported for cpu, cuda, tpu, this server runs on rocm"
    ):
        jax_export.load(affine_directory, context)


# --- dependent rows, and replicas ----------------------------------------------------------------


def test_dependent_rows_are_never_padded(
    tmp_path: Path, load: Load, run: Run, compilations: list[str]
) -> None:
    """An additional row of zeros would change the mean."""
    batch = jax.export.symbolic_shape("b")
    argument = jax.ShapeDtypeStruct((*batch, 2), np.float32)
    centred = jax.jit(lambda x: x - x.mean(axis=0, keepdims=True))
    path = tmp_path / "m.jaxexp"
    path.write_bytes(jax.export.export(centred)(argument).serialize())
    compilations.clear()
    config = ModelConfig(max_batch_size=6, parameters={"batch_independent": "false"})
    model = load(path, config)

    assert (6, 0) == (len(compilations), model.batch_limit)
    for count in range(1, 7):
        x = np.arange(2 * count, dtype=np.float32).reshape(count, 2)
        assert count == model.padded_rows(count)
        assert np.allclose(x - x.mean(axis=0), run(model, {"input_0": x})["output_0"])


def test_replicas_answer_alike(affine_directory: Path, load: Load, run: Run) -> None:
    model = load(affine_directory, ModelConfig(parameters={"devices": "all"}))

    found = [model.execute({"x": _rows(5)}, replica=replica)["y"] for replica in (0, 1)]

    assert 2 == model.replicas
    assert all(isinstance(y, np.ndarray) and np.allclose(_affine(_rows(5)), y) for y in found)


def test_array_from_another_device_is_fetched(
    affine_directory: Path, affine_model: LoadedModel, tmp_path: Path, load: Load, run: Run
) -> None:
    """Another replica may use a tensor that one replica left on its device."""
    sink = load(_sink(tmp_path), ModelConfig(parameters={"devices": "1"}))

    middle = affine_model.execute({"x": _rows(4)}, resident=True)["y"]
    found = run(sink, {"z": middle})["sum"]

    assert np.allclose(_affine(_rows(4)).sum(axis=1, keepdims=True), found, atol=1e-3)


def test_batching_gain_is_known_from_the_warm_up(affine_model: LoadedModel) -> None:
    assert affine_model.batch_limit in {bucket.rows for bucket in affine_model.info.buckets}


@pytest.mark.parametrize("parameters", [{"devices": "7"}, {"batch_sizes": "7"}])
def test_configuration_that_cannot_be_is_refused_before_compiling(
    affine_directory: Path, load: Load, compilations: list[str], parameters: dict[str, str]
) -> None:
    with pytest.raises(InvalidModel):
        load(affine_directory, ModelConfig(parameters=parameters))
    assert [] == compilations
