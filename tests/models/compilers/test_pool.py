"""Compiler processes as seen by the server.

What happens to a load whose process exits, hangs, is cancelled, exceeds its memory limit, or sends
invalid data.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from xlaserve.errors import InvalidModel, LoadCancelled, OutOfMemory
from xlaserve.process.silence import is_stopped
from xlaserve.runtime.programs.compilers import pool
from xlaserve.runtime.programs.compilers.jobs import Array, Job, Packed, Proof
from xlaserve.runtime.programs.compilers.pool import (
    CompilationError,
    CompilerProcesses,
    Limits,
    Refused,
)
from xlaserve.runtime.programs.compilers.process import CompilerProcess

FAKE = Path(__file__).with_name("fake_compiler.py")
LIMITS = Limits(1, 1 << 40, 60.0, 60.0)
SECONDS = 60


def job(model: str = "good", computation: str = "c") -> Job:
    one = Array("float32", (1,))
    key = {"computation": computation}
    return Job(model, computation, 0, Packed(0, (), {}, ()), (), (one,), key, {"jaxlib": "1"})


@pytest.fixture
def made() -> Iterator[list[CompilerProcesses]]:
    """Close the pools that a test has made, and check that no thread or process is left."""
    pools: list[CompilerProcesses] = []
    yield pools
    for one in pools:
        one.close()
    assert [0] * len(pools) == [one.count for one in pools]
    assert [] == [t.name for t in threading.enumerate() if t.name.startswith("compiler_")]


@pytest.fixture
def processes(made: list[CompilerProcesses], tmp_path: Path) -> Callable[..., CompilerProcesses]:
    def make(**limits: Any) -> CompilerProcesses:
        command = (sys.executable, "-S", "-E", str(FAKE), str(tmp_path / "notes"))
        made.append(CompilerProcesses(replace(LIMITS, **limits), command))
        return made[-1]

    return make


@pytest.fixture
def notes(tmp_path: Path) -> Callable[[], list[dict[str, Any]]]:
    """Return the records of the processes: their pids, their jobs, and the artifact lengths."""

    def read() -> list[dict[str, Any]]:
        with suppress(FileNotFoundError):
            return [json.loads(line) for line in (tmp_path / "notes").read_text().splitlines()]
        return []

    return read


def compiled(processes: CompilerProcesses, asked: Job | None = None) -> bytes:
    return processes.compile(asked or job(), lambda: b"artifact", lambda: None)


def is_there(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_process_is_kept_and_given_an_artifact_once(
    processes: Callable[..., CompilerProcesses], notes: Callable[[], list[dict[str, Any]]]
) -> None:
    one = processes()

    assert 0 == one.count
    found = [compiled(one, job(computation=key)) for key in ("c", "c", "d", "c")]

    assert [b"program of " + key for key in (b"c", b"c", b"d", b"c")] == found
    assert [8, 0, 8, 8] == [note["artifact"] for note in notes()]
    assert 1 == len({note["pid"] for note in notes()}) == one.count


def test_a_proof_takes_the_artifact_with_its_own_lines(
    processes: Callable[..., CompilerProcesses], notes: Callable[[], list[dict[str, Any]]]
) -> None:
    """Compile jobs do not: models that share a computation share its programs."""
    one = processes()
    for module in ("", "m", "m", "", "n", ""):
        proof = Proof(module, 0, (), {}, ()) if module else None
        compiled(one, replace(job(), proof=proof))

    assert [8, 8, 0, 0, 8, 0] == [note["artifact"] for note in notes()]


def test_a_process_that_is_started_ahead_serves_the_first_job(
    processes: Callable[..., CompilerProcesses], notes: Callable[[], list[dict[str, Any]]]
) -> None:
    """It counts towards the limit, and repeated requests start it only once."""
    one = processes(processes=2)
    one.start_ahead(SECONDS)
    one.start_ahead(SECONDS)
    with capture_logs() as logs:
        found = compiled(one)

    assert b"program of c" == found
    assert 1 == len(notes()) == one.count
    assert [] == [entry for entry in logs if entry["event"] == "compiler process started"]


def test_an_idle_process_that_is_stopped_is_replaced_ahead_of_a_load(
    processes: Callable[..., CompilerProcesses], notes: Callable[[], list[dict[str, Any]]]
) -> None:
    """The load neither detects the dead process nor waits for a new one."""
    one = processes()
    compiled(one)
    victim = notes()[0]["pid"]
    os.kill(victim, signal.SIGSTOP)
    until(lambda: is_stopped(victim))
    until(lambda: one._free)
    one.start_ahead(SECONDS)
    is_left = is_there(victim)
    with capture_logs() as logs:
        compiled(one)

    assert not is_left
    assert [] == [entry for entry in logs if entry["event"] == "compiler process started"]
    assert victim != notes()[-1]["pid"]


def test_a_process_that_is_started_ahead_ends_with_the_server(
    processes: Callable[..., CompilerProcesses],
) -> None:
    """The fixture checks that no thread or process is left, even if one is still starting."""
    one = processes()
    one.start_ahead(0)
    one.close()
    one.start_ahead(SECONDS)

    assert 0 == one.count


@pytest.mark.parametrize(
    ("ends", "expected"),
    [(105.0, [("good", 3.0, 2.0, 0.0)]), (102.0, [])],
    ids=["long", "short"],
)
def test_what_takes_long_is_logged_with_what_it_waited_for(
    processes: Callable[..., CompilerProcesses],
    monkeypatch: pytest.MonkeyPatch,
    ends: float,
    expected: list[tuple[str, float, float, float]],
) -> None:
    """The time is taken when the job is queued, when its process begins, and at its end."""
    now = iter([100.0, ends - 2.0, ends])
    monkeypatch.setattr(pool, "time", SimpleNamespace(monotonic=lambda: next(now)))
    with capture_logs() as logs:
        compiled(processes())

    names = ("model", "waited_seconds", "seconds", "processor_seconds")
    found = [e for e in logs if e["event"] == "slow compilation finished"]
    assert expected == [tuple(entry[name] for name in names) for entry in found]


def test_there_are_as_many_processes_as_allowed_and_no_more(
    processes: Callable[..., CompilerProcesses], notes: Callable[[], list[dict[str, Any]]]
) -> None:
    """The first two wait for each other in their processes; the third takes the first free one."""
    one = processes(processes=2)
    threads = [
        threading.Thread(target=compiled, args=(one, job("pair"))),
        threading.Thread(target=compiled, args=(one, job("pair"))),
    ]
    for thread in threads:
        thread.start()
    compiled(one)
    for thread in threads:
        thread.join(SECONDS)

    assert 2 == len({note["pid"] for note in notes()}) == one.count


def test_a_process_that_dies_is_replaced_once(
    processes: Callable[..., CompilerProcesses],
    notes: Callable[[], list[dict[str, Any]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = compiled(processes(), job("dies once"))

    assert b"program of c" == found
    assert [8, 8] == [note["artifact"] for note in notes()]
    assert 2 == len({note["pid"] for note in notes()})
    assert "compiler process lost, compilation retried" in capsys.readouterr().out


def test_a_model_that_ends_two_processes_is_to_blame(
    processes: Callable[..., CompilerProcesses],
) -> None:
    one = processes()

    with pytest.raises(InvalidModel, match=r"ended the compiler process \(SIGABRT\): F0000 no"):
        compiled(one, job("dies"))
    assert b"program of c" == compiled(one)


@pytest.mark.parametrize("model", ["flips a bit", "is cut", "talks"])
def test_what_is_not_the_program_that_was_compiled_is_refused(
    processes: Callable[..., CompilerProcesses], model: str
) -> None:
    with pytest.raises(InvalidModel, match="sha256|SIGKILL|exit status 0|cannot be read"):
        compiled(processes(), job(model))


@pytest.mark.parametrize("model", ["other program", "other jaxlib", "refuses"])
def test_what_is_compiled_for_something_else_is_compiled_in_the_server(
    processes: Callable[..., CompilerProcesses],
    notes: Callable[[], list[dict[str, Any]]],
    model: str,
) -> None:
    one = processes()

    with pytest.raises(Refused, match="a different key|as it likes"):
        compiled(one, job(model))
    compiled(one)

    assert 1 == len({note["pid"] for note in notes()})


def test_what_xla_says_is_repeated(processes: Callable[..., CompilerProcesses]) -> None:
    with pytest.raises(CompilationError, match="RESOURCE_EXHAUSTED: too much"):
        compiled(processes(), job("fails"))


def test_a_compilation_that_takes_too_long_is_killed_and_not_tried_again(
    processes: Callable[..., CompilerProcesses], notes: Callable[[], list[dict[str, Any]]]
) -> None:
    with pytest.raises(InvalidModel, match=r"did not end in 0\.5 seconds"):
        compiled(processes(job_seconds=0.5), job("hangs"))

    assert [False] == [is_there(note["pid"]) for note in notes()]


def test_a_process_whose_killer_returns_late_is_late_all_the_same(
    processes: Callable[..., CompilerProcesses],
    notes: Callable[[], list[dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The exit of a process is noticed before the thread that kills it continues."""
    kill = subprocess.Popen.kill

    def killed(process: subprocess.Popen[bytes]) -> None:
        kill(process)
        thread = threading.current_thread()
        if isinstance(thread, threading.Timer):
            thread.finished.wait(SECONDS)

    monkeypatch.setattr(subprocess.Popen, "kill", killed)
    with pytest.raises(InvalidModel, match=r"did not end in 0\.5 seconds"):
        compiled(processes(job_seconds=0.5), job("hangs"))

    assert 1 == len(notes())


