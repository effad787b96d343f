"""Programs from the compilation cache: when they are used, and that no answer changes."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from support.compilations import noted_compilations

from xlaserve.authoring.export import export_model
from xlaserve.errors import OutOfMemory
from xlaserve.model_config.config import ModelConfig
from xlaserve.runtime.loaded import LoadedModel
from xlaserve.runtime.programs import cache_key
from xlaserve.runtime.programs.compilation import Compilation
from xlaserve.runtime.programs.compilation_cache import CompilationCache, Entry

Load = Callable[..., LoadedModel]

BUCKETS = 5
X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


@pytest.fixture
def target() -> str:
    """Return the name of this machine's processor type."""
    return cache_key.target_of("cpu", jax.local_devices()[0].device_kind)


@pytest.fixture
def compilation(tmp_path: Path, target: str) -> Compilation:
    """Return a compilation with a cache."""
    cache = CompilationCache(tmp_path / "cache", 1 << 30)
    cache.prepare(target)
    return Compilation(cache)


def keys(compilation: Compilation) -> list[Path]:
    """Return the key files."""
    assert compilation.cache is not None
    return sorted(compilation.cache.directory.glob("*/*.json"))


def answer(model: LoadedModel) -> bytes:
    found = model.execute({"x": X})["y"]
    assert isinstance(found, np.ndarray)
    return found.tobytes()


def test_what_one_load_compiled_the_next_one_finds(
    affine_directory: Path, load: Load, compilation: Compilation
) -> None:
    """Nothing is compiled or lowered, and the reported memory is the same."""
    first = load(affine_directory, compilation=compilation)
    kept = keys(compilation)
    with noted_compilations() as compiled:
        second = load(affine_directory, compilation=compilation)
        same = answer(second) == answer(first)

    assert (BUCKETS, 0) == (first.info.compiled_programs, first.info.cached_programs)
    assert (0, BUCKETS) == (second.info.compiled_programs, second.info.cached_programs)
    assert [] == compiled
    assert same
    assert first.info.memory == second.info.memory
    assert BUCKETS == len(kept)
    assert kept == keys(compilation)


def test_compilations_are_seen_where_there_are_some(affine_directory: Path, load: Load) -> None:
    """Control: the recorder used above does see compilations."""
    with noted_compilations() as compiled:
        load(affine_directory)

    assert BUCKETS <= len(compiled)


def test_other_weights_with_the_same_shapes_find_the_same_programs(
    load: Load, compilation: Compilation, tmp_path: Path
) -> None:
    """Neither large nor small parameters are part of a program."""
    answers = []
    for number, (weight, bias) in enumerate([(1, 1), (2, 1), (2, 3)]):
        params = {
            "w": np.full((4, 300), weight, np.float32),
            "b": np.full(3, bias, np.float32),
        }
        path = export_model(
            lambda p, x: {"y": (x @ p["w"])[:, :3] + p["b"][None, :]},
            params,
            {"x": ("FP32", [-1, 4])},
            tmp_path / str(number) / "1",
            max_batch_size=1,
        )
        model = load(path, compilation=compilation)
        answers.append((model.info.cached_programs, model.execute({"x": X[:1] * 0 + 1})["y"]))

    assert [0, 1, 1] == [cached for cached, _ in answers]
    for (_, found), expected in zip(answers, (5, 9, 11), strict=True):
        np.testing.assert_allclose(np.full((1, 3), expected), np.asarray(found))


FIELDS = (
    "jax", "jaxlib", "plugin", "platform", "platform_version", "device_kind", "topology", "flags",
    "options", "configuration", "processor", "threads",
)  # fmt: skip


def test_key_says_everything_that_compiled_it(
    affine_directory: Path, load: Load, compilation: Compilation
) -> None:
    load(affine_directory, compilation=compilation)

    key = json.loads(keys(compilation)[0].read_text())

    assert set(FIELDS) == set(key["environment"])
    assert {"computation", "packing", "arguments", "outputs", "devices"} == set(key["program"])
    assert "float32[4, 300] whole; float32[" in key["program"]["arguments"]
    assert f"jax_enable_x64={True}" in key["environment"]["configuration"]


