"""Reruns each failed test alone; a test that then passes is unsteady.

Enabled by `--unsteady FILE`, which tox.ini sets. A run with unsteady tests succeeds and prints them
with the output of both runs. It fails if there are more than `MOST` in one run of tox or .ci/run,
or if FILE says that one of them was unsteady before. A test that fails twice has failed.
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
"""Maximum number of unsteady tests in a successful run of tox or .ci/run."""
RUN = "UNSTEADY_RUN"
"""Environment variable that identifies this run across its environments. Without it, each pytest
run counts on its own.
"""
REMEMBERED_SECONDS = 14 * 24 * 3600
"""How long a test stays recorded as unsteady: long enough to fix the cause."""
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
    """Watch reports in the main process, which gets those of all xdist workers."""
    if config.option.unsteady and not hasattr(config, "workerinput"):
        file = Path(config.option.unsteady).absolute()
        run = os.environ.get(RUN) or f"{os.getpid()}-{time.time_ns()}"
        config.pluginmanager.register(Unsteady(config, Memory(file), run), "unsteady")


@dataclass(frozen=True)
class Memory:
    """A file that records unsteady tests, one per line."""

    file: Path

    def lines(self) -> list[dict[str, Any]]:
        """Return the records that have not expired, oldest first."""
        if not self.file.exists():
            return []
        found = [json.loads(line) for line in self.file.read_text().splitlines()]
        return [one for one in found if time.time() - one["seconds"] < REMEMBERED_SECONDS]

    def add(self, tests: list[str], run: str) -> None:
        """Record unsteady tests of a run."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            for test in tests:
                line = {"test": test, "run": run, "seconds": time.time()}
                file.write(json.dumps(line) + "\n")


@dataclass(frozen=True)
class Rerun:
    """Result of rerunning a test alone."""

    has_passed: bool
    output: str


class Unsteady:
    """The failures of a pytest session, and the results of their reruns."""

    def __init__(self, config: pytest.Config, memory: Memory, run: str) -> None:
        self._config = config
        self._memory = memory
        self._run = run
        self._failures: dict[str, list[pytest.TestReport]] = {}
        self._reruns: dict[str, Rerun] = {}
        self._verdict = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a failure as pytest counts it; a crashed worker is reported in the same
        way.
        """
        if report.failed and not hasattr(report, "wasxfail"):
            self._failures.setdefault(report.nodeid, []).append(report)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Rerun the failures; the session succeeds if all of them are unsteady.

        Does nothing if there were other errors, such as in collection, or if tests were
        skipped after a failure: then nothing shows that the other tests pass.
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
        """Move these failures to a separate section of the summary."""
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

    # --- Rerun -----------------------------------------------------------------------------------

    def _rerun(self, name: str) -> Rerun:
        limit = 2 * float(self._config.getini("faulthandler_timeout") or 0) + _STARTING_SECONDS
        with TemporaryDirectory() as directory:
            verdict, output = Path(directory, "verdict.xml"), Path(directory, "output.txt")
            command = [sys.executable, "-m", "pytest", *self._options(), f"--junitxml={verdict}"]
            # Not a pipe: a process that the test leaves behind would hold it open.
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
        """Yield this run's options that affect how tests run, but not which tests."""
        option = self._config.option
        # Command-line options replace the marks in `addopts`.
        yield from ("-m", "", "--rootdir", str(self._config.rootpath))
        # also print the output of a passing test
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
        # Reuse the random seed: it may be the cause of the failure.
        if isinstance(seed := getattr(option, "randomly_seed", None), int):
            yield f"--randomly-seed={seed}"


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in given.items() if name not in _OTHERS}


def _has_passed(verdict: Path) -> bool:
    """Return whether a report consists of passed tests only, and at least one."""
    if not verdict.exists():
        return False  # the process died during the test
    suites = list(ElementTree.parse(verdict).getroot().iter("testsuite"))
    numbers = [
        [int(suite.get(key, -1)) for key in ("failures", "errors", "skipped")] for suite in suites
    ]
    return [[0, 0, 0]] == numbers and int(suites[0].get("tests", 0)) > 0
