"""Planning models for hardware that is absent, with a fake compiler."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from xlaserve.offline.device_plan import DevicePlan, DevicePlanner
from xlaserve.offline.targets.jobs import Compiled, CompiledProgram, Job, Problem, Reserved
from xlaserve.residence.repository.repository import Repository
from xlaserve.runtime import loaders
from xlaserve.runtime.devices.target_kinds import named
from xlaserve.runtime.programs.footprint import Footprint
from xlaserve.settings import Settings

MIB = 1 << 20


class _Compilers:
    """Fake compiler: gives each model the size set by the test in MiB, or a problem as text."""

    def __init__(self, sizes: Mapping[str, int | str]) -> None:
        self.sizes = sizes
        self.jobs: list[Job] = []

    def compile(self, jobs: Iterable[Job], on_done: Callable[[Compiled], None]) -> list[Compiled]:
        self.jobs = list(jobs)
        return [self._compiled(job) for job in self.jobs]

    def _compiled(self, job: Job) -> Compiled:
        size = self.sizes[job.model]
        if isinstance(size, str):
            return Compiled(job, problem=Problem(size))
        devices = {f"cuda:{index}": size * MIB for index in range(job.count)}
        program = CompiledProgram("k", "cuda:0", 1, (), Footprint(), 0.0)
        return Compiled(job, (program,), Reserved(size * MIB, 0, 0, 0, devices))


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., DevicePlan]:
    """Plan models of these sizes for an H100 with 100 MiB of model memory."""

    def make(sizes: Mapping[str, int | str], predicted: int = 0, **settings: Any) -> DevicePlan:
        for name in sizes:
            (tmp_path / name / "1").mkdir(parents=True)
        monkeypatch.setattr(
            loaders,
            "predict_size",
            lambda path, config, devices, roots: dict.fromkeys(devices.names, predicted * MIB),
        )
        said: dict[str, Any] = {"capacity_bytes": 100 * MIB, **settings}
        read = Settings(repository=tmp_path, **said)
        repository = Repository(tmp_path, max_models=100, max_config_bytes=MIB)
        compilers: Any = _Compilers(sizes)
        return DevicePlanner(read, repository, compilers).plan(named("h100"))

    return make


def test_models_that_fit_together_are_all_loaded(plan: Callable[..., DevicePlan]) -> None:
    made = plan({"a": 40, "b": 60})

    assert made.fits_together
    assert ("a/1", "b/1") == made.resident


def test_what_was_loaded_first_goes_first(plan: Callable[..., DevicePlan]) -> None:
    made = plan({"a": 40, "b": 30, "c": 60, "d": 35})

    assert not made.fits_together
    assert [(), (), ("a/1",), ("b/1",)] == [load.evicted for load in made.loads]
    assert ("c/1", "d/1") == made.resident


def test_what_is_larger_than_a_device_is_refused_and_evicts_nothing(
    plan: Callable[..., DevicePlan],
) -> None:
    made = plan({"a": 40, "b": 101})

    assert [(), ()] == [load.evicted for load in made.loads]
    assert "it needs 105906176 bytes on cuda:0" in made.loads[1].refused
    assert ("a/1",) == made.resident


@pytest.mark.parametrize(("size", "together"), [(10, True), (20, False)])
def test_a_load_reserves_what_is_predicted_until_it_is_done(
    plan: Callable[..., DevicePlan], size: int, together: bool
) -> None:
    """The second load finds the memory that the first model holds, less than its load reserved."""
    made = plan({"a": size, "b": size}, predicted=85)

    assert together is made.fits_together
    assert {85 * MIB} == {one.predicted_bytes for one in made.versions}


def test_what_does_not_compile_is_not_loaded(plan: Callable[..., DevicePlan]) -> None:
    made = plan({"a": 40, "b": "no kernel"})

    assert ["a"] == [load.name for load in made.loads]
    assert made.fits_together
    assert "no kernel" == str(made.versions[1].compiled.problem)


def test_what_is_no_model_is_said_to_be_none(
    plan: Callable[..., DevicePlan], tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    made = plan({"a": 1})

    assert "no version directory" in made.unreadable["empty"]


def test_a_mesh_is_told_of_less_than_there_is(plan: Callable[..., DevicePlan]) -> None:
    """Large loads reduce it by a quarter at most: a load is predicted before it is measured."""
    small = plan({"a": 1}, capacity_bytes=1000 * MIB, default_model_size_bytes=MIB)

    assert 950 * MIB == small.mesh_capacity_bytes


def test_too_little_for_a_mesh_is_said(plan: Callable[..., DevicePlan]) -> None:
    made = plan({"a": 1}, capacity_bytes=MIB)

    assert 0 == made.mesh_capacity_bytes
    assert (
        "of model memory, which ModelMesh requires for a default_model_size_bytes of"
        in made.mesh_problem
    )


def test_a_gpu_has_less_for_models_than_it_has(plan: Callable[..., DevicePlan]) -> None:
    """XLA reserves a part of it, and an overhead is subtracted."""
    made = plan({"a": 1}, capacity_bytes=0)

    assert int(0.9 * named("h100").memory_bytes) - (300 << 20) == made.capacity_bytes
