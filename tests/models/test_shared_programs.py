"""Models with the same computation: what they share, what they do not, and what remains."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import dataclasses
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
import pytest
from support.plain_models import load_plain

from xlaserve.artifact import artifact, manifest
from xlaserve.artifact.sizes import EXECUTABLE_BYTES
from xlaserve.authoring.export import export_model
from xlaserve.errors import LoadCancelled
from xlaserve.model_config.config import ModelConfig
from xlaserve.runtime import loaders
from xlaserve.runtime.exported.jax_export import JaxExportModel
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.loaded import LoadedModel
from xlaserve.runtime.programs import programs
from xlaserve.runtime.programs.shared_programs import Lease, SharedProgram, SharedPrograms

BUCKETS = [1, 2, 3, 4, 6]
X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


def _affine(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return x @ params["w"] + params["b"][None, :]


def _export(path: Path, factor: float, fn: Callable[..., Any] = _affine, **more: Any) -> Path:
    w = np.full((4, 300), factor, np.float32)
    params = {"w": w, "b": np.full(300, -factor, np.float32)}
    inputs = {"x": ("FP32", [-1, 4])}
    return export_model(
        fn, params, inputs, path / "1", outputs=["y"], **{"max_batch_size": 6, **more}
    )


@pytest.fixture(scope="session")
def tunes(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return two fine-tunes of one computation."""
    root = tmp_path_factory.mktemp("tunes")
    return [_export(root / str(factor), factor) for factor in (1, 2)]


