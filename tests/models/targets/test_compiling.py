"""Compiler processes for other targets: a real one for the CPU, and fakes."""

import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from xlaserve.errors import DeviceUnavailable
from xlaserve.offline.targets.compiling import Compilers
from xlaserve.offline.targets.jobs import Compiled, Job
from xlaserve.runtime.devices import plugins
from xlaserve.runtime.loaded import LoadedModel

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def compilers() -> Iterator[Compilers]:
    with Compilers(most=1) as running:
        yield running


@pytest.fixture(scope="module")
def compiled(compilers: Compilers, affine_directory: Path) -> Compiled:
    """Return the affine model, compiled for the CPU by another process."""
    (found,) = compilers.compile([Job("affine", str(affine_directory), "cpu")])
    return found


def test_what_is_planned_is_what_a_load_reserves(
    compiled: Compiled, affine_model: LoadedModel
) -> None:
    """They are equal to the byte: a plan runs the code of a load."""
    memory = affine_model.info.memory
    reserved = compiled.reserved

    assert None is compiled.problem
    assert reserved is not None
    assert dict(memory.per_device) == reserved.per_device
    assert (
        memory.parameters_bytes,
        memory.constants_bytes,
        memory.temporaries_bytes,
        memory.executables_bytes,
    ) == (
        reserved.parameters_bytes,
        reserved.constants_bytes,
        reserved.temporaries_bytes,
        reserved.executables_bytes,
    )


def test_every_batch_size_has_a_program_with_its_sizes(
    compiled: Compiled, affine_model: LoadedModel
) -> None:
    """One row of 4 numbers is the input, one of 300 the output."""
    programs = {program.rows: program for program in compiled.programs}
    parameters = compiled.parameters_bytes

    assert [bucket.rows for bucket in affine_model.info.buckets] == list(programs)
    assert {rows: 4 * 4 * rows for rows in programs} == {
        rows: one.footprint.arguments_bytes - parameters for rows, one in programs.items()
    }
    assert 4 * 300 * 6 == programs[6].footprint.outputs_bytes
    assert all(program.compile_seconds > 0 for program in compiled.programs)


def test_devices_that_are_not_there_have_copies_each(
    compilers: Compilers, affine_directory: Path
) -> None:
    job = Job(
        "affine", str(affine_directory), "cpu", 2, parameters={"devices": "all", "batch_sizes": "6"}
    )
    (found,) = compilers.compile([job])

    assert found.reserved is not None
    assert ["cpu:0", "cpu:1"] == sorted(found.reserved.per_device)
    assert ["cpu:0", "cpu:1"] == [program.device for program in found.programs]


def test_what_was_compiled_once_is_known(
    compilers: Compilers, affine_directory: Path, tmp_path: Path
) -> None:
    job = Job(
        "affine",
        str(affine_directory),
        "cpu",
        parameters={"batch_sizes": "1,6"},
        cache_directory=str(tmp_path),
    )
    first, again = (compilers.compile([job])[0] for _ in range(2))

    assert all(program.compile_seconds > 0 for program in first.programs)
    assert [replace(program, compile_seconds=0.0) for program in first.programs] == list(
        again.programs
    )
    assert first.reserved == again.reserved


def test_a_model_is_to_blame_for_what_is_wrong_with_it(
    compilers: Compilers, affine_directory: Path, tmp_path: Path
) -> None:
    (tmp_path / "onnx").mkdir()
    (tmp_path / "onnx/model.onnx").write_bytes(b"")
    jobs = [
        Job("none", str(tmp_path), "cpu"),
        Job("onnx", str(tmp_path / "onnx"), "cpu"),
        Job("affine", str(affine_directory), "cpu", parameters={"batch_sizes": "7"}),
        Job("affine", str(affine_directory), "cpu", parameters={"batch_sizes": "6"}),
    ]
    problems = [done.problem for done in compilers.compile(jobs)]

    assert [
        "model.json is missing",
        "ONNX and .pt2 files are converted at their first load: to compile ahead, use `xlaserve"
        " import` first",
        "batch_sizes: expected 1 to 6, got 7",
        None,
    ] == [problem and str(problem).split(" '")[0] for problem in problems]


def test_more_devices_than_a_host_has_are_refused(
    compilers: Compilers, affine_directory: Path
) -> None:
    with pytest.raises(DeviceUnavailable, match="expected 1, 2, 4, 8 devices, got 5"):
        compilers.compile([Job("affine", str(affine_directory), "cpu", 5)])


def test_missing_wheels_are_found_before_anything_is_compiled(
    compilers: Compilers, affine_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins, "version", lambda name: "")

    with pytest.raises(DeviceUnavailable, match=r"pip install 'xlaserve\[tpu\]'"):
        compilers.compile([Job("affine", str(affine_directory), "v5e")])


# # --- process exits and hangs -------------------------------------------------------------------

_DIES = """
import os, sys
for line in sys.stdin:
    if "deadly" in line:
        print("F0000 no such register", file=sys.stderr, flush=True)
        os.abort()
    print('{"job": %s}' % line.strip(), flush=True)
"""
_HANGS = "import sys, time; sys.stdin.readline(); time.sleep(60)"


def _fake(script: str, **options: Any) -> Compilers:
    return Compilers(most=1, command=[sys.executable, "-c", script], **options)


def test_a_compiler_that_dies_takes_one_model_with_it() -> None:
    with _fake(_DIES) as compilers:
        found = compilers.compile([Job(name, "", "cpu") for name in ("good", "deadly", "other")])

    assert [
        None,
        "its compilation ended the compiler process (SIGABRT): F0000 no such register",
        None,
    ] == [done.problem and done.problem.reason for done in found]


def test_a_compiler_that_does_not_end_is_ended() -> None:
    with _fake(_HANGS, seconds=0.2) as compilers:
        (found,) = compilers.compile([Job("slow", "", "cpu")])

    assert found.problem is not None
    assert "its compilation did not end in 0.2 seconds" == found.problem.reason


def test_a_command_that_is_called_off_leaves_no_process_behind() -> None:
    """The block ends while a job runs: its process is killed, and the job fails accordingly."""
    found: list[Compiled] = []
    compilers = _fake(_HANGS)
    asking = Thread(target=lambda: found.extend(compilers.compile([Job("slow", "", "cpu")])))
    with compilers:
        asking.start()
        while not (compilers._lanes and (process := compilers._lanes[0]._process)):
            time.sleep(0.001)
    asking.join()

    assert -signal.SIGKILL == process._process.returncode
    assert found[0].problem is not None
    assert "(SIGKILL)" in found[0].problem.reason
