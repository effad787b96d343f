"""The device check: its findings are kept and judged, and all of it also runs on a CPU."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from device import command
from device.findings import FAILED, Findings, summary
from device.place import Place
from gpu_check.tolerances import allowed, far, off

TOOL = Path(__file__).resolve().parents[2] / "tools" / "device"
EVERY_STEP = (*command.STEPS, *(f"check_{name}" for name in command.CHECKS))


def _run(out: Path, *arguments: str) -> str:
    path = os.pathsep.join(filter(None, sys.path))
    ran = subprocess.run(
        [sys.executable, str(TOOL), *arguments, "--device", "cpu", "--quick", "--out", str(out)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == ran.returncode, ran.stdout[-2000:] + ran.stderr[-2000:]
    return ran.stdout


def test_a_step_runs_in_a_process_and_leaves_what_it_found(tmp_path: Path) -> None:
    said = _run(tmp_path, "shm")
    rows = Findings(tmp_path / "results.jsonl").rows()

    assert {("shm", "cuda shared memory"), ("run", "shm")} <= {
        (row["step"], row["name"]) for row in rows
    }
    assert "skipped=no GPU" in said
    assert said.endswith((tmp_path / "summary.txt").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("step", EVERY_STEP)
def test_every_step_runs_on_the_cpu(tmp_path: Path, step: str) -> None:
    """This ensures that the whole check works when a device is available."""
    _run(tmp_path, step)
    rows = Findings(tmp_path / "results.jsonl").rows()

    assert any(step == row["step"] for row in rows)
    assert [] == [row for row in rows if FAILED in row]


def test_runs_are_made_of_steps_that_there_are() -> None:
    for seconds, limits in command.RUNS.values():
        assert set(limits) <= set(EVERY_STEP)
        assert max(limits.values()) <= seconds
    assert set(EVERY_STEP) == set(command.RUNS["full"][1])
    with pytest.raises(SystemExit, match="no step is called nothing"):
        command.main(["nothing"])


def test_only_what_has_a_test_for_a_gpu_is_collected_for_one(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A GPU machine borrowed for minutes lacks the packages for the other tests."""
    (ignores,) = (
        plugin.pytest_ignore_collect
        for plugin in request.config.pluginmanager.get_plugins()
        if getattr(plugin, "__file__", "") == str(TOOL.parents[1] / "tests" / "conftest.py")
    )
    for name in ("some/test_one.py", "some/test_gpu.py", "other/test_two.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("@pytest." + f"mark.{'gpu' if 'gpu' in name else 'slow'}")

    def ignored(expression: str) -> list[str]:
        config = SimpleNamespace(option=SimpleNamespace(markexpr=expression))
        paths = sorted(tmp_path.rglob("*"))
        return [one.name for one in paths if ignores(collection_path=one, config=config)]

    assert ["other", "test_two.py", "test_one.py"] == ignored("gpu")
    assert [] == ignored("not slow") == ignored("") == ignored("gpu or slow")


@pytest.mark.slow
def test_a_step_that_hangs_is_ended_and_its_findings_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place("cpu", str(tmp_path), str(tmp_path), quick=True)
    findings = place.findings("run")
    script = f'echo \'{{"step": "hangs", "name": "early"}}\' >> {tmp_path}/results.jsonl; sleep 600'
    monkeypatch.setattr(command, "_command", lambda: ["sh", "-c", script])

    began = time.monotonic()
    command._one(place, findings, "hangs", 5)

    assert time.monotonic() - began < 300
    assert ["early", "hangs"] == [row["name"] for row in findings.rows()]
    assert 124 == findings.rows()[-1]["rc"]
    assert any(line.startswith("!! run hangs") for line in summary(findings.rows()))


def test_what_no_step_had_time_for_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_one", lambda *given: None)
    monkeypatch.setattr(command, "_LEAST_SECONDS", 1 << 20)

    out = ["--out", str(tmp_path), "--work", str(tmp_path)]
    assert 1 == command.main(["shm", "churn", "--quick", "--device", "cpu", "--seconds", "1", *out])

    rows = Findings(tmp_path / "results.jsonl").rows()
    assert [("shm", 125), ("churn", 125)] == [(row["name"], row["rc"]) for row in rows]


def test_what_raises_within_a_step_is_one_finding_and_the_rest_goes_on(tmp_path: Path) -> None:
    findings = Findings(tmp_path / "results.jsonl", "s")

    with findings.part("first"):
        raise ZeroDivisionError("no")
    findings.add("second", value=1)
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"step": "s", "name": "cut o')

    names = [row["name"] for row in findings.rows()]
    assert ["first", "first took", "second"] == names
    assert "ZeroDivisionError: no" == findings.rows()[0][FAILED]
    assert 1 == findings.earlier("s", "second")["value"]
    assert {} == findings.earlier("t", "second")


@pytest.mark.parametrize(
    ("values", "fails"),
    [
        ({"relative": 2e-3, "at_most": 1e-2}, False),
        ({"relative": 2e-2, "at_most": 1e-2}, True),
        ({"relative": float("nan"), "at_most": 1e-2}, True),
        ({"relative": 0.0, "at_most": 0.0}, False),
        ({"left": 0}, False),
        ({"left": None}, False),
        ({"left": 512}, True),
        ({"left": -512}, True),
        ({"same": False}, True),
        ({"refused": False}, True),
        ({"refused": None}, False),
        ({"seconds": 1e9}, False),
    ],
)
def test_a_value_that_may_not_be_fails(
    tmp_path: Path, values: dict[str, Any], *, fails: bool
) -> None:
    row = Findings(tmp_path / "results.jsonl", "s").add("n", **values)

    assert fails == (FAILED in row)
    assert fails == any(line.startswith("!!") for line in summary([row]))


def _product(dtype: Any) -> tuple[Any, Any]:
    """Return a product in FP32, and as a device with rounded operands computes it."""
    random = np.random.default_rng(0)
    a, b = (random.standard_normal((256, 256)).astype(np.float32) for _ in range(2))
    return a @ b, a.astype(dtype).astype(np.float32) @ b.astype(dtype).astype(np.float32)


def _tf32(array: Any) -> Any:
    return ((array.view(np.uint32) + 0x1000) & 0xFFFFE000).view(np.float32)


def test_tf32_is_allowed_in_fp32_and_bf16_is_not() -> None:
    random = np.random.default_rng(0)
    a, b = (random.standard_normal((256, 256)).astype(np.float32) for _ in range(2))
    exact, rounded = a @ b, _tf32(a) @ _tf32(b)
    exact16, rounded16 = _product(ml_dtypes.bfloat16)

    assert 1e-5 < far(rounded, exact)
    assert off(rounded, exact) < 1 < off(rounded16, exact16)


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_what_is_allowed_follows_the_largest_number(scale: float) -> None:
    expected = np.array([1.0, 1e-6], np.float32) * np.float32(scale)
    near = expected + np.float32(1e-4 * scale)

    assert pytest.approx(1e-4, rel=1e-2) == far(near, expected)
    assert off(near, expected) < 1 < off(expected * np.float32(1.01), expected)


def test_integers_are_the_same_and_infinities_too() -> None:
    one = np.array([1, 2], np.int32)
    wild = np.array([np.inf, np.nan, 1], np.float32)

    assert 0 == allowed(np.int32) == allowed(np.bool_) == off(one, one)
    assert np.inf == off(one + 1, one) == off(one, one[:1])
    assert 0 == off(wild, wild)
    assert np.inf == off(np.zeros(3, np.float32), wild)
    assert np.inf == off(wild, np.zeros(3, np.float32))
    assert allowed(np.float64) < allowed(np.float32) < allowed(np.float16)
    assert allowed(np.float16) < allowed(ml_dtypes.bfloat16)
    assert 2 * allowed(np.float32) == allowed(np.float32, 4)
