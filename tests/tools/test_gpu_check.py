"""What a GPU does, told by the tool that checks it, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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
