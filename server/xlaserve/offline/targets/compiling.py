"""Compiles models for targets in concurrent child processes.

A compiler may run for a long time or crash, and needs environment variables that a server must not
have. Therefore this process neither compiles nor imports JAX.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock, local
from typing import Self

import msgspec

from xlaserve.offline.targets import environment, wheels
from xlaserve.offline.targets.jobs import Compiled, Job, Problem
from xlaserve.runtime.devices import target_kinds as kinds
from xlaserve.runtime.programs.compilers.process import CompilerProcess, ProcessEndedError

COMMAND = (sys.executable, "-P", "-m", "xlaserve.offline.targets.child")
"""Command of a compiler process; -P prevents imports from the working directory."""

MAX_CHILDREN = 2
"""Maximum number of compiler processes, each of which uses a core, and half a gigabyte even before
it compiles."""

JOB_SECONDS = 1800.0
"""Time limit for all programs of one version."""

MAX_BYTES = 16 << 30
"""Resident memory limit of each process."""

OnDone = Callable[[Compiled], None]


class Compilers:
    """A pool of at most `most` compiler processes; leaving the context ends them."""

    def __init__(
        self,
        *,
        most: int = MAX_CHILDREN,
        seconds: float = JOB_SECONDS,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self._most = most
        self._seconds = seconds
        self._command = tuple(command)
        self._lanes: list[_Lane] = []
        self._own = local()
        self._threads = ThreadPoolExecutor(most, "compile")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        """Kill all processes, including processes that are compiling."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for lane in self._lanes:
            lane.end()
        self._threads.shutdown()
        for lane in self._lanes:
            lane.stop()

    def compile(self, jobs: Iterable[Job], on_done: OnDone = lambda done: None) -> list[Compiled]:
        """Return the result of each job, in order; `on_done` is called in the pool's threads.

        Failures caused by a model become the result's `problem`. Raises DeviceUnavailable for a
        target that is unknown, does not have as many devices, or whose wheels are missing.
        """
        pending = list(jobs)
        for job in pending:
            target = kinds.named(job.target)
            target.topology(job.count)
            wheels.check(target)

        def run(job: Job) -> Compiled:
            done = self._lane().compiled(job)
            on_done(done)
            return done

        return list(self._threads.map(run, pending))

    def _lane(self) -> "_Lane":
        if not hasattr(self._own, "lane"):
            self._own.lane = _Lane(self._command, self._seconds)
            self._lanes.append(self._own.lane)
        found: _Lane = self._own.lane
        return found


class _Lane:
    """One compiler process at a time, restarted if a job needs another environment."""

    def __init__(self, command: Sequence[str], seconds: float) -> None:
        self._command = command
        self._seconds = seconds
        self._process: CompilerProcess | None = None
        self._ended = False
        self._starting = Lock()
        """Held while a process starts, so that `end` finds every process."""

    def compiled(self, job: Job) -> Compiled:
        """Compile a job, and return the result."""
        variables = environment.of(kinds.named(job.target), job.count, job.flags)
        if self._process is None or variables != self._process.variables:
            self.stop()
            with self._starting:
                if self._ended:
                    reason = "not compiled, since compilation was stopped"
                    return Compiled(job, problem=Problem(reason))
                self._process = CompilerProcess(self._command, variables)
        try:
            answer = self._process.ask(
                msgspec.json.encode(job), (), self._seconds, most_bytes=MAX_BYTES
            )
        except ProcessEndedError as error:
            self.stop()
            return Compiled(job, problem=Problem(str(error)))
        return msgspec.json.decode(answer, type=Compiled)

    def end(self) -> None:
        """Start no further jobs, and kill the running process."""
        with self._starting:
            self._ended = True
            if self._process is not None:
                self._process.kill()

    def stop(self) -> None:
        """Stop the process and wait for its end; a later job starts another one."""
        if self._process is not None:
            self._process.stop()
        self._process = None
