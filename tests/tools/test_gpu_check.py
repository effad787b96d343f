"""The device checking tool, run in its own process."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xlaserve
from gpu_check.command import CHECKS, checked, main
from gpu_check.device import Device, Options
from gpu_check.findings import Finding, Verdict, judged
from gpu_check.memory import check_memory
from gpu_check.overlap import check_overlap, overlap
from xlaserve.errors import OutOfMemory
from xlaserve.runtime.devices import jax_runtime
from xlaserve.runtime.devices.sites import Site
from xlaserve.runtime.exported.jax_export import JaxExportModel

TOOL = Path(__file__).resolve().parents[2] / "tools" / "gpu_check"
OPTIONS = Options((), 0.01, 64)
CPU = Device("cpu", "cpu", 1, 0)


def _run(*arguments: str, may_fail: bool = False, **environment: str) -> str:
    path = os.pathsep.join(filter(None, sys.path))
    ran = subprocess.run(
        [sys.executable, str(TOOL), *arguments],
        env=os.environ | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode <= may_fail, ran.stdout + ran.stderr[-2000:]
    return ran.stdout


@pytest.mark.slow
def test_without_a_device_it_says_why() -> None:
    """That is not a failure: most machines have no device."""
    found = _run("--device", "cuda", CUDA_VISIBLE_DEVICES="")

    assert found.startswith("no device: device 'cuda' is not available")


@pytest.mark.slow
def test_all_of_it_runs_on_the_cpu(tmp_path: Path) -> None:
    """This ensures that the check works when a device is available; it reports what a CPU lacks."""
    xlaserve.export_model(
        lambda p, x: {"y": x @ p["w"]},
        {"w": np.ones((4, 300), np.float32)},
        {"x": ("FP32", [-1, 4])},
        tmp_path / "models" / "small" / "1",
        max_batch_size=2,
    )
    repository, path = str(tmp_path / "models"), str(tmp_path / "found.json")
    table = _run(repository, "--device", "cpu", "--quick", "--json", path)
    found = json.loads((tmp_path / "found.json").read_text())
    verdicts = {(row["check"], row["subject"]): row["verdict"] for row in found["findings"]}

    assert 0 == found["verdicts"]["failed"], table
    assert {
        ("answers", "small"): "passed",
        ("batching", "small"): "measured",
        ("beside a bare loop", "small"): "measured",
        ("reserved memory", "small"): "unknown",
        ("overlap", "wide"): "measured",
        ("memory in flight", "wide"): "unknown",
        ("compilation cache", "made here"): "passed",
        ("compilation cache", "made ahead"): "passed",
        ("tuned kernels", "small"): "measured",
        ("tail beside a load", "small"): "measured",
        ("size for a mesh", "small"): "unknown",
        ("out of memory", "load"): "unknown",
        ("out of memory", "request"): "unknown",
    } == verdicts
    assert "cpu" == found["device"]["platform"]
    assert {"jax", "jaxlib", "python"} <= set(found["versions"])
    assert "compilation cache" in table


def test_what_was_found_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that is stopped has already written its earlier findings."""
    lines, whole = tmp_path / "lines.jsonl", tmp_path / "found.json"

    def stopped(device: Device, options: Options) -> Iterator[Finding]:
        yield judged("first", "m", passed=False, said="off")
        assert "first m" == json.loads(lines.read_text())["name"]
        assert "off" == json.loads(lines.read_text())["FAILED"]
        raise KeyboardInterrupt

    monkeypatch.setitem(CHECKS, "overlap", stopped)
    monkeypatch.setattr(Device, "started", lambda platform: CPU)
    with pytest.raises(KeyboardInterrupt):
        main(["--device", "cpu", "--only", "overlap", "--lines", str(lines), "--json", str(whole)])

    assert ["first"] == [row["check"] for row in json.loads(whole.read_text())["findings"]]


