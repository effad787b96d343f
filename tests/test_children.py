"""Children of a server ignore signals sent to its group, and files of the working directory."""

import ast
import asyncio
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import pytest
import structlog

import xlaserve
from xlaserve.artifact import manifest
from xlaserve.errors import InvalidModel
from xlaserve.language.templates import Template
from xlaserve.local.process import NotServing, ServerProcess
from xlaserve.offline.targets.compiling import Compilers
from xlaserve.offline.targets.jobs import Job
from xlaserve.process.children import FOR_THE_SERVER, start_shielded
from xlaserve.python_models.process.printing import ProcessLog
from xlaserve.python_models.process.running import RunningProcess
from xlaserve.runtime import trial
from xlaserve.runtime.programs.compilers.pool import CompilerProcesses, Limits
from xlaserve.workers.worker_process import Role, WorkerProcess

ROOT = Path(xlaserve.__file__).parent
STARTS = ("Popen", "create_subprocess_exec", "create_subprocess_shell", "subprocess_exec")
HEARING = dict.fromkeys(("app/successor.py", "local/process.py"), "it is a server itself")
DEAF = start_shielded.__name__
COMMANDS = ("bench/", "cli/")
"""Commands whose processes the terminal should stop along with them."""
READY = "import signal, sys\n"
LAST = "print('ready', flush=True)\nsys.stdin.readline()\nprint('alive', flush=True)\n"
STARTED = """
from xlaserve.process.children import shield_from_signals
import os, subprocess, time
shield_from_signals()
"""
BY_EXEC = """
one = subprocess.Popen([sys.executable, "-c", "print(1, flush=True); import time; time.sleep(600)"],
                       stdout=subprocess.PIPE)
one.stdout.readline()
one.terminate()
print(one.wait(), flush=True)
"""
BY_FORK = """
one = os.fork()
if not one:
    time.sleep(600)
os.kill(one, signal.SIGTERM)
print(-os.WTERMSIG(os.waitpid(one, 0)[1]), flush=True)
"""


def starts() -> Mapping[str, Counter[str]]:
    """Count the calls that start a process, by module."""
    found = {}
    for file in sorted(ROOT.rglob("*.py")):
        name, text = str(file.relative_to(ROOT)), file.read_text()
        if name.startswith(COMMANDS) or not any(one in text for one in (*STARTS, DEAF)):
            continue
        calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
        called = Counter(ast.unparse(call.func).rpartition(".")[2] for call in calls)
        if any(called[one] for one in (*STARTS, DEAF)):
            found[name] = called
    return found


def test_every_process_that_the_server_starts_is_deaf() -> None:
    """Otherwise its end by a signal to the whole group would be blamed on a model."""
    found = {name for name, called in starts().items() if any(called[one] for one in STARTS)}

    assert {"process/children.py", *HEARING} == found