@pytest.mark.parametrize("field", FIELDS)
def test_each_field_tells_entries_apart(field: str) -> None:
    whole: dict[str, str] = dict.fromkeys(FIELDS, "same")

    assert "" == cache_key.first_difference(whole, dict(whole))
    assert f"{field}: expected 'same', got ''" == cache_key.first_difference(
        whole, {name: text for name, text in whole.items() if name != field}
    )


@pytest.mark.parametrize("field", ["jaxlib", "flags"])
def test_entry_of_another_environment_is_dropped_with_one_line(
    affine_directory: Path,
    load: Load,
    compilation: Compilation,
    capfd: pytest.CaptureFixture[str],
    field: str,
) -> None:
    expected = answer(load(affine_directory, compilation=compilation))
    before = {path: json.loads(path.read_text()) for path in keys(compilation)}
    for path, key in before.items():
        changed = key["environment"] | {field: "another"}
        path.write_text(json.dumps(key | {"environment": changed}))
    capfd.readouterr()

    model = load(affine_directory, compilation=compilation)
    printed = "".join(capfd.readouterr())
    again = load(affine_directory, compilation=compilation)

    assert (BUCKETS, 0) == (model.info.compiled_programs, model.info.cached_programs)
    assert expected == answer(model)
    assert 1 == printed.count("cached programs not used")
    assert f"programs={BUCKETS}" in printed
    assert f"{field}: expected " in printed
    assert ", got 'another'" in printed
    assert BUCKETS == again.info.cached_programs
    assert [key["environment"] for key in before.values()] == [
        json.loads(path.read_text())["environment"] for path in before
    ]


