"""Children of a server ignore signals sent to its group; their own children do not."""

import ast
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import xlaserve
from xlaserve.process.children import FOR_THE_SERVER, start_deaf

ROOT = Path(xlaserve.__file__).parent
STARTS = ("Popen", "create_subprocess_exec", "create_subprocess_shell", "subprocess_exec")
HEARING = dict.fromkeys(("app/successor.py", "local/process.py"), "it is a server itself")
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


def test_every_process_that_the_server_starts_is_deaf() -> None:
    """Otherwise its end by a signal to the whole group would be blamed on a model."""
    found = Counter[str]()
    for file in sorted(ROOT.rglob("*.py")):
        name = str(file.relative_to(ROOT))
        if name.startswith(COMMANDS) or name in HEARING:
            continue
        text = file.read_text()
        if not any(one in text for one in (*STARTS, start_deaf.__name__)):
            continue
        calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
        called = Counter(ast.unparse(call.func).rpartition(".")[2] for call in calls)
        found[name] = sum(called[one] for one in STARTS)
        found[start_deaf.__name__] += called[start_deaf.__name__]

    assert {"process/children.py": 1, "start_deaf": 6} == dict(+found)


def started(code: str) -> "subprocess.Popen[str]":
    return start_deaf(
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
    with start_deaf(["cat", "/proc/self/status"], stdout=subprocess.PIPE, text=True) as child:
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
