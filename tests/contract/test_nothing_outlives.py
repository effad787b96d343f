"""No child process outlives a killed server, for every kind of process it starts."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import aiohttp
import psutil
import pytest
from support import python_models, tiny_chat
from support.process import served

from acceptance import children
from architecture import workers

SERVER = Path(__file__).parents[2] / "server"
MOST_SECONDS = 120
STARTERS = frozenset(
    {
        "subprocess.run",
        "start_shielded",
        "subprocess.Popen",
        "asyncio.create_subprocess_exec",
        "os.fork",
    }
)

KINDS = {
    "workers/worker_process.py: _started": "xlaserve.workers.worker",
    "python_models/process/running.py: RunningProcess.__init__": "xlaserve.python_models.process",
    "runtime/programs/compilers/process.py: CompilerProcess.__init__": (
        "xlaserve.runtime.programs.compilers.child"
    ),
    "runtime/trial.py: _run": "xlaserve.runtime.trial",
    "language/limited.py: _started": "xlaserve.language.template_process",
}
"""Kinds of child processes, and a text in their command lines."""
WORKER, TRIAL = "workers/worker_process.py: _started", "runtime/trial.py: _run"
COMPILER = "runtime/programs/compilers/process.py: CompilerProcess.__init__"
LIMITED, FORK = "language/limited.py: _started", "language/confining.py: _Fork.__init__"
TEMPLATE = KINDS[LIMITED]
NO_CHILDREN = {
    "app/successor.py: Successor.start": "it is the next server",
    "local/process.py: ServerProcess.__init__": "it is a server, which ends when its stdin does",
    "process/children.py: start_shielded": "it starts those above that have a row",
    "process/output.py: _started": (
        "it ends when nobody is left who could print: test_a_stopped_reader_ends_after_its_server"
    ),
    "process/endings.py: end_session_with_this": (
        "it looks for the end of its session, and ends then"
    ),
}
SLEEPS = 2
"""Processes started by the model code below."""
LEFT = "time.sleep(3600)"

CODE = """
import subprocess, sys

class Model(PythonModel):
    def load(self, context):
        # One that ignores a signal of its terminal, and below it one in a group of its own.
        code = (
            "import signal, subprocess, sys, time\\n"
            "signal.signal(signal.SIGHUP, signal.SIG_IGN)\\n"
            "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'],"
            " process_group=0)\\n"
            "time.sleep(3600)"
        )
        self.child = subprocess.Popen([sys.executable, "-c", code])

    def infer(self, inputs):
        return {"y": inputs["x"]}
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    process = "\nparameters { key: 'execution' value { string_value: 'process' } }"
    python_models.write(tmp_path, "starts", CODE, python_models.VECTORS + process)
    tiny_chat.export(tmp_path / "chat")
    return tmp_path


def test_every_process_that_the_server_starts_has_a_row() -> None:
    """A new kind must say how it exits with the server."""
    found = set(workers.places(SERVER, STARTERS))

    assert {*KINDS, FORK, *NO_CHILDREN} == found


def test_every_kind_of_child_is_stopped_and_killed() -> None:
    """Each has a row in the chaos test that stops and kills it."""
    watches = "process/endings.py: end_session_with_this"

    assert {*KINDS, FORK, watches} - {WORKER} == {kind.place for kind in children.KINDS.values()}


def below(pid: int) -> Iterator[psutil.Process]:
    """Return the descendants of a process."""
    return iter(psutil.Process(pid).children(recursive=True))


def said(process: psutil.Process) -> str:
    """Return a process's command line; empty if it has exited."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


async def until(holds: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(MOST_SECONDS):
        while not holds():
            await asyncio.sleep(0.02)


def runs(process: psutil.Process) -> bool:
    """Return whether a process is running."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


CHAT = {"model": "chat", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}


async def rendered(url: str) -> None:
    """Render the model's template, which starts its process."""
    async with (
        aiohttp.ClientSession(f"http://{url}") as session,
        session.post("/v1/chat/completions", json=CHAT) as answer,
    ):
        assert answer.status == 200, await answer.text()