def test_batch_sizes_that_are_compiled_later_add_no_line(
    affine_directory: Path,
    load: Load,
    compilation: Compilation,
    target: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    load(affine_directory, compilation=compilation)
    swap(compilation, target, b"")

    model = load(affine_directory, compilation=compilation, background_compile=True)
    model.compile_rest()

    assert BUCKETS == model.info.compiled_programs
    assert 1 == "".join(capfd.readouterr()).count("cached programs not used")


def swap(compilation: Compilation, target: str, executable: bytes, **changes: Any) -> None:
    """Replace the bytes of every cached program, with matching hashes."""
    cache = compilation.cache
    assert cache is not None
    for path in keys(compilation):
        entry = cache.read(target, path.stem)
        assert isinstance(entry, Entry)
        changed = dataclasses.replace(entry, executable=executable, **changes)
        cache.write(target, path.stem, changed)


@pytest.mark.parametrize("data", [b"", b"no pickle", b"\x80\x05N."])
def test_bytes_that_are_no_program_are_dropped(
    affine_directory: Path,
    load: Load,
    compilation: Compilation,
    target: str,
    capfd: pytest.CaptureFixture[str],
    data: bytes,
) -> None:
    expected = answer(load(affine_directory, compilation=compilation))
    swap(compilation, target, data)

    model = load(affine_directory, compilation=compilation)

    assert (BUCKETS, 0) == (model.info.compiled_programs, model.info.cached_programs)
    assert expected == answer(model)
    assert 1 == "".join(capfd.readouterr()).count("it cannot be loaded")


def test_program_that_does_not_take_the_inputs_is_found_out_by_the_warm_up(
    affine_directory: Path,
    load: Load,
    compilation: Compilation,
    target: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Every bucket gets the program of one bucket."""
    expected = answer(load(affine_directory, compilation=compilation))
    assert compilation.cache is not None
    entry = compilation.cache.read(target, keys(compilation)[0].stem)
    assert isinstance(entry, Entry)
    swap(compilation, target, entry.executable)

    model = load(affine_directory, compilation=compilation)

    assert (BUCKETS - 1, 1) == (model.info.compiled_programs, model.info.cached_programs)
    assert expected == answer(model)
    assert "its warm-up failed" in "".join(capfd.readouterr())


def test_program_with_other_outputs_is_found_out_by_the_warm_up(
    load: Load,
    compilation: Compilation,
    target: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    paths = [
        export_model(
            lambda p, x, columns=columns: {"y": x[:, :columns] * 2},
            None,
            {"x": ("FP32", [-1, 4])},
            tmp_path / str(columns) / "1",
            max_batch_size=1,
        )
        for columns in (2, 3)
    ]
    load(paths[0], compilation=compilation)
    (theirs,) = keys(compilation)
    load(paths[1], compilation=compilation)
    assert compilation.cache is not None
    entry = compilation.cache.read(target, theirs.stem)
    assert isinstance(entry, Entry)
    (ours,) = set(keys(compilation)) - {theirs}
    own = compilation.cache.read(target, ours.stem)
    assert isinstance(own, Entry)
    compilation.cache.write(
        target, ours.stem, dataclasses.replace(own, executable=entry.executable)
    )

    model = load(paths[1], compilation=compilation)

    assert (1, 0) == (model.info.compiled_programs, model.info.cached_programs)
    assert (1, 3) == np.shape(model.execute({"x": X[:1]})["y"])
    assert "output 'y': expected FP32[-1,3], got float32[1,2]" in "".join(capfd.readouterr())


def test_program_that_never_ran_is_not_used_where_it_cannot_be_tried(
    load: Load,
    compilation: Compilation,
    target: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The loop depends on its input, so no warm-up executes it before the first request."""

    def looping(params: None, x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda c: (c < 100).all(), lambda c: c + 1, x)

    path = export_model(looping, None, {"x": ("FP32", [2, 4])}, tmp_path / "m" / "1", outputs=["y"])
    load(path, compilation=compilation)
    ran = load(path, compilation=compilation)
    assert compilation.cache is not None
    (key,) = keys(compilation)
    entry = compilation.cache.read(target, key.stem)
    assert isinstance(entry, Entry)
    swap(compilation, target, entry.executable, is_ahead=True)

    never = load(path, compilation=compilation)

    assert (0, 1) == (ran.info.compiled_programs, ran.info.cached_programs)
    assert (1, 0) == (never.info.compiled_programs, never.info.cached_programs)
    assert (
        "it was never executed and cannot be tested, since a loop depends on its inputs"
        in "".join(capfd.readouterr())
    )


def test_program_made_ahead_has_the_flags_of_the_server_in_its_key(
    affine_directory: Path, load: Load, compilation: Compilation
) -> None:
    """These differ from the flags of the compiling process, which has no device."""
    ahead = dataclasses.replace(compilation, is_ahead=True, server_flags="--xla_of_server=1")
    load(affine_directory, ModelConfig(max_batch_size=1), compilation=ahead)
    (key,) = (json.loads(path.read_text()) for path in keys(compilation))

    assert ("--xla_of_server=1", True) == (key["environment"]["flags"], key["ahead"])


@pytest.mark.parametrize("tries_here", [False, True], ids=["in a process", "here"])
def test_trial_of_declared_rows_compiles_nothing_either(
    load: Load, compilation: Compilation, tmp_path: Path, *, tries_here: bool
) -> None:
    """Each load tries the declared rows, at batch sizes that only the trial uses.

    Programs of a trial in a process are compiled there; those of a trial on the device are cached
    and found again.
    """

    def unproved(params: None, x: jax.Array) -> jax.Array:
        return x.reshape(4, -1).reshape(-1, 4) * 2

    path = export_model(
        unproved,
        None,
        {"x": ("FP32", [-1, 4])},
        tmp_path / "m" / "1",
        outputs=["y"],
        max_batch_size=2,
        batch_independent=True,
    )
    compilation = dataclasses.replace(compilation, tries_here=tries_here)
    first = load(path, compilation=compilation)
    with noted_compilations() as compiled:
        second = load(path, compilation=compilation)

    further = first.info.compiled_programs - len(first.info.buckets)
    assert (further > 0) == tries_here
    assert [] == compiled
    twice = 1 if tries_here else 0
    assert first.info.compiled_programs + twice == second.info.cached_programs


def test_cached_program_that_has_no_memory_is_no_reason_to_compile(
    affine_directory: Path,
    load: Load,
    compilation: Compilation,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load(affine_directory, compilation=compilation)

    def exhausted(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("xlaserve.runtime.programs.programs.warmed", exhausted)
    with noted_compilations() as compiled, pytest.raises(OutOfMemory):
        load(affine_directory, compilation=compilation)

    assert [] == compiled


def test_configuration_is_not_part_of_a_program(
    affine_directory: Path, load: Load, compilation: Compilation
) -> None:
    """A smaller max_batch_size uses the same programs, except for the largest batch."""
    load(affine_directory, compilation=compilation)
    model = load(affine_directory, ModelConfig(max_batch_size=4), compilation=compilation)

    assert (0, 4) == (model.info.compiled_programs, model.info.cached_programs)