def test_a_compilation_that_takes_too_much_memory_is_killed(
    processes: Callable[..., CompilerProcesses], notes: Callable[[], list[dict[str, Any]]]
) -> None:
    with pytest.raises(OutOfMemory, match=r"more than 60000000 bytes \(compile_process_bytes\)"):
        compiled(processes(bytes=60_000_000), job("takes 100 MB"))

    assert 1 == len(notes())


def test_a_process_that_has_grown_does_no_further_job(
    processes: Callable[..., CompilerProcesses], notes: Callable[[], list[dict[str, Any]]]
) -> None:
    one = processes(bytes=300_000_000)
    compiled(one, job("keeps 100 MB"))
    compiled(one)

    assert 2 == len({note["pid"] for note in notes()})


def test_a_cancelled_compilation_is_killed_and_the_next_one_goes_on(
    processes: Callable[..., CompilerProcesses], notes: Callable[[], list[dict[str, Any]]]
) -> None:
    one = processes()

    def check() -> None:
        if notes():
            raise LoadCancelled("hangs")

    with pytest.raises(LoadCancelled):
        one.compile(job("hangs"), lambda: b"artifact", check)
    assert b"program of c" == compiled(one)

    (pid, other) = [note["pid"] for note in notes()]
    assert pid != other
    assert not is_there(pid)


