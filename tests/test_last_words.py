"""When a server process ends unexpectedly, the log says how, with its last output."""

import ast
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

import xlaserve
from xlaserve.artifact import manifest
from xlaserve.errors import InvalidModel
from xlaserve.errors.language import TemplateFailed
from xlaserve.language import templates
from xlaserve.process import last_words
from xlaserve.runtime import trial
from xlaserve.runtime.programs.compilers.pool import _NO_JOB, CompilerProcesses, Limits, Refused

SERVER = Path(xlaserve.__file__).parent
DYING = 'import sys; print("no library of that name", file=sys.stderr); sys.exit(7)'
COMMAND = (sys.executable, "-c", DYING)


def of_template(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(templates, "_PROGRAM", ("-c", DYING))
    with pytest.raises(TemplateFailed) as refused:
        templates.Template({"default": "hi"}, {}, "m").render([{"role": "user", "content": "a"}])
    return str(refused.value)


def of_trial(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (folder / manifest.ARTIFACT).write_bytes(b"")
    with pytest.raises(InvalidModel) as refused:
        trial.try_loading(folder, 60.0, command=COMMAND)
    return str(refused.value)


def of_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    processes = CompilerProcesses(Limits(1, 1 << 30, 60.0, 60.0), COMMAND)
    try:
        with pytest.raises(Refused) as refused:
            processes.compile(_NO_JOB, bytes, lambda: None)
    finally:
        processes.close()
    return str(refused.value)


ENDINGS: Mapping[str, tuple[str, Callable[[Path, pytest.MonkeyPatch], str]]] = {
    "language/limited.py": ("chat template", of_template),
    "runtime/trial.py": ("trial load", of_trial),
    "runtime/programs/compilers/process.py": ("compile process", of_compiler),
}
"""Module that starts a process -> its name in the log, and a function that makes one end."""

OTHERWISE = {
    "process/endings.py": "a fork that looks for the end of a process, and prints nothing",
    "language/confining.py": "a fork of a process of limited.py, which answers how it has ended",
    "python_models/process/running.py": "every line that it prints is logged as it comes",
    "workers/worker_process.py": "a worker writes to the log itself",
    "process/output.py": "it reads what others print, and is started again",
    "process/children.py": "it starts those of others, which are here",
    "app/successor.py": "a successor writes to the log itself",
    "local/process.py": "a server writes to the log itself",
}


@pytest.mark.parametrize("module", ENDINGS)
def test_the_log_has_the_last_words_of_a_process(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, end_one = ENDINGS[module]
    with capture_logs() as log:
        told = end_one(tmp_path, monkeypatch)
    ends = [line for line in log if line["event"] == "process ended"]

    assert [(name, "no library of that name")] == [
        (one["process"], one["last_output"]) for one in ends
    ]
    assert "exit status 7" in ends[0]["reason"]
    assert "no library of that name" in told
    assert "exit status 7" in told


def test_every_place_that_starts_a_process_is_in_the_table() -> None:
    starting = {
        str(path.relative_to(SERVER))
        for path in SERVER.rglob("*.py")
        if _starts_process(ast.parse(path.read_text()))
    }

    assert starting == {*ENDINGS, *OTHERWISE}


def _starts_process(module: ast.Module) -> bool:
    names: set[Any] = {
        node.func.attr
        for node in ast.walk(module)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) in ("subprocess", "asyncio", "os")
    }
    if "start_shielded(" in ast.unparse(module):
        return True
    return bool(
        names & {"Popen", "run", "check_output", "check_call", "create_subprocess_exec", "fork"}
    ) and ("subprocess" in ast.unparse(module) or "fork" in names)


@pytest.mark.parametrize(
    ("status", "expected"),
    [(1, "exit status 1"), (-9, "SIGKILL"), (-99, "signal 99")],
)
def test_an_end_has_a_name(status: int, expected: str) -> None:
    assert expected == last_words.how(status)


def test_of_much_that_was_said_the_end_is_kept() -> None:
    with capture_logs() as log:
        last_words.tell("x", "y", b"a" * 100_000 + b"\nValueError: here\n\xff", "m")

    assert last_words.MAX_BYTES == len(log[0]["last_output"])
    assert log[0]["last_output"].endswith("ValueError: here\n\ufffd")
