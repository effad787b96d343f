"""`xlaserve repo`, as a user runs it."""

import shutil
from pathlib import Path

from support.lasting import without_stablehlo
from typer.testing import CliRunner, Result

from xlaserve.artifact import manifest
from xlaserve.cli.repo.group import repo


def _migrate(*arguments: object) -> Result:
    return CliRunner().invoke(repo(), ["migrate", *map(str, arguments)])


def _rows(result: Result) -> dict[str, str]:
    cells = [line.split("│") for line in result.stdout.splitlines() if "│" in line]
    return {row[1].strip(): row[2].strip() for row in cells}


def test_migrate_makes_models_last_and_reports_each_version(
    example_models: Path, tmp_path: Path
) -> None:
    models = shutil.copytree(example_models, tmp_path / "models")
    old = without_stablehlo(models / "identity" / "1")

    asked = _migrate(models, "--dry-run")
    assert manifest.read(old).durable is None
    done = _migrate(models)

    assert (0, 0) == (asked.exit_code, done.exit_code)
    current = dict.fromkeys(("digits/1", "mlp/1", "simple/1"), "current")
    assert current | {"identity/1": "due"} == {k: v for k, v in _rows(asked).items() if k}
    assert current | {"identity/1": "migrated"} == {k: v for k, v in _rows(done).items() if k}
    assert manifest.read(old).durable is not None


def test_failure_is_in_the_table_and_an_exit_status(tmp_path: Path) -> None:
    found = _migrate(tmp_path / "nowhere")

    assert 1 == found.exit_code
    assert ["failed"] == [state for state in _rows(found).values() if state]


def test_directory_without_models_is_said_to_be_one(tmp_path: Path) -> None:
    found = _migrate(tmp_path)

    assert (0, f"{tmp_path}: no models\n") == (found.exit_code, found.stdout)
