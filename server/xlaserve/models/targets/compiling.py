"""Has models compiled for targets, by processes of their own, some side by side.

A compiler may take long, or end its process; and what it reads of its environment is not what a
server wants. So nothing is compiled here, and JAX is not imported.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from signal import Signals
from threading import Lock, Timer, local
from types import TracebackType
from typing import IO, Self

import msgspec

from xlaserve.models.targets import environment, kinds, wheels
from xlaserve.models.targets.jobs import Compiled, Job, Problem

COMMAND = (sys.executable, "-P", "-m", "xlaserve.models.targets.child")
"""-P: what lies in the working directory is not imported."""

MAX_CHILDREN = 2
"""Each takes a core, and half a gigabyte before it compiles anything."""

JOB_SECONDS = 1800.0
"""For all programs of one version."""

_SHOWN_CHARACTERS = 300

OnDone = Callable[[Compiled], None]


class Compilers:
    """Processes that compile, at most so many at once; they end with the block."""

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the processes, also those that compile."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for lane in self._lanes:
            lane.end()
        self._threads.shutdown()
        for lane in self._lanes:
            lane.stop()

    def compile(self, jobs: Iterable[Job], on_done: OnDone = lambda done: None) -> list[Compiled]:
        """Return what became of each job, in their order; `on_done` is told in threads.

        What a model is to blame for is a `problem` of the answer. Raises DeviceUnavailable for a
        target that is none, has not so many devices, or whose wheels are missing.
        """
        asked = list(jobs)
        for job in asked:
            target = kinds.named(job.target)
            target.topology(job.count)
            wheels.check(target)

        def run(job: Job) -> Compiled:
            done = self._lane().compiled(job)
            on_done(done)
            return done

        return list(self._threads.map(run, asked))

    def _lane(self) -> "_Lane":
        """Return the lane of this thread."""
        if not hasattr(self._own, "lane"):
            self._own.lane = _Lane(self._command, self._seconds)
            self._lanes.append(self._own.lane)
        found: _Lane = self._own.lane
        return found


class _Lane:
    """One process at a time, for whatever target the job in hand is for."""

    def __init__(self, command: Sequence[str], seconds: float) -> None:
        self._command = command
        self._seconds = seconds
        self._variables: Mapping[str, str] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._ended = False
        self._starting = Lock()
        """Held while a process is started: `end` finds every one."""

    def compiled(self, job: Job) -> Compiled:
        """Return what became of a job."""
        variables = environment.of(kinds.named(job.target), job.count, job.flags)
        if self._process is None or variables != self._variables:
            self.stop()
            if self._ended:
                return Compiled(
                    job, problem=Problem("it was not compiled, the compilations were ended")
                )
            self._start(variables)
        answer, problem = self._asked(msgspec.json.encode(job))
        if problem:
            return Compiled(job, problem=Problem(problem))
        return msgspec.json.decode(answer, type=Compiled)

    def end(self) -> None:
        """Start nothing more, and end what runs."""
        with self._starting:
            self._ended = True
            if self._process is not None:
                self._process.kill()

    def _start(self, variables: Mapping[str, str]) -> None:
        self._variables = variables
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115, it is closed with the process
        self._process = subprocess.Popen(
            self._command,
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )

    def _asked(self, line: bytes) -> tuple[bytes, str]:
        """Send a line and return the answer, or why there is none."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        timer = Timer(self._seconds, process.kill)
        timer.start()
        try:
            process.stdin.write(line + b"\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        finally:
            late = not timer.is_alive()
            timer.cancel()
        if answer.endswith(b"\n"):
            return answer, ""
        problem = self._ending(late=late)
        self.stop()
        return b"", problem

    def _ending(self, *, late: bool) -> str:
        """Say why the process wrote no more."""
        assert self._process is not None
        assert self._errors is not None
        if late:
            return f"its compilation did not end in {self._seconds:g} seconds"
        status = self._process.wait()
        how = Signals(-status).name if status < 0 else f"exit status {status}"
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        last = f": {said[-1][:_SHOWN_CHARACTERS]}" if said else ""
        return f"its compilation ended the process that compiles ({how}){last}"

    def stop(self) -> None:
        """End the process and wait for its end; another may be started."""
        if self._process is not None:
            self._process.kill()
            # Its pipes are closed, one of which may hold what it never read.
            with suppress(BrokenPipeError), self._process:
                pass
        if self._errors is not None:
            self._errors.close()
        self._process = self._errors = None
