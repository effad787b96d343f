"""Memory of a model on absent devices, recorded in its manifest."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from xlaserve.artifact import manifest
from xlaserve.artifact.target_sizes import TargetSizes
from xlaserve.cli import application
from xlaserve.cli.offline import recorded
from xlaserve.errors import InvalidModel
from xlaserve.offline.targets import recording
from xlaserve.offline.targets.jobs import Compiled, Job, Problem, Reserved


class _Compilers:
    """Gives the same answer for every job; a model does not lower for a v5e."""

    def compile(self, jobs: Iterable[Job]) -> list[Compiled]:
        return [self._compiled(job) for job in jobs]

    def _compiled(self, job: Job) -> Compiled:
        if job.target == "v5e":
            return Compiled(job, problem=Problem("not implemented", "dot", "model.py:3"))
        reserved = Reserved(6000, 10, 1000, 60, {"cuda:0": 7070})
        return Compiled(job, reserved=reserved, in_flight=2)

    def __enter__(self) -> "_Compilers":
        return self

    def __exit__(self, *error: object) -> None:
        pass


@pytest.fixture
def directory(affine_directory: Path, tmp_path: Path) -> Path:
    return shutil.copytree(affine_directory, tmp_path / "affine" / "1")


def test_the_parts_are_kept_by_the_name_of_the_target(directory: Path) -> None:
    """For one execution, as replicas may be many; what was kept before stays."""
    compilers: Any = _Compilers()
    for target in ("h100", "l4"):
        recording.record(directory, [target], compilers)

    expected = TargetSizes(6000, 500, 70)
    assert {"h100": expected, "l4": expected} == dict(manifest.read(directory).sizes)
    assert 7070 == expected.on_device(1)


def test_a_model_that_does_not_lower_keeps_nothing(directory: Path) -> None:
    compilers: Any = _Compilers()
    before = (directory / "model.json").read_bytes()

    with pytest.raises(InvalidModel, match=r"on v5e: dot \(model.py:3\): not implemented"):
        recording.record(directory, ["h100", "v5e"], compilers)
    assert before == (directory / "model.json").read_bytes()


def test_export_records_what_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded, "Compilers", _Compilers)
    examples = Path(__file__).resolve().parents[3] / "examples"
    asked = ["export", f"{examples / 'simple.py'}:model", str(tmp_path / "simple")]
    done = CliRunner().invoke(application(), [*asked, "--target", "h100"])

    assert 0 == done.exit_code
    assert "h100: 6.9 KiB" in done.stdout
    assert {"h100"} == set(manifest.read(tmp_path / "simple" / "1").sizes)
