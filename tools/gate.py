"""Run tox environments, each within its own limit, and all within a common one; .ci/run does that.

    python tools/gate.py --spent SECONDS ENVIRONMENT ...

First the environments of a plain `tox run`, then the named ones. When a limit is exceeded, every
process started here prints its stacks, if it can, and its current test; then all of them are
killed, and the gate fails. If a check fails, the others of its stage still run, but the next stage
does not.
"""

import argparse
import ctypes
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

WHOLE_SECONDS = 40 * 60.0
"""Limit of the whole gate, including what .ci/run installed before."""
LIMITS: Mapping[str, float] = {
    "lint": 3,
    "layers": 3,
    "generated": 5,
    "docs": 4,
    "type": 10,
    "tests": 20,
    "costly": 30,
    "smoke-py311": 6,
    "smoke-py312": 6,
    "smoke-py313": 6,
    "pyright": 12,
    "type-py311": 6,
    "models-py311": 8,
    "h2": 15,
    "deploy": 10,
}
"""Limit of each environment in minutes: at least twice its time on two idle cores, and three times
for short ones, because busy machines have been that slow.
"""
OTHER_MINUTES = 20.0
"""Limit of an environment that is not in the table."""

IF_TIME = frozenset({"type-py311", "models-py311", "h2", "deploy"})
"""Environments that are started only if their limits fit into the remaining time."""
NEVER: Mapping[str, str] = {
    "slow": "its soaks and floods take longer than all else, and have no time on a busy machine",
    "tpu": "it installs 0.7 GB of wheels",
}
"""Environments that do not fit into the limit of the whole gate, and why; each run lists them."""

TOX = (sys.executable, "-m", "tox")
RUN, RUNNING = "UNSTEADY_RUN", "RUNNING_TESTS"
"""Environment variables that tests/support/unsteady.py and hanging.py read."""
STACK_SECONDS = 15.0
"""How long processes may take to print their stacks before they are killed."""
END_SECONDS = 30.0
_BECOME_REAPER = 36  # PR_SET_CHILD_SUBREAPER
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Step:
    """A command with its limit."""

    name: str
    command: Sequence[str]
    seconds: float
    is_left_out_late: bool = False
    """Whether the step is skipped, and reported, if less time than `seconds` is left."""