def started(code: str) -> "subprocess.Popen[str]":
    return start_shielded(
        [sys.executable, "-c", READY + code + LAST],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("code", ["", STARTED])
def test_a_child_hears_nothing(code: str) -> None:
    with started(code) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert "ready\n" == child.stdout.readline()
        for number in FOR_THE_SERVER:
            child.send_signal(number)
        child.stdin.write("\n")
        child.stdin.flush()
        said = child.stdout.readline()

    assert ("alive\n", 0) == (said, child.returncode)


def test_a_child_is_deaf_from_its_first_instruction_on() -> None:
    """The kernel sets the mask before any interpreter could; other signals are not blocked."""
    with start_shielded(["cat", "/proc/self/status"], stdout=subprocess.PIPE, text=True) as child:
        told = dict(line.split(":", 1) for line in child.communicate()[0].splitlines())
    blocked = int(told["SigBlk"], 16)
    ours = signal.pthread_sigmask(signal.SIG_BLOCK, [])

    found = {number for number in signal.valid_signals() if blocked >> (number - 1) & 1}
    assert {*ours, *FOR_THE_SERVER} == found


@pytest.mark.parametrize("code", [BY_EXEC, BY_FORK])
def test_what_the_code_of_others_starts_hears(code: str) -> None:
    """Otherwise `terminate` of a process that a model started would wait forever."""
    with started(STARTED + code) as child:
        out, _ = child.communicate("\n")

    assert ["-15", "ready", "alive"] == out.split()


def test_whoever_starts_them_hears_as_before() -> None:
    code = """
from xlaserve.process.children import shielded_start
with shielded_start():
    pass
print(len(signal.pthread_sigmask(signal.SIG_BLOCK, [])), flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", READY + code], capture_output=True, text=True, check=True
    )
    assert "0\n" == done.stdout


SHADOW = """
import posix
flags = posix.O_CREAT | posix.O_WRONLY | posix.O_APPEND
posix.write(posix.open({marker!r}, flags, 0o600), b"{name} ")
raise ImportError("a file of the working directory was imported")
"""
"""Content of a file in the working directory; `posix` is the one module that no file can shadow."""
SECONDS = 240.0
RAW = "import os; from xlaserve.process.output import logged_output as o\n"
RAW += "with o('info'): os.write(2, b'native\\n')"


def of_reader(folder: Path) -> None:
    command = [sys.executable, "-P", "-c", RAW]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=SECONDS)
    assert "raw output printed" in ended.stderr, ended


def of_trial(folder: Path) -> None:
    (folder / manifest.ARTIFACT).write_bytes(b"")
    with pytest.raises(InvalidModel):
        trial.try_loading(folder, SECONDS)


def of_compiler(folder: Path) -> None:
    processes = CompilerProcesses(Limits(1, 1 << 33, SECONDS, SECONDS))
    try:
        processes.start_ahead(SECONDS)
    finally:
        processes.close()


def of_planner(folder: Path) -> None:
    with Compilers(most=1) as compilers:
        (done,) = compilers.compile([Job("m", str(folder / "missing"), "cpu")])
    assert done.problem is not None


def of_model(folder: Path) -> None:
    running = RunningProcess(ProcessLog(structlog.get_logger()), SECONDS, 0)
    running.pipe.close()
    assert running.wait(SECONDS)
    running.end("over")


def of_worker(folder: Path) -> None:
    """It imports everything before it reads its configuration."""

    async def ended() -> str:
        worker = await WorkerProcess.ahead(Role(0, {}, (), SECONDS), imports=False)
        return await worker.ended()

    asyncio.run(ended())


def of_local(folder: Path) -> None:
    server = ServerProcess({"repository": str(folder), "no_such_setting": 1})
    try:
        with suppress(NotServing):
            server.started(SECONDS)
    finally:
        server.close()


def of_template(folder: Path) -> None:
    assert "hi" == Template({"default": "hi"}, {}, "m").render([{"role": "user", "content": "a"}])


IMPORTING: Mapping[str, tuple[str, Callable[[Path], None]]] = {
    "reader of output": ("process/output.py", of_reader),
    "trial load": ("runtime/trial.py", of_trial),
    "compile process": ("runtime/programs/compilers/process.py", of_compiler),
    "process that plans": ("runtime/programs/compilers/process.py", of_planner),
    "Python model": ("python_models/process/running.py", of_model),
    "worker": ("workers/worker_process.py", of_worker),
    "server of Python code": ("local/process.py", of_local),
    "template": ("language/limited.py", of_template),
}
"""Processes of the server: the module that starts them, and a function that starts one."""
OF_A_CALLER = {
    "app/successor.py": "it has the command of its predecessor, thus of whoever started that one",
    "process/children.py": "it starts those of others, which are here",
}


@pytest.mark.parametrize("process", IMPORTING)
def test_no_process_imports_a_file_of_the_working_directory(
    process: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server may be started in a directory of models, or of anything else: `signal.py`."""
    home, marker, folder = tmp_path / "home", tmp_path / "imported", tmp_path / "folder"
    home.mkdir()
    folder.mkdir()
    for name in sys.stdlib_module_names - {*sys.builtin_module_names}:
        (home / f"{name}.py").write_text(SHADOW.format(marker=str(marker), name=name))
    monkeypatch.chdir(home)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    IMPORTING[process][1](folder)

    assert not marker.exists(), marker.read_text()


def test_every_process_that_the_server_starts_is_tried_so() -> None:
    assert {module for module, _ in IMPORTING.values()} | {*OF_A_CALLER} == {*starts()}
