"""D9: SIGSTOP and SIGKILL of each kind of child process while it works."""

# pyright: reportAttributeAccessIssue=false
# protobuf generates the classes of service_pb2 at import time, so type checkers do not see them.

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any

import grpc
import psutil
from support import python_models, scripted_language, several
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from acceptance.figures import Outcome
from acceptance.stage import MOST_SECONDS, Stage, Turns, asked, halves, served, until
from acceptance.subjects import export_plus

REPLACED_SECONDS = 15.0
_REPLACED, _ENDED = "replaced within", "what waited ended within"
_LIMITS = {_REPLACED: REPLACED_SECONDS, _ENDED: MOST_SECONDS}
DRAIN_SECONDS = 6
_ENDING_SECONDS = 5.0
"""Seconds a server may take to exit, in addition to its grace period."""
_POLL_SECONDS = 0.005
_BUSY_SECONDS = 0.02
"""CPU seconds after which a process counts as working."""
_CONFIG = several.CONFIG + "\nparameters { key: 'execution' value { string_value: 'process' } }"
_SPINS = """
import os, time
until = time.monotonic() + float(x[0])
while time.monotonic() < until:
    pass
return {'y': np.full(1, os.getpid(), np.int64)}
"""
_LONG = (
    "{% if messages[-1].content|length > 9 %}"
    "{% for i in range(1000) %}{% for j in range(9000) %}{% endfor %}{% endfor %}{% endif %}"
)
_LAST_TURN = 1000
SIGNALS = {"SIGSTOP": signal.SIGSTOP, "SIGKILL": signal.SIGKILL}


@dataclass(frozen=True)
class Kind:
    """A kind of child process, and the request that keeps it busy."""

    place: str
    """Module and function of the server that start it."""
    module: str
    """Part of its command line."""
    work: Callable[[Stage, int], None]
    """Makes it work, differently for each number; raises OSError or RpcError on failure."""
    among: Callable[[psutil.Process], Sequence[psutil.Process]] = lambda process: (process,)
    """Returns the victims for a process with this command line; the process itself by default."""
    ends: str = ""
    """Error that the waiting request gets; empty if another child redoes the work."""


def _post(stage: Stage, path: str, body: Mapping[str, Any]) -> None:
    connection = stage.connect()
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        said = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise OSError(f"{answer.status} {said[:300]!r}")


def _spin(stage: Stage, number: int) -> None:
    spins = {"name": "x", "datatype": "FP32", "shape": [1], "data": [2.0]}
    _post(stage, "/v2/models/spawned/infer", {"inputs": [spins]})


def _chat(stage: Stage, number: int, **more: Any) -> None:
    messages = [{"role": "user", "content": f"0{'' if more else ' a long one'}"}]
    body = {"model": "chat", "messages": messages, "max_tokens": 1, **more}
    _post(stage, "/v1/chat/completions", body)


def _follow(stage: Stage, number: int) -> None:
    # The grammar needs a state per remainder. Verdicts on grammars are cached, so use a new modulus
    # each time; all are coprime with 10.
    schema = {"type": "integer", "multipleOf": 40_001 + 10 * number}
    said = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    _chat(stage, number, response_format=said)


def _tokenize(stage: Stage, number: int) -> None:
    # From every letter, the slow regular expression backtracks to the end of the text.
    body = {"model": "slow", "prompt": "ab" * 7_500 + " 0", "max_tokens": 1}
    try:
        _post(stage, "/v1/completions", body)
    except OSError as error:
        # An error about too many tokens is expected: the server counted them after tokenizing.
        if "context_length_exceeded" not in str(error):
            raise


def _load(stage: Stage, number: int) -> None:
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(stage.grpc, options) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        request = pb.RepositoryModelLoadRequest(model_name="sent")
        # A configuration that has not been compiled before.
        config = {"max_batch_size": 4, "parameters": {"batch_sizes": {"string_value": "1,2,4"}}}
        request.parameters["config"].string_param = json.dumps(config)
        for path in (stage.launch.folder / "plus" / "1").iterdir():
            request.parameters[f"file:1/{path.name}"].bytes_param = path.read_bytes()
        try:
            stub.RepositoryModelLoad(request, timeout=MOST_SECONDS)
            stub.RepositoryModelUnload(
                pb.RepositoryModelUnloadRequest(model_name="sent"), timeout=MOST_SECONDS
            )
        except grpc.RpcError as error:
            raise OSError(str(error)) from None


def _forks(process: psutil.Process) -> Sequence[psutil.Process]:
    return tuple(process.children())


def _session(process: psutil.Process) -> Sequence[psutil.Process]:
    """Return the process that watches for the end of a session; the server is not its parent."""
    found = []
    for one in psutil.process_iter():
        with suppress(OSError):
            if os.getsid(one.pid) == process.pid != one.pid:
                found.append(one)
    return found