@dataclass
class Gate:
    """Runs steps within time limits."""

    whole_seconds: float
    began: float = field(default_factory=time.monotonic)
    results: list[tuple[str, float, str]] = field(default_factory=list)
    is_over: bool = False
    """Whether a limit has been exceeded; no further step is started then."""

    def run(self, stages: Sequence[Sequence[Step]]) -> bool:
        """Run stages until one fails; tell whether all succeeded."""
        adopt_orphans()
        with TemporaryDirectory(prefix="gate-") as running:
            variables = {RUN: f"gate-{os.getpid()}-{time.time_ns()}", RUNNING: running}
            for stage in stages:
                results = [self._step(step, variables) for step in stage]
                if not all(results):
                    return False
        return True

    def _step(self, step: Step, variables: Mapping[str, str]) -> bool:
        left = self.began + self.whole_seconds - time.monotonic()
        if self.is_over or left <= 0:
            self.is_over = True
            self.results.append((step.name, 0.0, "not begun: there is no time left"))
            return False
        if step.is_left_out_late and left < step.seconds:
            result = f"LEFT OUT: {left:.0f} s are left of the whole, its limit is {step.seconds:g}"
            self.results.append((step.name, 0.0, result))
            say(f"{step.name}: {result}")
            return True
        began = time.monotonic()
        say(f"{step.name}: {shlex.join(step.command)}")
        process = subprocess.Popen(
            step.command,
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            code = process.wait(min(step.seconds, left))
            result = f"failed with {code}" if code else "passed"
        except subprocess.TimeoutExpired:
            self.is_over = True
            limit = step.seconds if step.seconds <= left else self.whole_seconds
            whose = "its limit" if step.seconds <= left else "the limit of the whole gate"
            result = f"ended: {whose}, {limit:g} s, has passed"
            say(f"{step.name}: {result}")
            print_stacks(Path(variables[RUNNING]))
        if left_over := end_all():
            say(f"{step.name}: ended {len(left_over)} processes that it left")
        process.wait(END_SECONDS)
        self.results.append((step.name, time.monotonic() - began, result))
        say(f"{step.name}: {result}")
        return result == "passed"

    def summary(self) -> Iterator[str]:
        """Yield the outcome of each step."""
        for name, seconds, result in self.results:
            yield f"{name:<14} {seconds:7.0f} s  {result}"


def say(text: str) -> None:
    """Print a line of the gate itself; flushed, as steps write to the output directly."""
    print(f"gate: {text}", flush=True)


# --- Processes ---------------------------------------------------------------------------------


def adopt_orphans() -> None:
    """Become the parent of every orphaned descendant (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_BECOME_REAPER, 1, 0, 0, 0)


def descendants(root: int) -> list[int]:
    """Return the processes below one, parents first."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            # The name, in parentheses, may contain any character.
            state, parent, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
            if state != "Z":
                children.setdefault(int(parent), []).append(int(folder.name))
    found = [root]
    for process in found:
        found += sorted(children.get(process, []))
    return found[1:]


def print_stacks(running: Path) -> None:
    """Print each process and its test, and abort those that print stacks on SIGABRT."""
    asked = []
    for process in descendants(os.getpid()):
        with suppress(OSError):
            command = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ")
            note = running / str(process)
            test = f", in {note.read_text()}" if note.exists() else ""
            say(f"process {process}: {command.decode(errors='replace').strip()[:200]}{test}")
            if _catches_abort(process):
                os.kill(process, signal.SIGABRT)
                asked.append(process)
    _wait(lambda: not set(asked) & set(descendants(os.getpid())), STACK_SECONDS)
    # Let the processes that forward output finish reading.
    _wait(lambda: not descendants(os.getpid()), 1)


def _catches_abort(process: int) -> bool:
    """Tell whether a process handles SIGABRT: pytest's faulthandler and Go then print stacks."""
    status = Path(f"/proc/{process}/status").read_text()
    caught = next((line for line in status.splitlines() if line.startswith("SigCgt")), "SigCgt: 0")
    return bool(int(caught.split()[1], 16) >> (signal.SIGABRT - 1) & 1)


def end_all() -> list[int]:
    """Kill all descendants; return their ids."""
    first: list[int] = descendants(os.getpid())

    def is_done() -> bool:
        found = descendants(os.getpid())
        for process in found:
            with suppress(OSError):
                group = os.getpgid(process)
                if group != os.getpgrp():
                    os.killpg(group, signal.SIGKILL)
                else:
                    os.kill(process, signal.SIGKILL)
        return not found

    if first:
        _wait(is_done, END_SECONDS)
    return first


def _wait(is_done: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not is_done() and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)


# --- tox ---------------------------------------------------------------------------------------


def environment(name: str) -> Step:
    """Return the step that runs a tox environment."""
    seconds = 60 * LIMITS.get(name, OTHER_MINUTES)
    return Step(name, (*TOX, "run", "-e", name), seconds, name in IF_TIME)


def default_environments() -> list[str]:
    """Return the environments of a plain `tox run`."""
    command = (*TOX, "list", "-d", "-q", "--no-desc")
    listed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return listed.split()


def unsteady(file: Path, began: float) -> Iterator[str]:
    """Yield the tests recorded as unsteady since a time."""
    lines = file.read_text().splitlines() if file.exists() else []
    for found in map(json.loads, lines):
        if found["seconds"] >= began:
            yield found["test"]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--spent", type=float, default=0.0, help="seconds that are gone already")
    parser.add_argument("environments", nargs="*", help="those to run after a plain `tox run`")
    options = parser.parse_args(arguments)
    gate, began = Gate(WHOLE_SECONDS, time.monotonic() - options.spent), time.time()
    names = (default_environments(), options.environments)
    has_passed = gate.run([[environment(name) for name in stage] for stage in names])
    for line in gate.summary():
        say(line)
    for name, reason in NEVER.items():
        say(f"NOT RUN {name}: {reason}; `tox run -e {name}` does, before an issue is resolved")
    for test in unsteady(Path(".tox", "unsteady.jsonl"), began):
        say(f"UNSTEADY {test}")
    return 0 if has_passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
