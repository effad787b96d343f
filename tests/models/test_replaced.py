"""`repo migrate` keeps replaced versions until the new one has loaded, and can restore them."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import jax.export
import numpy as np
import pytest
from support import tiny_language
from support.lasting import without_stablehlo, written_by_jax_alone
from typer.testing import CliRunner

from xlaserve.artifact import replaced
from xlaserve.authoring.migration import Result, migrate, undo
from xlaserve.cli import application
from xlaserve.model_config.text import read_config
from xlaserve.runtime import loaders
from xlaserve.runtime.load_context import LoadContext

EXAMPLE = Path(__file__).parents[2] / "examples/models/identity"


def _exported(root: Path) -> Path:
    shutil.copytree(EXAMPLE, root / "m")
    return without_stablehlo(root / "m" / "1")


def _generator(root: Path) -> Path:
    with written_by_jax_alone():
        return tiny_language.export(root / "m" / "1")


def _file(path: Path) -> Path:
    path.parent.mkdir(parents=True)
    spec = jax.ShapeDtypeStruct((1, 2), np.float32)
    exported = jax.export.export(jax.jit(lambda x: {"y": x * np.float32(3)}))(spec)
    path.write_bytes(exported.serialize())
    return path


KINDS: dict[str, Callable[[Path], Path]] = {
    "exported": _exported,
    "generator": _generator,
    "file of a version": lambda root: _file(root / "m" / "1" / "model.jaxexp"),
    "file of a repository": lambda root: _file(root / "models" / "m.jaxexp"),
}


def _contents(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    return {one.name: one.read_bytes() for one in files if one.is_file()}


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_replaced_comes_back_byte_for_byte(tmp_path: Path, kind: str) -> None:
    path = KINDS[kind](tmp_path)
    before = _contents(path)

    (done,) = migrate(tmp_path)
    after = _contents(path)
    (undone,) = undo(tmp_path)

    assert (Result.MIGRATED, Result.RESTORED) == (done.result, undone.result)
    assert ".replaced" in done.notes
    assert "until a server has loaded the new one" in done.notes
    assert before != after
    assert before == _contents(path)
    assert [] == list(undo(tmp_path))
    assert not list(tmp_path.rglob(replaced.DIRECTORY))


@pytest.mark.parametrize("kind", ["exported", "file of a version"])
def test_a_load_ends_what_is_kept(tmp_path: Path, kind: str) -> None:
    path = KINDS[kind](tmp_path)
    version = path.parent if path.is_file() else path
    list(migrate(tmp_path))
    kept = bool(list(tmp_path.rglob(replaced.DIRECTORY)))

    loaders.load(version, LoadContext(model="m", version="1", config=read_config(version.parent)))

    assert kept
    assert not list(tmp_path.rglob(replaced.DIRECTORY))
    assert [] == list(undo(tmp_path))


def test_a_load_of_something_else_removes_nothing(tmp_path: Path) -> None:
    """For example an export made after the migration, which an undo does not replace either."""
    path = _exported(tmp_path)
    list(migrate(tmp_path))
    described = json.loads((path / "model.json").read_text())
    (path / "model.json").write_text(json.dumps(described | {"exported_at": "2030"}))

    replaced.forget(path)
    (found,) = undo(tmp_path)

    assert (Result.SKIPPED, "was rewritten since and is kept") == (
        found.result,
        found.detail,
    )
    assert replaced.place_of(path).is_dir()


def test_two_migrations_in_turn_keep_the_first_state(tmp_path: Path) -> None:
    path = _exported(tmp_path)
    before = _contents(path)
    list(migrate(tmp_path))
    # Simulate a second migration by another JAX.
    renewed = tmp_path / "renewed"
    replaced.copy(path, renewed)
    described = json.loads((path / "model.json").read_text()) | {"exported_at": "2030"}
    (renewed / "model.json").unlink()
    (renewed / "model.json").write_text(json.dumps(described))
    replaced.keep(path, renewed)
    shutil.rmtree(path)
    renewed.rename(path)

    results = [outcome.result for outcome in undo(path)]

    assert [Result.RESTORED] == results
    assert before == _contents(path)


def test_what_cannot_come_back_is_said(tmp_path: Path) -> None:
    _generator(tmp_path)

    (done,) = migrate(tmp_path, dry_run=True)

    assert Result.DUE is done.result
    for name in ("decode.jaxexp", "chunk.jaxexp"):
        said = f"a migration cannot restore {name} as jax {jax.__version__} wrote it"
        assert said in done.notes
    assert not list(tmp_path.rglob(replaced.DIRECTORY))


def test_the_command_puts_back(tmp_path: Path) -> None:
    path = _exported(tmp_path)
    before = _contents(path)
    list(migrate(tmp_path))

    asked = CliRunner().invoke(
        application(), ["repo", "migrate", "--undo", "--dry-run", str(tmp_path)]
    )
    changed = _contents(path)
    done = CliRunner().invoke(application(), ["repo", "migrate", "--undo", str(tmp_path)])
    again = CliRunner().invoke(application(), ["repo", "migrate", "--undo", str(tmp_path)])

    assert "due" in asked.output
    assert before != changed
    assert "restored" in done.output
    assert before == _contents(path)
    assert f"{tmp_path}: nothing to undo\n" == again.output
