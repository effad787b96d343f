"""Children of a server do not hear what is meant for it; what they start themselves does."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import xlaserve
from xlaserve.process.children import FOR_THE_SERVER, started_deaf

ROOT = Path(xlaserve.__file__).parent
STARTS = ("Popen", "create_subprocess_exec", "create_subprocess_shell", "subprocess_exec")
HEARING = dict.fromkeys(("app/successor.py", "local/process.py"), "it is a server itself")
COMMANDS = ("bench/", "cli/")
"""What ends with the command that starts it, by whoever reads the terminal."""
READY = "import signal, sys\n"
LAST = "print('ready', flush=True)\nsys.stdin.readline()\nprint('alive', flush=True)\n"
STARTED = """
from xlaserve.process.children import stay_deaf
import os, subprocess, time
stay_deaf()
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


def starts(tree: ast.AST, *, is_deaf: bool = False) -> Iterator[tuple[int, bool]]:
    """Yield the lines that start a process, and whether that is in a block that makes it deaf."""
    for node in ast.iter_child_nodes(tree):
        inside = is_deaf
        if isinstance(node, ast.With):
            inside = is_deaf or "started_deaf()" in {
                ast.unparse(item.context_expr) for item in node.items
            }
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in STARTS:
            yield node.lineno, inside
        yield from starts(node, is_deaf=inside)


def test_every_process_that_the_server_starts_is_deaf() -> None:
    """One that is not is blamed on a model when all processes of the server are told to end."""
    found = {}
    for file in sorted(ROOT.rglob("*.py")):
        name = str(file.relative_to(ROOT))
        if name.startswith(COMMANDS) or name in HEARING:
            continue
        text = file.read_text()
        if not any(one in text for one in STARTS):
            continue
        for line, is_deaf in starts(ast.parse(text)):
            found[f"{name}:{line}"] = is_deaf

    assert len(found) >= 5
    assert [] == [where for where, is_deaf in found.items() if not is_deaf]


def started(code: str) -> "subprocess.Popen[str]":
    with started_deaf():
        return subprocess.Popen(
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


@pytest.mark.parametrize("code", [BY_EXEC, BY_FORK])
def test_what_the_code_of_others_starts_hears(code: str) -> None:
    """`terminate` of a process that a model started would wait for ever."""
    with started(STARTED + code) as child:
        out, _ = child.communicate("\n")

    assert ["-15", "ready", "alive"] == out.split()


def test_whoever_starts_them_hears_as_before() -> None:
    code = """
from xlaserve.process.children import started_deaf
with started_deaf():
    pass
print(len(signal.pthread_sigmask(signal.SIG_BLOCK, [])), flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", READY + code], capture_output=True, text=True, check=True
    )
    assert "0\n" == done.stdout