_LIMITED, _FORK = "language/limited.py: _started", "language/confining.py: _Fork.__init__"
_OF_MODELS = "xlaserve.python_models.process.child"
_LOST = "its process was lost"

KINDS: Mapping[str, Kind] = {
    "Python model": Kind(
        "python_models/process/running.py: RunningProcess.__init__", _OF_MODELS, _spin, ends=_LOST
    ),
    "watcher of a session": Kind(
        "process/endings.py: end_session_with_this", _OF_MODELS, _spin, _session, _LOST
    ),
    "template": Kind(_LIMITED, "template_process", _chat),
    "grammars": Kind(_LIMITED, "grammar_process", _follow),
    "fork for grammars": Kind(_FORK, "grammar_process", _follow, _forks),
    "tokenizer": Kind(_LIMITED, "tokenizer_process", _tokenize),
    "fork for texts": Kind(_FORK, "tokenizer_process", _tokenize, _forks),
    "compile process": Kind(
        "runtime/programs/compilers/process.py: CompilerProcess.__init__",
        "xlaserve.runtime.programs.compilers.child",
        _load,
    ),
    "trial load": Kind("runtime/trial.py: _run", "xlaserve.runtime.trial", _load),
}
"""Every kind of child process; a test fails if the server starts one that has no row here."""


def end_each(
    folder: Path,
    *,
    count: int = 20,
    kinds: Sequence[str] = tuple(KINDS),
    signals: Sequence[str] = tuple(SIGNALS),
    timed: bool = True,
) -> Outcome:
    """Stop and kill a child of each kind several times, every other time under a watchdog.

    `timed` enables the time limits; a busy machine may take longer to start a process.
    """
    outcome = Outcome()
    seen = {(name, number): Turns() for name in kinds for number in signals}
    for place, turns, has_watchdog in halves(folder, count):
        _served(place, seen, turns, outcome, has_watchdog=has_watchdog, timed=timed)
    for (name, number), one in seen.items():
        one.judge(f"{name}, {number}", count, _LIMITS, outcome, timed=timed)
    return outcome


def write_subjects(folder: Path) -> dict[str, Any]:
    """Write the models that the kinds work on; return flags of a server for them."""
    models = folder / "models"
    python_models.write_function(models, "spawned", _SPINS, _CONFIG)
    how: dict[str, Any] = {"template": scripted_language.HERMES + _LONG, "scripts": ["12"]}
    scripted_language.export(models / "chat", **how, grammars="true")
    slow = scripted_language.export(models / "slow", **how)
    _make_slow(slow / "1" / "tokenizer.json")
    export_plus(folder, "plus", 1)
    # High limits, so that long work is stopped halfway rather than rejected.
    limits = ("template_seconds", "tokenizer_seconds", "grammar_seconds")
    return {**dict.fromkeys(limits, 60), "compile_processes": 1}


def _served(
    folder: Path,
    seen: Mapping[tuple[str, str], Turns],
    turns: int,
    outcome: Outcome,
    *,
    has_watchdog: bool,
    timed: bool,
) -> None:
    models, temporary = folder / "models", folder / "temporary"
    temporary.mkdir(parents=True)
    flags = write_subjects(folder) | {"drain_seconds": DRAIN_SECONDS}
    # Limits a stop: if a child was stopped, another one redoes its request meanwhile.
    flags["grace_seconds"] = DRAIN_SECONDS
    variables = {"TMPDIR": str(temporary)}
    with served(folder, flags, has_watchdog=has_watchdog, variables=variables) as stage:
        files, held = _files(models), _held(stage)
        for turn in range(turns):
            for place, ((name, number), one) in enumerate(seen.items()):
                # Verdicts on grammars are cached, so every turn has another number.
                _turn(stage, KINDS[name], SIGNALS[number], turn * len(seen) + place, one)
        _returns(outcome, "bytes on the ledger as at the start", lambda: held == _held(stage))
        _stopped(stage, [KINDS[name] for name, _ in seen], outcome, timed=timed)
        outcome.none("files left, in the temporary directory", sorted(_files(temporary)))
        outcome.none("files left, beside models", sorted(_files(models) ^ files))