@pytest.mark.parametrize("why", ["cancelled", "closed", "too large"])
def test_a_process_that_is_killed_as_it_starts_is_started_once(
    why: str, made: list[CompilerProcesses], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was killed for a reason: a second process would be killed too."""
    commands: list[Any] = []

    def note(command: Any, given: Any) -> CompilerProcess:
        commands.append(command)
        return CompilerProcess(command, given)

    monkeypatch.setattr(pool, "CompilerProcess", note)
    started = tmp_path / "started"
    code = f"import time; open({str(started)!r}, 'w'); time.sleep(1000)"
    limits = replace(LIMITS, bytes=1 if why == "too large" else LIMITS.bytes)
    one = CompilerProcesses(limits, (sys.executable, "-S", "-E", "-c", code))
    made.append(one)

    def check() -> None:
        if started.exists() and why == "cancelled":
            raise LoadCancelled("m")
        if started.exists() and why == "closed":
            one.close()
        until(lambda: started.exists() or why != "too large")

    with pytest.raises(Refused if why == "too large" else LoadCancelled, match="1 bytes|cancelled"):
        one.compile(job(), lambda: b"artifact", check)
    one.close()

    assert 1 == len(commands)


def test_one_that_is_cancelled_before_its_turn_is_never_begun(
    processes: Callable[..., CompilerProcesses], notes: Callable[[], list[dict[str, Any]]]
) -> None:
    one = processes()

    def cancelled() -> None:
        with pytest.raises(LoadCancelled):
            compiled(one, job("hangs"))

    first = threading.Thread(target=cancelled)
    first.start()
    until(notes)

    def check() -> None:
        raise LoadCancelled("second")

    with pytest.raises(LoadCancelled):
        one.compile(job("second"), lambda: b"artifact", check)
    one.close()
    first.join(SECONDS)

    assert ["hangs"] == [note["model"] for note in notes()]
    assert not is_there(notes()[0]["pid"])
    with pytest.raises(LoadCancelled):
        compiled(one)


def test_an_idle_process_is_ended_and_another_started_when_asked(
    processes: Callable[..., CompilerProcesses], notes: Callable[[], list[dict[str, Any]]]
) -> None:
    one = processes(idle_seconds=0.01)
    compiled(one)
    until(lambda: one.count == 0 and not is_there(notes()[0]["pid"]))
    compiled(one)

    assert 2 == len({note["pid"] for note in notes()})


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("/nowhere/python",), "no compiler process can be started"),
        ((sys.executable, "-S", "-c", "raise SystemExit('no jax')"), "did not start.*no jax"),
        ((sys.executable, "-S", "-c", "print('hello')"), "did not start: its first line"),
    ],
)
def test_without_processes_the_server_compiles(
    made: list[CompilerProcesses], command: tuple[str, ...], said: str
) -> None:
    made.append(CompilerProcesses(LIMITS, command))

    with pytest.raises(Refused, match=said):
        compiled(made[0])


def test_an_artifact_that_cannot_be_written_fails_one_load(
    processes: Callable[..., CompilerProcesses],
) -> None:
    one = processes()

    def artifact() -> bytes:
        raise ValueError("no vjp")

    with pytest.raises(ValueError, match="no vjp"):
        one.compile(job(), artifact, lambda: None)
    assert b"program of c" == compiled(one)


def test_a_process_is_told_nothing_of_the_servers_settings() -> None:
    given = {"XLASERVE_TOKEN_FILE": "x", "XLA_FLAGS": "--f", "PATH": "p", "JAX_PLATFORMS": "cuda"}

    found = pool.variables(given)

    assert {"XLA_FLAGS": "--f", "PATH": "p", "JAX_PLATFORMS": "cpu"}.items() <= found.items()
    assert "XLASERVE_TOKEN_FILE" not in found


def test_the_key_of_a_program_is_what_came_back(
    processes: Callable[..., CompilerProcesses],
) -> None:
    sha256 = hashlib.sha256(compiled(processes())).hexdigest()

    assert hashlib.sha256(b"program of c").hexdigest() == sha256
