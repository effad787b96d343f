"""A bounded pool of compiler processes, started on demand. Does not import JAX.

A compilation in XLA cannot be cancelled and holds the GIL while it lowers, compiles and serializes.
In its own process it does not delay requests and can be killed.
"""

import hashlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import structlog

from xlaserve.errors import InvalidModel, LoadCancelled, OutOfMemory
from xlaserve.process import last_words
from xlaserve.process.silence import is_stopped
from xlaserve.runtime.programs.compilers.jobs import READY, Answer, Job, Packed
from xlaserve.runtime.programs.compilers.process import CompilerProcess, ProcessEndedError

COMMAND = (sys.executable, "-P", "-m", "xlaserve.runtime.programs.compilers.child")
"""Command of a compiler process; -P keeps it from importing modules of the working directory. The
arguments are the parent's process id and the memory limit in bytes.
"""

_POLL_SECONDS = 0.05
"""Interval in seconds at which cancellation and the process's memory are checked."""
_ATTEMPTS = 2
"""Attempts per job: a crash may not be the model's fault, for example if the system is out of
memory or an operator kills the process."""
_KEPT_PART = 0.25
"""A process that uses more than this fraction of its memory limit is ended after its answer."""
_CLOSING_SECONDS = 5.0
_LONG_SECONDS = 2.0
"""Compilations that take longer than this many seconds are logged."""

_log = structlog.get_logger("compiler_process")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a server's compiler processes."""

    processes: int
    bytes: int
    """Maximum resident bytes of each process."""
    idle_seconds: float
    job_seconds: float
    """Time limit of one program, in seconds."""
    trial_seconds: float = 60.0
    """Limit on the CPU time of a row trial, in seconds."""
    is_logged: bool = True
    """Whether to log the start and end of processes, and slow compilations."""


_NO_JOB = Job("", "", 0, Packed(0, (), {}, ()), (), (), {}, {})
"""Job of a process that is started in advance."""


class Refused(Exception):
    """The server must compile this program itself; the message says why."""


class CompilationError(Exception):
    """JAX or XLA refused a computation; carries their message."""


class TrialEndedError(Exception):
    """A trial crashed its process or exceeded a limit; the message says how."""

    def __init__(self, reason: str, doing: str, ended: ProcessEndedError) -> None:
        super().__init__(reason)
        self.doing = doing
        """The phase of the trial in which the process ended."""
        self.is_limit = ended.is_limit
        """Whether the trial exceeded its time or processor time."""
        self.is_late = ended.is_late
        """Whether the trial exceeded its elapsed time."""