def _turn(stage: Stage, kind: Kind, number: int, turn: int, seen: Turns) -> None:
    said: list[str] = []
    work = partial(_worked, stage, kind, turn, said)
    before = _times(stage, kind)
    working = threading.Thread(target=work, daemon=True)
    kept = stage.connect()
    with asked([None, kept], stage, seen.others):
        working.start()
        try:
            victim = _victim(stage, kind, before, working)
            began = time.monotonic()
            known = {*before, victim.pid}
            victim.send_signal(number)
            if kind.among is _session:
                # No request waits for this process; with it gone, killing the session leader ends
                # the whole session.
                os.kill(os.getsid(victim.pid), signal.SIGKILL)
            until(lambda: bool(_times(stage, kind).keys() - known) or not working.is_alive())
            seen.note(_REPLACED, time.monotonic() - began)
            working.join(MOST_SECONDS)
            seen.note(_ENDED, time.monotonic() - began)
            expected = _LOST if kind.among is _session else kind.ends
            if working.is_alive() or not (
                said[0] == expected or (expected and expected in said[0])
            ):
                seen.problems.append(f"what waited: {said or 'no end'}")
            until(lambda: not _is_there(victim))
            until(lambda: not _worked(stage, kind, turn, []))
        except (OSError, psutil.Error) as error:
            working.join(MOST_SECONDS)
            seen.problems.append(f"{type(error).__name__}: {error}: {said or 'no end'}")
    kept.close()


def _worked(stage: Stage, kind: Kind, turn: int, said: list[str]) -> str:
    """Have a child work; record and return the error text, empty on success."""
    try:
        kind.work(stage, turn)
    except (OSError, HTTPException) as error:
        said.append(str(error))
    else:
        said.append("")
    return said[0]


def _victim(
    stage: Stage, kind: Kind, before: Mapping[int, float], working: threading.Thread
) -> psutil.Process:
    """Return a child, or the process that forked it, as soon as it uses CPU time."""
    end = time.monotonic() + MOST_SECONDS
    while time.monotonic() < end and working.is_alive():
        for process in _processes(stage, kind):
            with suppress(psutil.Error):
                found = kind.among(process)
                busy = (process, *process.children())
                spent = max(_spent(one) - before.get(one.pid, 0.0) for one in busy)
                if found and spent >= _BUSY_SECONDS:
                    return found[0]
        time.sleep(_POLL_SECONDS)
    raise OSError("no child was seen to work")


def _processes(stage: Stage, kind: Kind) -> Iterator[psutil.Process]:
    for pid in stage.descendants(kind.module):
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            # A forked process has the command line of its parent.
            if kind.module not in " ".join(psutil.Process(process.ppid()).cmdline()):
                yield process


def _times(stage: Stage, kind: Kind) -> Mapping[int, float]:
    """Return the CPU seconds used by each child, by process id."""
    found = {}
    for process in _processes(stage, kind):
        with suppress(psutil.Error):
            for one in {*kind.among(process), process, *process.children()}:
                found[one.pid] = _spent(one)
    return found


def _spent(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _is_there(process: psutil.Process) -> bool:
    """Tell whether a process still exists, even as a zombie."""
    return bool(process.is_running())


def _stopped(stage: Stage, kinds: Sequence[Kind], outcome: Outcome, *, timed: bool) -> None:
    """Stop the server while all of its children are suspended in the middle of their work."""
    assert stage.launch.process is not None
    works = [partial(_worked, stage, kind, _LAST_TURN, []) for kind in dict.fromkeys(kinds)]
    before = [_times(stage, kind) for kind in kinds]
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for kind, times, thread in zip(kinds, before, threads, strict=False):
        with suppress(OSError):
            _victim(stage, kind, times, thread)
    server = psutil.Process(stage.launch.process.pid)
    children = {
        one for kind in kinds for process in _processes(stage, kind) for one in kind.among(process)
    }
    children |= set(server.children(recursive=True))
    for child in children:
        with suppress(psutil.Error):
            child.suspend()
    began = time.monotonic()
    status = stage.launch.stop()
    seconds = time.monotonic() - began
    most = DRAIN_SECONDS + _ENDING_SECONDS  # the children have the same grace period
    if timed:
        outcome.at_most("a stop beside stopped children", round(seconds, 2), most, " s")
    else:
        outcome.note("a stop beside stopped children", f"{seconds:.2f} s")
    outcome.at_most("its status", abs(status), 0)
    _returns(outcome, "children left", lambda: not any(map(_is_there, children)))
    for thread in threads:
        thread.join(MOST_SECONDS)
    outcome.none("requests without an end", [t.name for t in threads if t.is_alive()])


def _returns(outcome: Outcome, what: str, holds: Callable[[], bool]) -> None:
    try:
        until(holds)
    except TimeoutError:
        outcome.add(what, "no", "so", holds=False)
    else:
        outcome.add(what, "so", "so", holds=True)


def _held(stage: Stage) -> Sequence[str]:
    connection = stage.connect()
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    return [one for one in lines if one.startswith("xlaserve_held_bytes{") and "spare" not in one]


def _files(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*") if "__pycache__" not in path.parts}


def _make_slow(path: Path) -> None:
    """Give a tokenizer a regular expression that may backtrack."""
    found = json.loads(path.read_text())
    pattern = {"type": "Split", "pattern": {"Regex": "(?:a|b)+[cx]"}, "behavior": "Isolated"}
    parts = [pattern | {"invert": False}, found["pre_tokenizer"]]
    found["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": parts}
    path.write_text(json.dumps(found))