@pytest.fixture(autouse=True)
def _alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat all parameters as equally fast, even on a busy machine."""
    monkeypatch.setattr(programs, "_ALIKE", math.inf)


@pytest.fixture
def pool() -> SharedPrograms:
    return SharedPrograms()


@pytest.fixture
def load(pool: SharedPrograms) -> Iterator[Callable[..., JaxExportModel]]:
    """Return a function that loads with the programs of the pool."""
    loaded: list[JaxExportModel] = []

    def load_model(path: Path, config: ModelConfig | None = None, **more: Any) -> JaxExportModel:
        context = LoadContext("m", "1", config or ModelConfig(), programs=pool, **more)
        loaded.append(load_plain(path, context))
        return loaded[-1]

    yield load_model
    for model in loaded:
        model.close()


Load = Callable[..., JaxExportModel]


def _answer(model: LoadedModel) -> np.ndarray[Any, Any]:
    return np.asarray(model.execute({"x": X})["y"])


def _expected(factor: float) -> np.ndarray[Any, Any]:
    return X @ np.full((4, 300), factor, np.float32) - factor


def test_second_of_a_computation_compiles_nothing_and_answers_with_its_own_parameters(
    tunes: list[Path], load: Load, pool: SharedPrograms, compilations: list[str]
) -> None:
    first = load(tunes[0])
    compilations.clear()
    second = load(tunes[1])

    assert [] == compilations
    assert (1, 5) == pool.counts
    assert [(5, 0, 0), (0, 0, 5)] == [
        (info.compiled_programs, info.cached_programs, info.shared_programs)
        for info in (first.info, second.info)
    ]
    assert BUCKETS == [bucket.rows for bucket in second.info.buckets]
    assert 0 == second.info.compile_seconds
    for model, factor in ((first, 1), (second, 2)):
        np.testing.assert_allclose(_expected(factor), _answer(model), rtol=1e-5, atol=1e-6)


def test_one_carries_what_is_shared_and_the_next_one_does_when_it_leaves(
    tunes: list[Path], load: Load, pool: SharedPrograms
) -> None:
    told: list[str] = []
    first = load(tunes[0])
    alone = first.info.memory
    second = load(tunes[1], on_memory=lambda: told.append("second"))
    third = load(tunes[0], on_memory=lambda: told.append("third"))

    assert alone == first.info.memory
    assert 0 == second.info.memory.executables_bytes == third.info.memory.executables_bytes
    assert alone.total_bytes - alone.executables_bytes == second.info.memory.total_bytes
    assert [] == told

    first.close()

    assert ["second"] == told
    assert alone == second.info.memory
    assert 0 == third.info.memory.executables_bytes
    np.testing.assert_allclose(_expected(2), _answer(second), rtol=1e-5, atol=1e-6)

    third.close()
    second.close()

    assert (0, 0) == pool.counts


def test_other_batch_sizes_share_what_they_have_in_common(
    tunes: list[Path], load: Load, pool: SharedPrograms
) -> None:
    """Memory accounting is separate for each model."""
    first = load(tunes[0], ModelConfig(parameters={"batch_sizes": "1,6"}))
    second = load(tunes[1], ModelConfig(parameters={"batch_sizes": "2,6"}))

    assert [1, 1] == [second.info.compiled_programs, second.info.shared_programs]
    assert EXECUTABLE_BYTES == second.info.memory.executables_bytes
    assert (1, 3) == pool.counts

    first.close()

    assert (1, 2) == pool.counts
    assert 2 * EXECUTABLE_BYTES < second.info.memory.executables_bytes
    assert [2, 6] == [bucket.rows for bucket in second.info.buckets]


def test_bucket_that_is_compiled_for_one_is_there_for_all(
    tunes: list[Path], load: Load, compilations: list[str]
) -> None:
    # Measured times decide whether a batch is split into pieces, which are not padded.
    whole = ModelConfig(parameters={"split_batches": "false"})
    first, second = (load(path, whole, background_compile=True) for path in tunes)
    assert [1, 6] == [bucket.rows for bucket in second.info.buckets]

    first.compile_rest()
    compilations.clear()

    assert BUCKETS == [bucket.rows for bucket in second.info.buckets]
    assert 0 == second.info.memory.executables_bytes
    assert [2, 3, 4, 6] == [second.padded_rows(rows) for rows in (2, 3, 4, 5)]
    second.compile_rest()
    third = load(tunes[0], background_compile=True)
    assert BUCKETS == [bucket.rows for bucket in third.info.buckets]
    assert [] == compilations


def test_background_of_both_at_once_compiles_each_bucket_once(
    tunes: list[Path], load: Load, compilations: list[str]
) -> None:
    models = [load(path, background_compile=True) for path in tunes]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda model: model.compile_rest(), models))

    assert 5 == len(compilations)
    for model in models:
        assert BUCKETS == [bucket.rows for bucket in model.info.buckets]
    total = sum(model.info.memory.executables_bytes for model in models)
    assert 5 * EXECUTABLE_BYTES < total < 6 * EXECUTABLE_BYTES


def test_shape_that_one_asked_for_is_compiled_for_the_other(
    load: Load, pool: SharedPrograms, compilations: list[str], tmp_path: Path
) -> None:
    """A program without users is dropped."""

    def centred(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return (x - x.mean(axis=0, keepdims=True)) @ params["w"]

    paths = [_export(tmp_path / str(n), n, centred, max_batch_size=0) for n in (1, 2)]
    first, second = (
        load(path, ModelConfig(parameters={"max_on_demand_shapes": "1"})) for path in paths
    )
    compilations.clear()
    answers = []
    for model in (first, second):
        assert model.on_demand is not None
        shape = model.on_demand.shape_of({"x": X})
        assert shape is not None
        answers.append(np.asarray(model.on_demand.compile(shape).execute({"x": X})["y"]))

    assert 1 == len(compilations)
    for factor, found in zip((1, 2), answers, strict=True):
        expected = (X - X.mean(axis=0)) @ np.full((4, 300), factor, np.float32)
        np.testing.assert_allclose(expected, found, rtol=1e-5, atol=1e-6)
    before = pool.counts
    for model in (first, second):
        assert model.on_demand is not None
        model.on_demand.compile(model.on_demand.shape_of({"x": X[:2]}))
    assert before == pool.counts


def test_reload_to_another_computation_drops_the_first(
    tunes: list[Path], load: Load, pool: SharedPrograms, tmp_path: Path
) -> None:
    other = _export(tmp_path, 3, lambda p, x: x @ p["w"] - p["b"][None, :])
    first = load(tunes[0])
    replacing = load(other)
    assert (2, 10) == pool.counts

    first.close()

    assert (1, 5) == pool.counts
    expected = X @ np.full((4, 300), 3, np.float32) + 3
    np.testing.assert_allclose(expected, _answer(replacing), rtol=1e-5, atol=1e-6)


def test_failed_load_leaves_nothing(tunes: list[Path], load: Load, pool: SharedPrograms) -> None:
    def cancelled() -> None:
        if pool.counts[1] == 2:
            raise LoadCancelled("m")

    with pytest.raises(LoadCancelled):
        load(tunes[0], check_cancelled=cancelled)

    assert (0, 0) == pool.counts


# --- not shared ----------------------------------------------------------------------------------


def test_times_of_a_model_that_is_slower_are_its_own(
    tunes: list[Path], load: Load, pool: SharedPrograms, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hostile model may be the first one: its parameters may be arbitrarily slow or fast."""
    first = load(tunes[0])
    (computation,) = pool._computations.values()
    assert [b.seconds for b in load(tunes[1]).info.buckets] == [
        b.seconds for b in first.info.buckets
    ]
    for program in computation.programs.values():
        program.seconds = 3600.0
    monkeypatch.setattr(programs, "_ALIKE", 4.0)

    second = load(tunes[1])

    assert all(0 < bucket.seconds < 60 for bucket in second.info.buckets)
    assert second.expected_seconds(1) < 60


