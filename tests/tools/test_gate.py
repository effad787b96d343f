"""How the gate handles a step that fails, hangs, or leaves processes behind."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import gate

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")

HUNG = "HUNG"
"""Environment variable that names a file; a step that hangs creates it."""
DRIVER = """
import os, subprocess, sys, time
from gate import Gate, Step

class Process(subprocess.Popen):
    def wait(self, timeout=None):
        # A limit passes no sooner than the step hangs, however busy the machine is.
        hung = os.environ.get("HUNG")
        while hung and timeout and self.poll() is None and not os.path.exists(hung):
            time.sleep(0.01)
        return super().wait(timeout)

subprocess.Popen = Process
steps = [[Step(*step) for step in stage] for stage in {stages}]
run = Gate({whole})
passed = run.run(steps)
print("passed" if passed else "not passed", *run.summary(), sep="\\n", flush=True)
"""
LEAVING = """
import os, subprocess, sys
child = subprocess.Popen(
    [sys.executable, "-c", "import threading; threading.Event().wait()"], start_new_session=True
)
print("child", child.pid, flush=True)
"""
HANGING = (
    LEAVING
    + """
import faulthandler
faulthandler.enable()

def held_in_here():
    open(os.environ["HUNG"], "w").close()
    child.wait()

held_in_here()
"""
)


def python(text: str) -> tuple[str, ...]:
    return (sys.executable, "-c", text)


def run(
    stages: Sequence[Sequence[tuple[Any, ...]]], whole: float = 1000.0, hung: Path | None = None
) -> str:
    """Run a gate in its own process, which adopts the processes that its steps leave behind."""
    variables = {"PYTHONPATH": str(ROOT / "tools")} | ({HUNG: str(hung)} if hung else {})
    ended = subprocess.run(
        [sys.executable, "-c", DRIVER.format(stages=repr(stages), whole=whole)],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    return ended.stdout


def is_alive(process: str) -> bool:
    try:
        state = Path("/proc", process, "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def child_of(said: str) -> str:
    found = re.search(r"^child (\d+)$", said, re.MULTILINE)
    assert found, said
    return found[1]


def test_steps_of_a_stage_run_though_one_fails_and_the_next_stage_does_not() -> None:
    failing, good = ("bad", python("exit(3)"), 100.0), ("good", python("print('here')"), 100.0)
    said = run([[failing, good], [("later", python("print('later')"), 100.0)]])

    assert "\nnot passed\n" in said
    assert re.search(r"^bad +\d+ s  failed with 3$", said, re.MULTILINE)
    assert re.search(r"^good +\d+ s  passed$", said, re.MULTILINE)
    assert "later" not in said


def test_what_may_be_left_out_is_named_and_left_out_where_its_limit_does_not_fit() -> None:
    first, late = ("first", python("print('here')"), 100.0), ("late", python("print(1)"), 900.0)
    said = run([[first], [(*late, True), ("last", python("print('end')"), 100.0)]], whole=500.0)

    assert "\npassed\n" in said
    assert re.search(r"^late +0 s  LEFT OUT: \d+ s are left of the whole", said, re.MULTILINE)
    assert re.search(r"^last +\d+ s  passed$", said, re.MULTILINE)


def test_stages_run_one_after_the_other() -> None:
    said = run([[(name, python(f"print('step', {name!r})"), 100.0)] for name in ("a", "b")])

    assert "\npassed\n" in said
    assert ["a", "b"] == re.findall(r"^step (\w)$", said, re.MULTILINE)


@pytest.mark.parametrize(
    ("seconds", "whole", "reason"),
    [
        (1.0, 1000.0, "ended: its limit, 1 s, has passed"),
        (1000.0, 1.0, "ended: the limit of the whole gate, 1 s, has passed"),
    ],
)
def test_what_hangs_prints_its_stacks_and_is_ended_with_all_that_it_began(
    seconds: float, whole: float, reason: str, tmp_path: Path
) -> None:
    """Even processes with their own session are ended, and no step starts afterwards."""
    steps = [("hung", python(HANGING), seconds), ("next", python("print('later')"), 100.0)]
    said = run([steps], whole, tmp_path / "hung")

    assert "in held_in_here" in said
    assert re.search(rf"^hung +\d+ s  {reason}$", said, re.MULTILINE), said
    assert not is_alive(child_of(said))
    assert re.search(r"^next +0 s  not begun: there is no time left$", said, re.MULTILINE)
    assert "\nnot passed\n" in said


def test_what_a_step_leaves_running_ends_with_it() -> None:
    said = run([[("leaving", python(LEAVING), 100.0)]])

    assert not is_alive(child_of(said))
    assert "leaving: ended 1 processes that it left" in said
    assert "\npassed\n" in said


@pytest.mark.slow
def test_the_test_in_which_a_run_of_pytest_hangs_is_named(tmp_path: Path) -> None:
    """Its stack is that of the xdist process, and is printed in the gate's output."""
    (tmp_path / "conftest.py").write_text(
        "from support import hanging\npytest_runtest_protocol = hanging.pytest_runtest_protocol\n"
    )
    (tmp_path / "test_some.py").write_text(
        "import os, threading\n\n\ndef test_hung():\n"
        "    open(os.environ['HUNG'], 'w').close()\n    threading.Event().wait()\n"
    )
    settings = ("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), str(tmp_path))
    command = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *settings)
    said = run([[("pytest", (*command, "--numprocesses", "1"), 1.0)]], hung=tmp_path / "hung")

    assert re.search(r"^gate: process \d+: .*, in test_some.py::test_hung$", said, re.MULTILINE)
    assert re.search(r"test_some.py\W+line 6 in test_hung", said), said


def test_every_environment_of_the_gate_has_a_limit_and_the_whole_ends_before_its_host() -> None:
    """The total limit applies even if the individual limits add up to more."""
    default = re.search(r"^env_list = (.+)$", (ROOT / "tox.ini").read_text(), re.MULTILINE)
    assert default
    named = re.findall(r"also(?:\+)?=\(([\w -]+)\)", (ROOT / ".ci" / "run").read_text())
    names = [*default[1].split(", "), *" ".join(named).split()]

    assert {"tests", "costly", "pyright", "h2", "deploy"} <= set(names)
    assert set(names) == set(gate.LIMITS)
    assert max(gate.LIMITS.values()) * 60 <= gate.WHOLE_SECONDS == 40 * 60
    assert set(names[names.index("pyright") + 1 :]) == gate.IF_TIME
    assert {"slow", "tpu"} == set(gate.NEVER)
    assert set(gate.NEVER).isdisjoint(names)


def test_unsteady_tests_of_this_run_are_told_at_its_end(tmp_path: Path) -> None:
    file = tmp_path / "unsteady"
    now = time.time()
    file.write_text(
        "".join(
            json.dumps({"test": name, "run": "x", "seconds": seconds}) + "\n"
            for name, seconds in (("old", now - 60), ("new", now + 60))
        )
    )

    assert ["new"] == list(gate.unsteady(file, now))
    assert [] == list(gate.unsteady(tmp_path / "none", now))
