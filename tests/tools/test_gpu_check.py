"""What a GPU does, told by the tool that checks it, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gpu_check
from xlaserve.models import jax_runtime
from xlaserve.models.jax_export import JaxExportModel
from xlaserve.models.sites import Site

TOOL = Path(__file__).resolve().parents[2] / "tools" / "gpu_check.py"


def _run(*arguments: str, **environment: str) -> str:
    path = os.pathsep.join(filter(None, sys.path))
    ran = subprocess.run(
        [sys.executable, str(TOOL), *arguments],
        env=os.environ | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout


def test_without_a_gpu_it_says_why() -> None:
    """That is no failure: most machines have none."""
    assert _run(CUDA_VISIBLE_DEVICES="").startswith("no GPU: device 'cuda' is not available")


@pytest.fixture
def accelerated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU play an accelerator."""
    jax_runtime.start("cpu")
    monkeypatch.setattr(Site, "is_accelerator", True)


def test_overlap_is_measured_with_one_in_flight_and_with_more(accelerated: None) -> None:
    """On the CPU that proves no overlap, only that what is measured is what it says."""
    found = gpu_check.overlap("cpu", columns=64, seconds=0.01)

    assert {1, 2} == set(found.executions_per_second)
    assert all(speed > 0 for speed in found.executions_per_second.values())
    assert (4 * 64, 0) == (found.input_bytes, found.most_bytes)
    assert found.booked_bytes > 2 * found.input_bytes
    assert "/s with 1 in flight, " in gpu_check.shown(found)


def test_an_execution_that_fails_ends_the_measurement(
    accelerated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: JaxExportModel, inputs: object, **options: object) -> None:
        raise ZeroDivisionError("no")

    monkeypatch.setattr(JaxExportModel, "dispatch", fail)

    with pytest.raises(ZeroDivisionError, match="no"):
        gpu_check.overlap("cpu", columns=64, seconds=0.01)


@pytest.fixture(scope="module")
def checked() -> dict[str, Any]:
    """What the tool found on the GPU of this machine."""
    text = _run("--json")
    if text.startswith("no GPU"):
        pytest.skip(text.strip())
    found: dict[str, Any] = json.loads(text)
    return found


@pytest.mark.gpu
def test_gpu_answers_as_the_cpu_does(checked: dict[str, Any]) -> None:
    assert all(one["worst_difference"] < 1e-2 for one in checked["models"])


@pytest.mark.gpu
def test_gpu_gives_memory_back(checked: dict[str, Any]) -> None:
    assert [0] * len(checked["models"]) == [one["left_bytes"] for one in checked["models"]]


@pytest.mark.gpu
def test_gpu_out_of_memory_is_refused_and_survived(checked: dict[str, Any]) -> None:
    assert checked["out_of_memory"].startswith("model 'greedy': out of memory")
    assert checked["models"][0]["model"] == checked["models"][-1]["model"]


@pytest.mark.gpu
def test_gpu_holds_no_more_than_is_booked_with_all_in_flight(checked: dict[str, Any]) -> None:
    overlap = checked["overlap"]

    assert overlap["most_bytes"] <= overlap["booked_bytes"]


@pytest.mark.gpu
def test_gpu_copies_while_it_computes(checked: dict[str, Any]) -> None:
    """More in flight are no slower; how much quicker they are is for who reads the figures."""
    speeds = checked["overlap"]["executions_per_second"]

    assert speeds["2"] > 0.9 * speeds["1"]