class CompilerProcesses:
    """Compiles programs in compiler processes. Thread-safe."""

    def __init__(self, limits: Limits, command: Sequence[str] = COMMAND) -> None:
        self.limits = limits
        self._command = (*command, str(os.getpid()), str(limits.bytes))
        self._tell: Callable[..., None] = _log.info if limits.is_logged else _nothing
        self._changed = threading.Condition()
        """Guards the fields below."""
        self._tasks: deque[_Task] = deque()
        self._running: set[_Task] = set()
        self._threads: set[threading.Thread] = set()
        self._free = 0
        """Number of threads that are waiting for a task."""
        self._closed = False

    def compile(
        self,
        job: Job,
        artifact: Callable[[], bytes],
        check_cancelled: Callable[[], None],
        parameters: Callable[[], Sequence[bytes | memoryview]] = tuple,
    ) -> bytes:
        """Return a serialized program, verdict or trial result. Blocks.

        `parameters` are the parameters of a trial.

        Raises Refused if the server must compile the program; the exception of `check_cancelled`,
        after killing the compilation; InvalidModel or OutOfMemory if the job crashes its process
        twice, takes too long or exceeds the memory limit; and CompilationError if JAX or XLA refuse
        the computation.
        """
        task = _Task(job, artifact, parameters)
        self._submit(task)
        try:
            while not task.done.wait(_POLL_SECONDS):
                check_cancelled()
                task.look(self.limits.bytes)
        except BaseException:
            self._cancel(task)
            raise
        return task.result()

    def start_ahead(self, seconds: float) -> None:
        """Start a process in advance of a load, and wait up to this many seconds for it.

        Does nothing if a process is compiling. Replaces an idle process that was killed from
        outside. The process ends after the usual idle time. If it cannot be started, the next load
        reports the error.
        """
        task = _Task(_NO_JOB, bytes)
        with self._changed:
            if self._closed or self._tasks or len(self._threads) > self._free:
                return
            self._enqueue(task)
        task.done.wait(seconds)

    def close(self) -> None:
        """End all processes, including busy ones; later calls compile nothing."""
        with self._changed:
            self._closed = True
            for task in (*self._tasks, *self._running):
                task.cancel()
            self._tasks.clear()
            self._changed.notify_all()
            threads = list(self._threads)
        for thread in threads:
            thread.join(_CLOSING_SECONDS)

    @property
    def count(self) -> int:
        """Return the number of processes that are running or starting."""
        with self._changed:
            return len(self._threads)

    def _submit(self, task: "_Task") -> None:
        with self._changed:
            if self._closed:
                raise LoadCancelled(task.job.model)
            self._enqueue(task)

    def _enqueue(self, task: "_Task") -> None:
        """Enqueue a task, and start another thread if permitted. The caller holds the lock."""
        self._tasks.append(task)
        if self._free < len(self._tasks) and len(self._threads) < self.limits.processes:
            # The thread that starts a process lives as long as the process, because the system ends
            # a process together with the thread that started it.
            kind = "compiler" if self.limits.is_logged else "trial"
            name = f"{kind}_{len(self._threads)}"
            thread = threading.Thread(target=self._serve, name=name, daemon=True)
            self._threads.add(thread)
            thread.start()
        self._changed.notify()

    def _cancel(self, task: "_Task") -> None:
        with self._changed:
            if task in self._tasks:
                self._tasks.remove(task)
            task.cancel()

    # --- in the threads ---

    def _serve(self) -> None:
        process: _Process | None = None
        try:
            while (task := self._next()) is not None:
                try:
                    process = self._do(task, process)
                # Pass the error to the waiting load; this thread serves the next task.
                except BaseException as error:
                    task.fail(error)
                finally:
                    with self._changed:
                        self._running.discard(task)
        finally:
            if process is not None:
                process.end("the server is shutting down" if self._closed else "it was idle")

    def _next(self) -> "_Task | None":
        """Return the next task, or None after the idle time."""
        with self._changed:
            self._free += 1
            self._changed.wait_for(lambda: self._tasks or self._closed, self.limits.idle_seconds)
            self._free -= 1
            if not self._tasks:
                # Under the lock, so that the next task sees one thread fewer and starts another.
                self._threads.discard(threading.current_thread())
                return None
            task = self._tasks.popleft()
            self._running.add(task)
            return task

    def _do(self, task: "_Task", process: "_Process | None") -> "_Process | None":
        """Run a task, and return the process for the next task."""
        for attempt in range(_ATTEMPTS):
            if process is not None and is_stopped(process.of.pid):
                process.end("it is stopped")
                process = None
            if process is None:
                process = self._started(task)
            if process is None or not task.begin(process.of):
                return process
            if task.job is _NO_JOB:
                task.succeed(b"")
                return process
            try:
                data = process.compiled(task, self.limits.job_seconds)
            except ProcessEndedError as ended:
                task.tell(ended)
                process.of.stop()
                process = None
                is_last = ended.is_late or attempt + 1 == _ATTEMPTS
                if task.ended(ended, self.limits.bytes, is_last=is_last):
                    return None
            except Exception as error:
                task.fail(error)
                return self._kept(process)
            else:
                task.succeed(data)
                return self._kept(process)
        return process

    def _started(self, task: "_Task") -> "_Process | None":
        """Start a compiler process; on failure, fail the task and return None."""
        for attempt in range(_ATTEMPTS):
            try:
                process = _Process(self._command, variables(), self._tell)
            except OSError as error:
                task.fail(Refused(f"no compiler process can be started: {error}"))
                return None
            try:
                if not task.begin(process.of):
                    process.of.stop()
                    return None
                process.wait_until_ready()
            except ProcessEndedError as error:
                task.tell(error)
                process.of.stop()
                # If the task caused the process to be killed, another attempt would end the same
                # way.
                if not error.is_foreign or task.has_killed or attempt + 1 == _ATTEMPTS:
                    reason = task.excess(self.limits.bytes) or str(error)
                    task.fail(Refused(f"a compiler process did not start: {reason}"))
                    return None
            else:
                self._tell(
                    "compiler process started", pid=process.of.pid, most_bytes=self.limits.bytes
                )
                return process
        return None

    def _kept(self, process: "_Process") -> "_Process | None":
        held = process.of.resident_bytes
        if held <= self.limits.bytes * _KEPT_PART:
            return process
        process.end(f"it holds {held} bytes")
        return None