def test_decisions_of_one_configuration_are_not_anothers(tunes: list[Path], load: Load) -> None:
    batched = load(tunes[0])
    alone = load(tunes[1], ModelConfig(parameters={"batch_independent": "false"}))

    assert 0 < batched.batch_limit
    assert 0 == alone.batch_limit


# --- cache key -----------------------------------------------------------------------------------


def _key(path: Path) -> str:
    return artifact.read_keyed(path, manifest.read(path)).key


def _plain(fn: Callable[..., Any], platforms: tuple[str, ...] = ("cpu",), rows: str = "b") -> str:
    shape = jax.export.symbolic_shape(f"{rows}, 4")
    exported = jax.export.export(jax.jit(fn), platforms=platforms)(
        jax.ShapeDtypeStruct(shape, np.float32)
    )
    return artifact.keyed(jax.export.deserialize(exported.serialize())).key


def test_key_is_that_of_the_computation(tmp_path: Path, tunes: list[Path]) -> None:
    def renamed(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return x @ p["w"] + p["b"][None, :]

    same = _export(tmp_path / "same", 7, renamed)
    others = [
        _export(tmp_path / "minus", 1, lambda p, x: x @ p["w"] - p["b"][None, :]),
        _export(tmp_path / "closed", 1, lambda p, x: x @ p["w"] + p["b"][None, :] + 1e-7),
        _export(tmp_path / "platforms", 1, platforms=["cpu"]),
    ]
    keys = [_key(path) for path in (*tunes, same, *others)]

    assert keys[0] == keys[1] == keys[2]
    assert 4 == len(set(keys))


def test_key_does_not_believe_a_file(tmp_path: Path, tunes: list[Path]) -> None:
    """The calling convention in the manifest is part of the key."""
    described = manifest.read(tunes[0])
    durable = described.durable
    assert durable is not None
    lying = msgspec.structs.replace(durable, calling_convention=durable.calling_convention - 1)

    key = artifact.read_keyed(tunes[0], dataclasses.replace(described, durable=lying)).key

    assert _key(tunes[0]) != key


def test_key_of_a_plain_file_knows_no_names_and_lines() -> None:
    def one(x: jax.Array) -> jax.Array:
        return x * 2 + 1

    def another(tensor: jax.Array) -> jax.Array:
        doubled = tensor * 2
        return doubled + 1

    assert _plain(one) == _plain(another) == _plain(lambda x: x * 2 + 1)
    assert _plain(one) != _plain(lambda x: x * 2 + 1.5)
    assert _plain(one) != _plain(lambda x: 1 + 2 * x)
    assert _plain(one) != _plain(one, platforms=("cpu", "cuda"))


def test_plain_files_share_programs(pool: SharedPrograms, tmp_path: Path) -> None:
    models = []
    for name in ("one", "two"):
        path = tmp_path / f"{name}.jaxexp"
        shape = jax.export.symbolic_shape("b, 4")
        exported = jax.export.export(jax.jit(lambda x: x * 3))(
            jax.ShapeDtypeStruct(shape, np.float32)
        )
        path.write_bytes(exported.serialize())
        config = ModelConfig(parameters={"batch_sizes": "1,4"})
        models.append(loaders.load(path, LoadContext(name, "1", config, programs=pool)))

    assert [0, len(models[0].info.buckets)] == [model.info.shared_programs for model in models]
    for model in models:
        np.testing.assert_array_equal(X * 3, np.asarray(model.execute({"input_0": X})["output_0"]))
        model.close()
    assert (0, 0) == pool.counts


# --- single-flight compilation -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Artifact:
    mlir_module_serialized: bytes = b"module"


def _made(program: SharedProgram) -> None:
    program.executable = object()


def _never(program: SharedProgram) -> None:
    raise AssertionError("made twice")


def _waiting(pool: SharedPrograms, lease: Lease) -> Callable[[], bool]:
    """Return a predicate: does a model wait for another model's program?"""
    return lambda: any(lease in one.users for one in lease._of.programs.values())


@pytest.mark.parametrize("error", [ValueError("no"), LoadCancelled("first")])
def test_one_that_fails_fails_for_nobody_else(pool: SharedPrograms, error: Exception) -> None:
    first, second = (pool.lease("key", _Artifact()) for _ in range(2))
    begun, may_fail = threading.Event(), threading.Event()

    def failing(program: SharedProgram) -> None:
        begun.set()
        assert may_fail.wait(10)
        raise error

    with ThreadPoolExecutor(2) as threads:
        one = threads.submit(first.get, "p", failing, lambda: None)
        assert begun.wait(10)
        other = threads.submit(second.get, "p", _made, lambda: None)
        while not _waiting(pool, second)():
            assert not other.done()
        may_fail.set()
        found, is_made_here = other.result(10)
        with pytest.raises(type(error)):
            one.result(10)

    assert is_made_here
    assert found.is_compiled
    first.release()
    assert (1, 1) == pool.counts
    second.release()
    assert (0, 0) == pool.counts


def test_one_that_waits_gets_what_the_other_made_and_keeps_it(pool: SharedPrograms) -> None:
    """Even if the other model fails immediately afterwards."""
    first, second = (pool.lease("key", _Artifact()) for _ in range(2))
    begun, may_end = threading.Event(), threading.Event()

    def held(program: SharedProgram) -> None:
        begun.set()
        assert may_end.wait(10)
        _made(program)

    with ThreadPoolExecutor(2) as threads:
        one = threads.submit(first.get, "p", held, lambda: None)
        assert begun.wait(10)
        other = threads.submit(second.get, "p", _never, lambda: None)
        while not _waiting(pool, second)():
            assert not other.done()
        may_end.set()
        one.result(10)
        first.release()
        found, is_made_here = other.result(10)

    assert not is_made_here
    assert found is second.find("p")
    assert second.carries("p")
    assert second.carries_module


def test_one_that_is_cancelled_does_not_wait(pool: SharedPrograms) -> None:
    first, second = (pool.lease("key", _Artifact()) for _ in range(2))
    begun, may_end = threading.Event(), threading.Event()

    def held(program: SharedProgram) -> None:
        begun.set()
        assert may_end.wait(10)
        _made(program)

    def cancelled() -> None:
        raise LoadCancelled("second")

    with ThreadPoolExecutor(1) as threads:
        one = threads.submit(first.get, "p", held, lambda: None)
        assert begun.wait(10)
        with pytest.raises(LoadCancelled):
            second.get("p", _never, cancelled)
        may_end.set()
        found, _ = one.result(10)

    assert [first] == list(found.users)


def test_module_stays_while_one_may_have_it_compiled(pool: SharedPrograms) -> None:
    """The next model with the computation brings the module again."""
    first, second = (pool.lease("key", _Artifact()) for _ in range(2))
    first.stop_compiling()
    assert b"module" == second.exported.mlir_module_serialized
    held = second.exported

    second.stop_compiling()

    assert b"" == held.mlir_module_serialized
    assert b"" == pool.known("key").mlir_module_serialized
    assert b"module" == pool.lease("key", _Artifact()).exported.mlir_module_serialized


def test_the_next_one_is_told_that_it_carries_the_module(pool: SharedPrograms) -> None:
    """Even if the released model had used no program."""
    first, second, third = (pool.lease("key", _Artifact()) for _ in range(3))
    told: list[str] = []
    second.on_change = lambda: told.append("second")
    third.on_change = lambda: told.append("third")

    first.release()
    assert (["second"], True, False) == (told, second.carries_module, third.carries_module)
    third.release()
    assert ["second"] == told


def test_one_that_leaves_inherits_nothing_while_another_stays(pool: SharedPrograms) -> None:
    """Module and programs go to the first model that stays, else to the next one that leaves."""
    leases = [pool.lease("key", _Artifact()) for _ in range(4)]
    for lease in leases:
        lease.get("p", _made, lambda: None)
    told: list[int] = []
    for at, lease in enumerate(leases):
        lease.on_change = partial(told.append, at)
    for lease in leases[:3]:
        lease.leave()
    leases[0].release()

    def carrying() -> list[tuple[bool, bool]]:
        return [(lease.carries("p"), lease.carries_module) for lease in leases[1:]]

    assert [(False, False), (False, False), (True, True)] == carrying()
    assert [3] == told

    leases[1].release()
    leases[3].leave()
    leases[3].release()

    assert (True, True) == (leases[2].carries("p"), leases[2].carries_module)
    assert [3, 2] == told

    leases[2].release()

    assert (0, 0) == pool.counts


def test_who_hands_on_is_told_before_who_inherits(pool: SharedPrograms) -> None:
    """So shared memory is never counted twice; a model without an heir is not notified."""
    leases = [pool.lease("key", _Artifact()) for _ in range(2)]
    told: list[str] = []
    for lease in leases:
        lease.get("p", _made, lambda: None)
    leases[1].on_change = partial(told.append, "inherits")
    leases[0].release(partial(told.append, "hands on"))

    assert ["hands on", "inherits"] == told

    leases[1].release(partial(told.append, "hands on"))

    assert 2 == len(told)


def test_a_model_is_alone_while_no_other_has_a_program_to_execute(pool: SharedPrograms) -> None:
    """This includes models of other computations; a program being compiled does not count."""
    one, same, other = (pool.lease(key, _Artifact()) for key in ("key", "key", "other"))
    alone = []
    one.get("p", _made, lambda: None)
    alone.append((one.is_alone, other.is_alone))
    other.get("q", lambda _: alone.append((one.is_alone, other.is_alone)), lambda: None)
    other.drop(["q"])
    same.get("p", _never, lambda: None)
    alone.append((one.is_alone, same.is_alone))
    same.release()
    alone.append((one.is_alone, other.is_alone))

    assert [(True, False), (True, False), (False, False), (True, False)] == alone


def test_facts_are_bounded(pool: SharedPrograms) -> None:
    lease = pool.lease("key", _Artifact())
    asked: list[int] = []

    def find(number: int) -> int:
        asked.append(number)
        return number

    assert [5] * 3 == [lease.fact(5, partial(find, 5)) for _ in range(3)]
    assert [5] == asked
    for number in range(1000):
        assert number == lease.fact(number, partial(find, number))
    assert len(lease._of.facts) < 100
