"""Command line: runs the chosen steps, each in a separate process with a time limit."""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from device import asked, hard, here, making
from device.findings import Findings, summary
from device.place import Place

Step = Callable[[Place, Findings], None]

STEPS: dict[str, Step] = {
    **{step.__name__: step for step in (here.env, here.sizes, here.answers, here.speed)},
    **{step.__name__: step for step in (asked.serve, asked.precision, asked.sequences)},
    **{step.__name__: step for step in (asked.served_speed, asked.generate, asked.weights)},
    **{step.__name__: step for step in (asked.churn, asked.preallocation, asked.ahead)},
    **{step.__name__: step for step in (hard.oom, hard.lost, hard.shm)},
}
"""Steps by name. To add one, write a function and name it here."""

CHECKS = ("models", "overlap", "cached", "serving", "memory")
"""Checks of gpu_check that are steps, too, such as `check_models`."""

RUNS: dict[str, tuple[int, dict[str, int]]] = {
    "smoke": (150, {"env": 60, "serve": 100, "sizes": 60, "shm": 40}),
    "full": (
        560,
        {
            "env": 40, "serve": 70, "sizes": 80, "answers": 60, "speed": 70, "generate": 130,
            "served_speed": 70, "shm": 25, "sequences": 40, "precision": 40, "oom": 50,
            "check_overlap": 40, "check_cached": 80, "weights": 90, "ahead": 60, "churn": 60,
            "preallocation": 40, "lost": 40, "check_memory": 60, "check_serving": 80,
            "check_models": 120,
        },
    ),
}  # fmt: skip
"""Time limits in seconds: of a whole run, and of each step, the most valuable step first."""

_STEP_SECONDS = 150
_LEAST_SECONDS = 15
_QUICK_TIMES = 10
"""Factor for all limits on a machine whose cores are shared."""
_NEEDS_MODELS = frozenset(
    {"sizes", "answers", "speed", "generate", "weights", "served_speed", "sequences", "oom"}
)
_IN_PROCESS = frozenset({"env", "sizes", "answers", "speed", "lost"})
"""Steps that use the device in their own process; the others send requests to a server."""
_MAKERS = 8


