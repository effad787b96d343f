"""A second run, alone, of each test that failed: one that passes then is unsteady.

Takes effect with `--unsteady FILE`, which tox.ini gives. A run with unsteady tests succeeds, and
prints them with the outputs of both runs, unless they are more than `MOST` in a run of tox or of
.ci/run, or one of them has been unsteady before, which the file says. A test that fails both
times has failed.
"""

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

import pytest

MOST = 3
"""Most unsteady tests of a run of tox or of .ci/run that succeeds."""
RUN = "UNSTEADY_RUN"
"""Environment variable that names that run, over its environments. Without it each run of pytest
is one."""
REMEMBERED_SECONDS = 14 * 24 * 3600
"""How long a test counts as unsteady before; long enough to mend its cause."""
_HEADING = "UNSTEADY"
_OTHERS = ("PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT")
_STARTING_SECONDS = 120


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--unsteady",
        metavar="FILE",
        help="run each test that fails once more, alone; FILE remembers those that then pass",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Watch the reports where they come together: in the process that starts those of xdist."""
    if config.option.unsteady and not hasattr(config, "workerinput"):
        file = Path(config.option.unsteady).absolute()
        run = os.environ.get(RUN) or f"{os.getpid()}-{time.time_ns()}"
        config.pluginmanager.register(Unsteady(config, Memory(file), run), "unsteady")


@dataclass(frozen=True)
class Memory:
    """A file with the tests that were unsteady, a line each."""

    file: Path

    def lines(self) -> list[dict[str, Any]]:
        """Return what is remembered, oldest first."""
        if not self.file.exists():
            return []
        found = [json.loads(line) for line in self.file.read_text().splitlines()]
        return [one for one in found if time.time() - one["seconds"] < REMEMBERED_SECONDS]

    def add(self, tests: list[str], run: str) -> None:
        """Remember tests, of a run."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            for test in tests:
                line = {"test": test, "run": run, "seconds": time.time()}
                file.write(json.dumps(line) + "\n")


@dataclass(frozen=True)
class Rerun:
    """What became of a test when it ran alone."""

    has_passed: bool
    output: str


