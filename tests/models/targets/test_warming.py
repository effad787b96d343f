"""Caches filled by a process that lacks the target devices."""

from pathlib import Path

import jax
import numpy as np
import pytest
from support.compilations import noted_compilations
from support.targets import export_sharded, keys, warm

from xlaserve.authoring.export import export_model
from xlaserve.model_config.text import read_config
from xlaserve.runtime import loaders
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.loaded import LoadedModel
from xlaserve.runtime.programs import cache_key
from xlaserve.runtime.programs.compilation import Compilation
from xlaserve.runtime.programs.compilation_cache import CompilationCache

X = np.linspace(-1, 1, 3 * 64, dtype=np.float32).reshape(3, 64)


def load(path: Path, cache: Path) -> LoadedModel:
    """Load a model with the programs of a cache."""
    found = CompilationCache(cache, 1 << 30)
    found.prepare(cache_key.target_of("cpu", jax.local_devices()[0].device_kind))
    config = read_config(path.parent)
    return loaders.load(path, LoadContext("m", "1", config, compilation=Compilation(found)))


def export_declared(root: Path) -> Path:
    """Export a model whose rows are declared independent, so that every load tries them."""
    return export_model(
        lambda p, x: x.reshape(4, -1).reshape(-1, 4) * 2,
        None,
        {"x": ("FP32", [-1, 4])},
        root / "declared" / "1",
        outputs=["y"],
        max_batch_size=2,
        batch_independent=True,
    )


@pytest.mark.slow
def test_programs_made_elsewhere_are_used_and_answer_alike(tmp_path: Path) -> None:
    """Whole, and spread over two devices: for the CPU a process of its own has none of ours.

    Those of a trial are there too.
    """
    paths = export_sharded(tmp_path / "models", 2)
    declared = export_declared(tmp_path / "models")
    made = warm(tmp_path / "cache", "cpu", 2, *paths.values(), declared)
    with noted_compilations() as compiled:
        load(declared, tmp_path / "cache").close()

    assert [] == compiled
    for name, path in paths.items():
        expected = loaders.load(path, LoadContext("m", "1", read_config(path.parent)))
        answer = np.asarray(expected.execute({"x": X})["y"])
        expected.close()
        with noted_compilations() as compiled:
            model = load(path, tmp_path / "cache")
            found = np.asarray(model.execute({"x": X})["y"])
        info = model.info
        model.close()

        assert (0, 4) == (info.compiled_programs, info.cached_programs), name
        assert [] == compiled
        np.testing.assert_array_equal(answer, found)

    assert [""] * 4 == [str(one.problem or "") for one in made]
    # 1, 2, 3 and 4 rows; and 1 and 2, with 1, 3, 4 and 8 for the trial.
    assert [4, 4, 4, 6] == [len(one.programs) for one in made]
    assert {True} == {key["ahead"] for key in keys(tmp_path / "cache")}


@pytest.mark.slow
def test_what_is_there_is_not_compiled_again_and_a_loop_not_at_all(tmp_path: Path) -> None:
    """The flags of a key are the server's, not those that a process takes which has no device."""

    def looping(params: None, x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda c: (c < 100).all(), lambda c: c + 1, x)

    looped = export_model(
        looping, None, {"x": ("FP32", [2, 4])}, tmp_path / "models" / "loop" / "1", outputs=["y"]
    )
    flags = "--xla_cpu_enable_fast_min_max=false"
    declared = export_declared(tmp_path / "models")
    first, again, loop = warm(tmp_path / "cache", "cpu", 2, declared, declared, looped, flags=flags)

    # That of one row is a bucket's and the trial's.
    assert (5, 6) == (sum(one.compile_seconds > 0 for one in first.programs), len(first.programs))
    assert [0.0] * len(first.programs) == [program.compile_seconds for program in again.programs]
    assert () == loop.programs
    assert loop.notice.startswith("a loop depends on its inputs")
    assert {flags} == {key["environment"]["flags"] for key in keys(tmp_path / "cache")}
