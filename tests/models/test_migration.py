"""Migrates models on disk to a format that future JAX versions read."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import jax.export
import numpy as np
import pytest
from support.lasting import refusing, without_stablehlo

from xlaserve.artifact import artifact, computation, manifest
from xlaserve.artifact.manifest import ARTIFACT, FILE_NAME, STABLEHLO
from xlaserve.authoring import migration
from xlaserve.authoring.migration import Outcome, Result, migrate
from xlaserve.errors import InvalidModel
from xlaserve.files import files
from xlaserve.model_config.config import ModelConfig
from xlaserve.runtime.loaded import LoadedModel
from xlaserve.tensors import Tensor

Load = Callable[..., LoadedModel]
Run = Callable[..., dict[str, Tensor]]

DATA = Path(__file__).parents[1] / "data" / "old_models"
TWO_ROWS = ModelConfig(max_batch_size=2)
X = np.ones((2, 8), np.float32)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A version directory without its StableHLO file."""
    copy = shutil.copytree(DATA / "0.8.3" / "mlp" / "1", tmp_path / "models" / "mlp" / "1")
    return without_stablehlo(copy)


def _contents(directory: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def _results(path: Path) -> list[Result]:
    return [outcome.result for outcome in migrate(path)]


def test_version_gets_the_part_that_lasts(old: Path, load: Load, run: Run) -> None:
    before = run(load(old), {"x": X})["y"]
    kept = (old / ARTIFACT).read_bytes()

    assert [Outcome(old, Result.MIGRATED, "model.stablehlo added (StableHLO 1.11.0)")] == list(
        migrate(old.parents[1])
    )
    assert kept == (old / ARTIFACT).read_bytes()
    assert np.array_equal(before, run(load(old), {"x": X})["y"])
    assert [Outcome(old, Result.CURRENT)] == list(migrate(old))


def test_asking_writes_nothing(old: Path) -> None:
    before = _contents(old)

    assert [Outcome(old, Result.DUE, "model.stablehlo added (StableHLO 1.11.0)")] == list(
        migrate(old, dry_run=True)
    )
    assert before == _contents(old)


@pytest.fixture
def expired(old: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, but JAX refuses to read the artifact."""
    monkeypatch.setattr(jax.export, "deserialize", refusing((old / ARTIFACT).read_bytes()))
    return old


def test_artifact_that_jax_refuses_is_renewed(expired: Path, load: Load, run: Run) -> None:
    before = run(load(expired), {"x": X})["y"]

    (outcome,) = migrate(expired)

    assert outcome.detail.endswith(
        "model.jaxexp of jax 0.8.3 is rejected by the installed jax, written by jax"
        f" {jax.__version__}"
    )
    assert jax.__version__ == manifest.read(expired).jax_version
    assert artifact.is_read_by_jax(bytearray((expired / ARTIFACT).read_bytes()))
    assert np.array_equal(before, run(load(expired), {"x": X})["y"])
    assert [Result.CURRENT] == _results(expired)


@pytest.mark.slow
def test_version_can_be_loaded_after_every_file_that_is_written(
    expired: Path, monkeypatch: pytest.MonkeyPatch, load: Load
) -> None:
    """A process killed between two writes leaves a model that loads and can be migrated again."""
    write = files.write_atomically
    allowed = [STABLEHLO, ARTIFACT, FILE_NAME]
    written: list[str] = []

    def stopping(path: Path, parts: list[bytes]) -> files.FileRecord:
        if len(written) == allowed_count:
            raise InterruptedError("killed")
        written.append(path.name)
        return write(path, parts)

    monkeypatch.setattr(files, "write_atomically", stopping)
    whole = shutil.copytree(expired, expired.parent / "whole")
    for allowed_count in range(len(allowed)):
        written.clear()
        shutil.rmtree(expired)
        shutil.copytree(whole, expired)

        assert [Result.FAILED] == _results(expired)
        assert allowed[:allowed_count] == written
        load(expired)
    allowed_count = -1
    assert [Result.MIGRATED] == _results(expired)
    assert allowed[-1] == written[-1]


def test_artifact_that_is_missing_is_written(old: Path, load: Load) -> None:
    assert [Result.MIGRATED] == _results(old)
    document = json.loads((old / FILE_NAME).read_text())
    del document["files"][ARTIFACT]
    (old / FILE_NAME).write_text(json.dumps(document))
    (old / ARTIFACT).unlink()
    load(old)

    assert [Result.MIGRATED] == _results(old)
    assert ARTIFACT in manifest.read(old).files


def test_file_that_is_a_model_is_renewed_in_its_place(tmp_path: Path, load: Load, run: Run) -> None:
    path = Path(shutil.copy(DATA / "0.9.2" / "plain.jaxexp", tmp_path / "m.jaxexp"))
    before = run(load(path, TWO_ROWS), {"x": X})["y"]

    (outcome,) = migrate(tmp_path)

    assert (path, Result.MIGRATED) == (outcome.path, outcome.result)
    assert outcome.detail.endswith("is now 1.11.0")
    assert np.array_equal(before, run(load(path, TWO_ROWS), {"x": X})["y"])
    assert [Result.CURRENT] == _results(path)


def test_everything_in_a_repository_is_reported(old: Path, tmp_path: Path) -> None:
    """Outcomes are in order, and an invalid model does not stop the migration of others."""
    models = old.parents[1]
    broken = shutil.copytree(old, models / "broken" / "1")
    (broken / ARTIFACT).write_bytes(b"")
    (models / "ensemble" / "1").mkdir(parents=True)
    (models / "linked").symlink_to(tmp_path)
    (models / ".hidden").mkdir()
    shutil.copytree(old, models / ".hidden" / "1")

    found = list(migrate(models))

    assert [
        (models / "broken" / "1", Result.FAILED),
        (models / "ensemble" / "1", Result.SKIPPED),
        (models / "linked", Result.SKIPPED),
        (old, Result.MIGRATED),
    ] == [(outcome.path, outcome.result) for outcome in found]
    assert "model.jaxexp has 0 bytes, the manifest says" in found[0].detail
    assert "model.json is missing" == found[1].detail
    assert f"is a link to {tmp_path}" == found[2].detail


def test_path_that_is_missing_is_a_failure(tmp_path: Path) -> None:
    assert [Outcome(tmp_path / "no", Result.FAILED, "is missing")] == list(migrate(tmp_path / "no"))


def test_computation_that_changes_is_not_written(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _contents(old)
    monkeypatch.setattr(migration, "is_same", lambda left, right: False)

    (outcome,) = migrate(old)

    assert (Result.FAILED, before) == (outcome.result, _contents(old))
    assert "its computation would change when rewritten; nothing was written" in outcome.detail


def test_migrated_model_is_checked_like_any_other(old: Path, load: Load) -> None:
    assert [Result.MIGRATED] == _results(old)
    content = bytearray((old / STABLEHLO).read_bytes())
    content[-1] ^= 1
    (old / STABLEHLO).write_bytes(content)

    with pytest.raises(InvalidModel, match=r"^model\.stablehlo changed after the export"):
        load(old)
    assert computation.stablehlo_version(bytes(content))