def has(pid: int, text: str) -> bool:
    """Return whether a descendant has this text in its command line."""
    return any(text in said(one) for one in below(pid))


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["server", "parent", "worker"])
async def test_nothing_is_left_of_a_process_that_is_killed(repository: Path, victim: str) -> None:
    """Stopped processes exit as well, and processes started by a model's code."""
    flags = ["--allow-python-models"]
    flags += [] if victim == "server" else ["--processes", "2"]
    async with served(repository, *flags) as server:
        await server.until("started" if victim == "server" else "workers ready")
        await rendered(server.http)
        pids = [r["pid"] for r in server.log if r["event"] == "worker started"]
        top = server.process.pid
        if victim == "worker":
            top = next(pid for pid in pids if has(pid, TEMPLATE))
        of_models = 2 if victim == "parent" else 1
        await until(lambda: SLEEPS * of_models == sum(LEFT in said(one) for one in below(top)))
        left = list(below(top))
        kinds = {said(one) for one in left}
        next(one for one in left if TEMPLATE in said(one)).send_signal(signal.SIGSTOP)
        os.kill(top, signal.SIGKILL)
        await until(lambda: not any(map(runs, left)))

    expected = {*KINDS.values()} - {KINDS[TRIAL], KINDS[COMPILER]}
    expected -= {KINDS[WORKER]} if victim != "parent" else set()
    assert set() == {kind for kind in expected if not any(kind in text for text in kinds)}


BEGIN = "import os, subprocess, sys, time\n"
SHOW = "print(pid, flush=True)\ntime.sleep(3600)\n"
STARTING = {
    TRIAL: "from xlaserve.runtime.trial import COMMAND\n"
    "given = [*COMMAND, '/', '600', '0', str(os.getpid())]\n"
    "pid = subprocess.Popen(given, stdin=int(sys.argv[1])).pid\n",
    COMPILER: "from xlaserve.runtime.programs.compilers.pool import COMMAND, variables\n"
    "given = [*COMMAND, str(os.getpid()), '0']\n"
    "pid = subprocess.Popen(given, stdin=int(sys.argv[1]), env=variables()).pid\n",
    LIMITED: "from xlaserve.language.templates import Template\n"
    "one = Template({'default': 'a'}, {})\n"
    "one.render([])\n"
    "pid = one._process._process.pid\n"
    "os.kill(pid, 19)\n",
    FORK: "from xlaserve.language.limited import Limited, Limits\n"
    "one = Limited((sys.argv[2],), Limits(), {}, called='a', model='m')\n"
    "pid = one.ask({})['text']\n"
    "os.kill(pid, 19)\n",
    "the session of a Python model": "code = (\n"
    "    'import subprocess, sys, time\\n'\n"
    "    'from xlaserve.process.endings import end_session_with_this\\n'\n"
    "    'end_session_with_this()\\n'\n"
    '    \'again = [sys.executable, "-c", "import time; time.sleep(3600)"]\\n\'\n'
    "    'print(subprocess.Popen(again, process_group=0).pid, flush=True)\\n'\n"
    "    'time.sleep(3600)'\n"
    ")\n"
    "leader = subprocess.Popen(\n"
    "    [sys.executable, '-c', code], start_new_session=True, stdout=subprocess.PIPE\n"
    ")\n"
    "pid = int(leader.stdout.readline())\n"
    "leader.kill()\n",
}
"""Starts a process of each kind and prints its id; another process holds its input."""


FORKS = """
import os
from xlaserve.language import confining

confining.serve(lambda first: lambda asked: {"text": os.getpid()})
"""


@pytest.mark.parametrize("kind", STARTING)
async def test_it_ends_with_whoever_started_it(kind: str, tmp_path: Path) -> None:
    """Even if others hold its input open, its timeout is minutes away, or it is stopped."""
    (tmp_path / "forks.py").write_text(FORKS)
    reads, writes = os.pipe()
    code = BEGIN + STARTING[kind] + SHOW
    given = [sys.executable, "-c", code, str(reads), str(tmp_path / "forks.py")]
    with subprocess.Popen(  # noqa: ASYNC220 - it starts at once
        given, stdout=subprocess.PIPE, pass_fds=[reads]
    ) as parent:
        assert parent.stdout is not None
        started = psutil.Process(int(parent.stdout.readline()))
        try:
            parent.kill()
            await until(lambda: not runs(started))
        finally:
            os.close(reads)
            os.close(writes)
            with suppress(psutil.NoSuchProcess):
                started.kill()
