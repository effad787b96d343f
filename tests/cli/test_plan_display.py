"""Terminal output of a plan."""

from pathlib import Path

from rich.console import Console

from xlaserve.cli.offline import plan_display
from xlaserve.offline.device_plan import DevicePlan, PlannedLoad, PlannedVersion
from xlaserve.offline.targets.jobs import Compiled, CompiledProgram, Job, Problem, Reserved
from xlaserve.runtime.devices.target_kinds import named
from xlaserve.runtime.programs.footprint import Footprint

MB = 1 << 20


def _version(name: str, megabytes: int) -> PlannedVersion:
    job = Job(name, "/models/1", "h100")
    footprint = Footprint(
        parameters_bytes=megabytes * MB,
        arguments_bytes=megabytes * MB,
        outputs_bytes=2 * MB,
        temporaries_bytes=3 * MB,
        code_bytes=MB,
    )
    program = CompiledProgram("k", "cuda:0", 8, (), footprint, 1.5)
    held = {"cuda:0": (megabytes + 11) * MB}
    reserved = Reserved(megabytes * MB, 0, 10 * MB, MB, held)
    compiled = Compiled(job, (program,), reserved, 8, 2, megabytes * MB, {"jax": "0.12.0"})
    return PlannedVersion(name, "1", compiled, {"cuda:0": 7 * MB})


def _broken(name: str, problem: Problem) -> PlannedVersion:
    return PlannedVersion(name, "1", Compiled(Job(name, "", "h100"), problem=problem), {})


def _shown(plan: DevicePlan, tmp_path: Path) -> str:
    with (tmp_path / "shown").open("w+") as file:
        plan_display.show(Console(file=file, width=120), plan)
        file.seek(0)
        return file.read()


def test_a_program_takes_parameters_what_is_in_flight_and_code(tmp_path: Path) -> None:
    plan = DevicePlan(named("h100"), 1, 100 * MB, (_version("a", 20),))
    shown = _shown(plan, tmp_path)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines()]

    assert "h100: 79.1 GiB each, 100 MiB of it for models" in shown
    assert "2 x" in shown
    assert ["a", "1", "8", "20 MiB", "10 MiB", "1 MiB", "31 MiB", "1.5 s"] in rows
    assert ["a", "1", "20 MiB", "10 MiB", "1 MiB", "31 MiB", "7 MiB", "does not load"] in rows


def test_what_does_not_fit_together_is_said_by_name(tmp_path: Path) -> None:
    refused = PlannedLoad("c", "1", refused="it needs too much")
    plan = DevicePlan(
        named("h100"),
        2,
        100 * MB,
        tuple(_version(name, 60) for name in "abc"),
        loads=(PlannedLoad("a", "1"), PlannedLoad("b", "1", ("a/1",)), refused),
        resident=("b/1",),
        mesh_problem="too little",
    )
    shown = _shown(plan, tmp_path)

    assert "2 x h100" in shown
    assert "b/1 evicts a/1" in shown
    assert "c/1 does not fit: it needs too much" in shown
    assert (
        "Not all models fit together. Loads in order of name, with --evict; without it, loads"
        " that would evict others are refused." in shown
    )
    assert "Evicted first to last: b/1" in shown
    assert "ModelMesh: too little" in shown


def test_what_does_not_lower_names_the_operation_and_the_line(tmp_path: Path) -> None:
    broken = _broken("a", Problem("not implemented", "lapack_sgees_ffi", "model.py:12"))
    plan = DevicePlan(
        named("h100"),
        1,
        100 * MB,
        (broken,),
        unreadable={"b\n": "no model"},
        ensembles=("both",),
        mesh_capacity_bytes=90 * MB,
    )
    shown = _shown(plan, tmp_path)

    assert "a/1 does not load: lapack_sgees_ffi (model.py:12): not implemented" in shown
    assert "b\\n: no model" in shown
    assert "Ensembles use the memory of their steps: both" in shown
    assert "Reported to ModelMesh: 90 MiB (runtimeStatus)." in shown