@pytest.fixture
def accelerated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU play an accelerator."""
    jax_runtime.start("cpu")
    monkeypatch.setattr(Site, "is_accelerator", True)


def test_overlap_is_measured_with_one_in_flight_and_with_more(accelerated: None) -> None:
    """On a CPU this does not prove overlap, only that the measurement is correct."""
    found = overlap(CPU, OPTIONS)

    assert {1, 2} == set(found.executions_per_second)
    assert all(speed > 0 for speed in found.executions_per_second.values())
    assert (4 * 64, 0) == (found.input_bytes, found.most_bytes)
    assert found.reserved_bytes > 2 * found.input_bytes


def test_no_overlap_and_too_much_memory_are_failures(
    accelerated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = dataclasses.replace(
        overlap(CPU, OPTIONS), executions_per_second={1: 10.0, 2: 10.5}, most_bytes=1 << 40
    )
    monkeypatch.setattr("gpu_check.overlap.overlap", lambda device, options: slow)

    found = list(check_overlap(dataclasses.replace(CPU, platform="cuda"), OPTIONS))

    assert [Verdict.FAILED] * 2 == [row.verdict for row in found]


def test_an_execution_that_fails_ends_the_measurement(
    accelerated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: JaxExportModel, inputs: object, **options: object) -> None:
        raise ZeroDivisionError("no")

    monkeypatch.setattr(JaxExportModel, "dispatch", fail)

    with pytest.raises(ZeroDivisionError, match="no"):
        overlap(CPU, OPTIONS)


def test_check_that_raises_is_a_failure_beside_what_it_found() -> None:
    def breaks(device: Device, options: Options) -> Iterator[Finding]:
        yield judged("first", "m", passed=True, said="fine")
        raise ZeroDivisionError("no")

    found = list(checked(breaks, "breaking", CPU, OPTIONS))

    assert [("first", Verdict.PASSED), ("breaking", Verdict.FAILED)] == [
        (row.check, row.verdict) for row in found
    ]
    assert "ZeroDivisionError: no" == found[1].said


@pytest.mark.slow
@pytest.mark.parametrize("refused", [True, False])
def test_exhaustion_has_to_be_refused_and_survived(
    monkeypatch: pytest.MonkeyPatch, example_models: Path, refused: bool
) -> None:
    """On a simulated device, which refuses a request for too much memory, or does not."""
    jax_runtime.start("cpu")
    execute = JaxExportModel.execute

    def run(self: JaxExportModel, inputs: Any, **options: Any) -> Any:
        if refused and self._model == "greedy" and not asked:
            asked.append(self)
            raise OutOfMemory("greedy", "RESOURCE_EXHAUSTED")
        return execute(self, inputs, **options)

    asked: list[JaxExportModel] = []
    load = Device.load

    def loaded(self: Device, path: Path, name: str, **options: Any) -> Any:
        loads.append(name)
        if refused and loads == ["greedy"]:
            raise OutOfMemory("greedy", "RESOURCE_EXHAUSTED")
        return load(self, path, name, **options)

    loads: list[str] = []
    monkeypatch.setattr(JaxExportModel, "execute", run)
    monkeypatch.setattr(Device, "load", loaded)
    directories = tuple(sorted(example_models.glob("digits/1")))
    played = dataclasses.replace(CPU, limit_bytes=1 << 12)
    found = list(check_memory(played, dataclasses.replace(OPTIONS, directories=directories)))

    expected = Verdict.PASSED if refused else Verdict.FAILED
    assert [expected, expected, Verdict.PASSED] == [row.verdict for row in found]


# --- on a device -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_device(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The tool's findings on the GPU of this machine."""
    path = tmp_path_factory.mktemp("found") / "found.json"
    text = _run("--device", "cuda", "--json", str(path), may_fail=True)
    if text.startswith("no device"):
        pytest.skip(text.strip())
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.gpu
@pytest.mark.parametrize(
    "check",
    [
        "answers",
        "beside a bare loop",
        "reserved memory",
        "overlap",
        "memory in flight",
        "compilation cache",
        "size for a mesh",
        "out of memory",
    ],
)
@pytest.mark.slow
def test_gpu_passes(on_device: dict[str, Any], check: str) -> None:
    rows = [row for row in on_device["findings"] if row["check"] == check]

    assert rows
    assert [] == [row for row in rows if row["verdict"] != "passed"]


@pytest.mark.gpu
@pytest.mark.slow
def test_gpu_breaks_nothing(on_device: dict[str, Any]) -> None:
    assert 0 == on_device["verdicts"]["failed"]