class _Process:
    def __init__(
        self, command: Sequence[str], given: Mapping[str, str], tell: Callable[..., None]
    ) -> None:
        self._tell = tell
        self.of = CompilerProcess(command, given)
        self._computation = ""
        self._module = ""
        """Digest of the module sent with the computation, or an empty string if no proof needs it.
        """

    def wait_until_ready(self) -> None:
        """Wait until the process can compile; raises ProcessEndedError."""
        if self.of.line() != READY:
            raise ProcessEndedError("its first line is unexpected")

    def compiled(self, task: "_Task", seconds: float) -> bytes:
        """Run a job; raises ProcessEndedError, Refused, or CompilationError."""
        job, artifact = task.job, b""
        module = "" if job.proof is None else job.proof.module
        if self._computation != job.computation or module not in ("", self._module):
            self._computation, self._module = "", module
            artifact = task.artifact()
        began = time.monotonic()
        line = msgspec.json.encode(replace(job, artifact_bytes=len(artifact)))
        try:
            attached = artifact, *task.parameters()
            answer = msgspec.json.decode(self.of.ask(line, attached, seconds), type=Answer)
        except msgspec.MsgspecError as error:
            raise ProcessEndedError(f"its answer cannot be read: {error}") from error
        data = self.of.read(answer.executable_bytes)
        self.of.forget_errors()
        if answer.refused:
            raise Refused(answer.refused)
        self._computation = job.computation
        self._tell_long(task, began, answer.processor_seconds)
        if answer.error:
            raise CompilationError(answer.error)
        if hashlib.sha256(data).hexdigest() != answer.sha256:
            raise ProcessEndedError("its program does not match its sha256")
        if (answer.program, answer.environment) != (job.program, job.environment):
            raise Refused("its program has a different key")
        return data

    def end(self, reason: str) -> None:
        """End the process if it is idle."""
        self._tell("compiler process ended", pid=self.of.pid, reason=reason)
        self.of.stop()

    def _tell_long(self, task: "_Task", began: float, processor_seconds: float) -> None:
        """Log why a program took long: it waited for other jobs, or the process had no core."""
        now = time.monotonic()
        if now - task.requested_at > _LONG_SECONDS:
            self._tell(
                "slow compilation finished",
                model=task.job.model,
                waited_seconds=round(began - task.requested_at, 3),
                seconds=round(now - began, 3),
                processor_seconds=round(processor_seconds, 3),
            )


class _Task:
    """A job, with the load's thread waiting for its result."""

    def __init__(
        self,
        job: Job,
        artifact: Callable[[], bytes],
        parameters: Callable[[], Sequence[bytes | memoryview]] = tuple,
    ) -> None:
        self.job = job
        self.artifact = artifact
        self.parameters = parameters
        self.done = threading.Event()
        self.requested_at = time.monotonic()
        self._lock = threading.Lock()
        """Guards the fields below."""
        self._process: CompilerProcess | None = None
        self._is_cancelled = False
        self._is_too_large = False
        self._error: BaseException | None = None
        self._data = b""

    def begin(self, process: CompilerProcess) -> bool:
        """Record the process that runs the task; false if the task was cancelled before."""
        with self._lock:
            if not self._is_cancelled:
                self._process = process
            return not self._is_cancelled

    def look(self, most_bytes: int) -> None:
        """Kill the process if it exceeds the memory limit."""
        with self._lock:
            if self._process is not None and self._process.resident_bytes > most_bytes:
                self._is_too_large = True
                self._process.kill()

    def cancel(self) -> None:
        """Cancel the task: kill its process; the waiting caller raises LoadCancelled."""
        with self._lock:
            self._is_cancelled = True
            if self._process is not None and not self.done.is_set():
                self._process.kill()
        self.fail(LoadCancelled(self.job.model))

    @property
    def has_killed(self) -> bool:
        """Tell whether the process was killed because of this task."""
        return self._is_cancelled or self._is_too_large

    def excess(self, most_bytes: int) -> str:
        """Return how the process exceeded its memory limit, or an empty string."""
        return f"it took more than {most_bytes} bytes" if self._is_too_large else ""

    def tell(self, ended: ProcessEndedError) -> None:
        """Log that the process ended, unless it was killed because of a cancellation."""
        if not self._is_cancelled:
            last_words.tell("compile process", str(ended), ended.output, self.job.model)

    def ended(self, ended: ProcessEndedError, most_bytes: int, *, is_last: bool) -> bool:
        """Record that the process ended; tell whether the task ended with it, without a retry."""
        model, reason = self.job.model, str(ended)
        with self._lock:
            self._process = None
            if self._is_cancelled:
                return True
            is_too_large = self._is_too_large
        if self.job.trial is not None and (is_too_large or is_last or not ended.is_foreign):
            # Another attempt would end in the same way.
            reason = self.excess(most_bytes) or reason
            self.fail(TrialEndedError(reason, ended.doing, ended))
            return True
        if is_too_large:
            detail = f"its compilation took more than {most_bytes} bytes (compile_process_bytes)"
            self.fail(OutOfMemory(model, detail))
            return True
        if is_last:
            self.fail(InvalidModel(reason))
            return True
        _log.warning("compiler process lost, compilation retried", model=model, why=reason)
        return False

    def succeed(self, data: bytes) -> None:
        """Hand the program to the waiting load."""
        with self._lock:
            self._process, self._data = None, data
            self.done.set()

    def fail(self, error: BaseException) -> None:
        """Raise the error in the waiting load, unless the task already has a result."""
        with self._lock:
            self._process = None
            if not self.done.is_set():
                self._error = error
                self.done.set()

    def result(self) -> bytes:
        """Return the program or raise its error."""
        if self._error is not None:
            raise self._error
        return self._data


def _nothing(event: str, **fields: object) -> None:
    """Discard a log event."""


def variables(inherited: Mapping[str, str] = os.environ) -> Mapping[str, str]:
    """Return the environment of a compiler process for the CPU."""
    kept = {name: value for name, value in inherited.items() if not name.startswith("XLASERVE_")}
    return {
        **kept,
        "JAX_PLATFORMS": "cpu",
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": inherited.get("TF_CPP_MIN_LOG_LEVEL", "2"),
    }