def main(arguments: Sequence[str] | None = None) -> int:
    """Run steps; return 1 if one failed. Each finding is written to results.jsonl immediately."""
    parsed = _parser().parse_args(arguments)
    if parsed.steps and parsed.steps[0].startswith("make:"):
        making.make(Place.here(), parsed.steps[0].removeprefix("make:"))
        return 0
    if parsed.inner:
        return _step(Place.here(), parsed.steps[0])
    return _run(parsed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="device", description="Check a device: smoke in 150 s, full in 560 s, or some steps."
    )
    known = ", ".join((*RUNS, *STEPS, *(f"check_{name}" for name in CHECKS)))
    parser.add_argument("steps", nargs="*", help=f"some of {known}; full without any")
    parser.add_argument("--device", choices=("cuda", "tpu", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="small models, and no time for speeds")
    parser.add_argument("--out", type=Path, default=Path("device-check"), help="for what is found")
    parser.add_argument("--work", type=Path, help="for models and caches; a new one by default")
    parser.add_argument("--seconds", type=int, default=0, help="of the whole run")
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    return parser


@dataclass(frozen=True, slots=True)
class _Plan:
    seconds: int
    limits: dict[str, int]

    @classmethod
    def of(cls, names: Sequence[str], seconds: int, *, quick: bool) -> "_Plan":
        whole, limits = RUNS[names[0]] if names and names[0] in RUNS else RUNS["full"]
        if names and names[0] not in RUNS:
            limits = dict.fromkeys(names, _STEP_SECONDS)
        if unknown := [name for name in limits if not _is_step(name)]:
            raise SystemExit(f"no step is called {', '.join(unknown)}")
        times = _QUICK_TIMES if quick else 1
        limits = {name: times * limit for name, limit in limits.items()}
        return cls(seconds or times * whole, limits)


def _is_step(name: str) -> bool:
    return name in STEPS or name.removeprefix("check_") in CHECKS


def _run(parsed: argparse.Namespace) -> int:
    plan = _Plan.of(parsed.steps, parsed.seconds, quick=parsed.quick)
    work = parsed.work or Path(tempfile.mkdtemp(prefix="device-check-"))
    for folder in (work, parsed.out):
        folder.mkdir(parents=True, exist_ok=True)
    place = Place(
        parsed.device, str(parsed.out.absolute()), str(work.absolute()), quick=parsed.quick,
        smoke=parsed.steps[:1] == ["smoke"],
    )  # fmt: skip
    findings = place.findings("run")
    before = len(findings.rows())
    makers = None
    if not place.quick and not place.smoke and _NEEDS_MODELS & set(plan.limits):
        makers = subprocess.Popen(
            [*_command(), "prepare", "--inner"],
            env=_environment(place, is_inside=False),
            start_new_session=True,
        )
    began = time.monotonic()
    try:
        for name, limit in plan.limits.items():
            left = plan.seconds - (time.monotonic() - began)
            if left < min(_LEAST_SECONDS, limit):
                findings.add(name, rc=125, seconds=0, said="no time was left for it")
                continue
            _one(place, findings, name, min(limit, left))
    finally:
        if makers is not None:
            _end(makers)
    rows = findings.rows()[before:]
    lines = list(summary(rows))
    (parsed.out / "summary.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return int(any(line.startswith("!!") for line in lines))


def _command() -> list[str]:
    return [sys.executable, str(Path(__file__).parent)]


def _one(place: Place, findings: Findings, name: str, limit: float) -> None:
    """Run one step until it ends or reaches its limit, then stop all processes it started."""
    began = time.monotonic()
    if name.startswith("check_"):
        command = [sys.executable, str(Path(__file__).parents[1] / "gpu_check")]
        command += ["--device", place.device, "--only", name.removeprefix("check_")]
        command += ["--lines", str(Path(place.out) / "results.jsonl")]
        command += ["--quick"] if place.quick else []
    else:
        command = [*_command(), name, "--inner"]
    with (Path(place.out) / "log.txt").open("a") as log:
        log.write(f"=== {name}, at most {limit:.0f} s\n")
        log.flush()
        process = subprocess.Popen(
            command, stdout=log, stderr=log, start_new_session=True,
            env=_environment(place, is_inside=name in _IN_PROCESS or name.startswith("check_")),
        )  # fmt: skip
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = 124
        finally:
            _end(process)
    findings.add(name, rc=code, seconds=round(time.monotonic() - began, 1))


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and its children."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except (ProcessLookupError, PermissionError):
            process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            continue
        break


def _environment(place: Place, *, is_inside: bool) -> dict[str, str]:
    """Return the environment of a step, which may keep JAX on the CPU."""
    from xlaserve.settings import Settings

    root = Path(__file__).resolve().parents[2]
    paths = [str(root / name) for name in ("server", "generated", "tests", "tools")]
    inherited = os.environ.get("PYTHONPATH", "")
    fraction = str(Settings.__dataclass_fields__["gpu_memory_fraction"].default)
    found = place.environment | {"PYTHONPATH": os.pathsep.join(filter(None, (*paths, inherited)))}
    if not is_inside:
        return found | {"JAX_PLATFORMS": "cpu"}
    # gpu_check and these steps start JAX themselves, which by default would take 75 % of the
    # memory.
    found.setdefault("XLA_CLIENT_MEM_FRACTION", fraction)
    return found


def _step(place: Place, name: str) -> int:
    findings = place.findings(name)
    if name == "prepare":
        _prepare(place)
        return 0
    with findings.part(f"step {name}"):
        STEPS[name](place, findings)
    return 0


def _prepare(place: Place) -> None:
    """Make all models, several at a time."""
    names = list(making.MAKERS)
    running: dict[str, subprocess.Popen[bytes]] = {}
    while names or running:
        while names and len(running) < _MAKERS:
            name = names.pop(0)
            running[name] = subprocess.Popen(
                [*_command(), f"make:{name}"], env=place.environment | {"JAX_PLATFORMS": "cpu"}
            )
        time.sleep(0.2)
        running = {name: one for name, one in running.items() if one.poll() is None}