class Unsteady:
    """The failures of a session of pytest, and what became of each when it ran again."""

    def __init__(self, config: pytest.Config, memory: Memory, run: str) -> None:
        self._config = config
        self._memory = memory
        self._run = run
        self._failures: dict[str, list[pytest.TestReport]] = {}
        self._reruns: dict[str, Rerun] = {}
        self._verdict = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a failure as pytest counts them; a process that crashed is told in the same way."""
        if report.failed and not hasattr(report, "wasxfail"):
            self._failures.setdefault(report.nodeid, []).append(report)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Run the failures again, and let the session succeed where all of them are unsteady.

        Not where something else has failed, such as a collection, nor where tests were left out
        after the failure: then the session did not show that the others pass.
        """
        if exitstatus != pytest.ExitCode.TESTS_FAILED or not self._is_whole(session):
            return
        lines = self._memory.lines()
        before = {line["test"] for line in lines}
        found_earlier = {line["test"] for line in lines if line["run"] == self._run}
        if len(self._failures.keys() | found_earlier) > MOST:
            self._verdict = f"{self._count(found_earlier)}: none was run again"
            return
        for name in self._failures:
            self._reruns[name] = self._rerun(name)
        unsteady = [name for name, rerun in self._reruns.items() if rerun.has_passed]
        self._memory.add(unsteady, self._run)
        accepted = [name for name in unsteady if name not in before]
        self._take_back(accepted)
        if again := [name for name in unsteady if name in before]:
            self._verdict = f"unsteady before, too, mend the cause: {', '.join(again)}"
        if len(accepted) == len(self._failures):
            session.exitstatus = pytest.ExitCode.OK

    def _count(self, found_earlier: set[str]) -> str:
        earlier = f" and {len(found_earlier)} were unsteady earlier" if found_earlier else ""
        return f"{len(self._failures)} tests failed{earlier}, at most {MOST} may be unsteady"

    def _is_whole(self, session: pytest.Session) -> bool:
        counted = sum(map(len, self._failures.values()))
        stopped = session.shouldstop or session.shouldfail or self._config.option.maxfail
        return bool(counted) and counted == session.testsfailed and not stopped

    def _take_back(self, names: list[str]) -> None:
        """Have the summary tell failures under a heading of their own."""
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is None:
            return
        for key in ("failed", "error"):
            reports = reporter.stats.get(key, [])
            reports[:] = [one for one in reports if one.nodeid not in names]
            if not reports:
                reporter.stats.pop(key, None)
        if names:
            reporter.stats["unsteady"] = [self._failures[name][0] for name in names]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print both outputs of each unsteady test."""
        unsteady = {name: one for name, one in self._reruns.items() if one.has_passed}
        if unsteady or self._verdict:
            terminalreporter.section(_HEADING, yellow=True)
        for name, rerun in unsteady.items():
            terminalreporter.section(f"{name}, among the others", "_")
            for line in self._said(name):
                terminalreporter.line(line)
            terminalreporter.section(f"{name}, alone", "_")
            terminalreporter.line(rerun.output)
        for name in unsteady:
            terminalreporter.line(f"{_HEADING} {name}: failed, then passed alone")
        if self._verdict:
            terminalreporter.line(self._verdict)

    def _said(self, name: str) -> Iterator[str]:
        for report in self._failures[name]:
            yield report.longreprtext
            for heading, text in report.sections:
                yield f"--- {heading} ---"
                yield text

    # --- the second run ---

    def _rerun(self, name: str) -> Rerun:
        limit = 2 * float(self._config.getini("faulthandler_timeout") or 0) + _STARTING_SECONDS
        with TemporaryDirectory() as directory:
            verdict, output = Path(directory, "verdict.xml"), Path(directory, "output.txt")
            command = [sys.executable, "-m", "pytest", *self._options(), f"--junitxml={verdict}"]
            # A file: a process that the test leaves behind would hold a pipe open.
            with output.open("wb") as file:
                try:
                    ended = subprocess.run(
                        [*command, name],
                        cwd=self._config.rootpath,
                        env=_environment(os.environ),
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        timeout=limit,
                        check=False,
                    )
                    has_passed = not ended.returncode and _has_passed(verdict)
                except subprocess.TimeoutExpired:
                    has_passed = False
            return Rerun(has_passed, output.read_text(errors="replace"))

    def _options(self) -> Iterator[str]:
        """Return the options of this run that say how a test runs, not which tests run."""
        option = self._config.option
        # Those of the command line stand in place of the marks in `addopts`.
        yield from ("-m", "", "--rootdir", str(self._config.rootpath))
        # What a test that passes has printed, too.
        yield "-rP"
        if self._config.inipath is not None:
            yield from ("-c", str(self._config.inipath))
        for value in option.override_ini or ():
            yield from ("-o", value)
        for value in option.plugins:
            yield from ("-p", value)
        if hasattr(option, "numprocesses"):
            yield from ("--numprocesses", "0")
        if getattr(option, "timeout", None) is not None:
            yield from ("--timeout", str(option.timeout))
        # The same choices at random: what fails for some of them fails again.
        if isinstance(seed := getattr(option, "randomly_seed", None), int):
            yield f"--randomly-seed={seed}"


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in given.items() if name not in _OTHERS}


def _has_passed(verdict: Path) -> bool:
    """Tell whether a report has a test that passed, and none that did anything else."""
    if not verdict.exists():
        return False  # the process ended within the test
    suites = list(ElementTree.parse(verdict).getroot().iter("testsuite"))
    numbers = [
        [int(suite.get(key, -1)) for key in ("failures", "errors", "skipped")] for suite in suites
    ]
    return [[0, 0, 0]] == numbers and int(suites[0].get("tests", 0)) > 0
