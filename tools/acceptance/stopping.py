"""D8: SIGSTOP of each kind of process, with and without a watchdog."""

# pyright: reportAttributeAccessIssue=false
# protobuf makes the classes of service_pb2 when it is imported, where no checker sees them.

import json
import os
import signal
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import grpc
import psutil
from support import python_models, scripted_language, several
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from acceptance.figures import Outcome
from acceptance.subjects import Launch, export_plus

UNREADY_SECONDS = 3.0
REPLACED_SECONDS = 15.0
_MOST_SECONDS = 90.0
_PACE_SECONDS = 0.02
_WATCHDOG_SECONDS = 6.0
_TURN_SECONDS = 16.0
"""Interval of crashes: five within a minute would end the server."""
_IN_PROCESS = "\nparameters { key: 'execution' value { string_value: 'process' } }"


@dataclass
class Stage:
    """A server, and connections that stay with one of its processes each."""

    launch: Launch
    http: str = ""
    grpc: str = ""
    connections: dict[int, list[HTTPConnection]] = field(default_factory=dict)
    """Connections for readiness checks and concurrent requests, by the process that answers on
    them.
    """
    compiled: int = 0
    """Grammars that were asked for."""

    def started(self) -> list[tuple[int, int]]:
        """Return the numbers and ids of all workers that were started, in order."""
        found = []
        for line in self.launch.log.read_text().splitlines():
            with suppress(ValueError):
                record = json.loads(line)
                if record.get("event") == "worker started":
                    found.append((record["of"], record["pid"]))
        return found

    def worker(self, number: int) -> int:
        """Return the current process of a worker."""
        return dict(self.started())[number]

    def ask(self, connection: HTTPConnection, model: str = "who") -> int:
        """Send a request; return the process that answered. Raises OSError."""
        body = json.dumps(several.who())
        connection.request("POST", f"/v2/models/{model}/infer", body)
        answer = connection.getresponse()
        said = answer.read()
        if answer.status != 200:
            raise OSError(f"{answer.status} {said[:200]!r}")
        return int(json.loads(said)["outputs"][0]["data"][0])

    def connect(self) -> HTTPConnection:
        """Return a new connection."""
        return HTTPConnection(self.http, timeout=_MOST_SECONDS)

    def connect_all(self, count: int) -> None:
        """Have two connections to each of so many processes."""
        for pid in [pid for pid in self.connections if not psutil.pid_exists(pid)]:
            self.leave(pid)
        while sum(len(found) for found in self.connections.values()) < 2 * count:
            connection = self.connect()
            with suppress(OSError, HTTPException):
                self.ask(connection)
                found = self.connections.setdefault(self.owner(connection), [])
                if len(found) < 2:
                    found.append(connection)
                    continue
            connection.close()
            time.sleep(_PACE_SECONDS)

    def owner(self, connection: HTTPConnection) -> int:
        """Return the process at the other end of a connection; raises OSError."""
        assert connection.sock is not None
        assert self.launch.process is not None
        _, port = connection.sock.getsockname()[:2]
        server = psutil.Process(self.launch.process.pid)
        for one in (*server.children(recursive=True), server):
            with suppress(psutil.Error):
                listed = getattr(one, "net_connections", None) or one.connections
                if any(end.raddr and end.raddr.port == port for end in listed("tcp")):
                    return one.pid
        raise OSError("nobody has it")

    def leave(self, pid: int) -> None:
        """Close the connections to a process."""
        for connection in self.connections.pop(pid, ()):
            connection.close()

    @property
    def looking(self) -> HTTPConnection:
        """Return a connection to one that is not stopped, to look."""
        return next(iter(self.connections.values()))[0]

    def says(self, connection: HTTPConnection, path: str) -> bool:
        """Tell whether something is ready."""
        connection.request("GET", path)
        answer = connection.getresponse()
        answer.read()
        return answer.status == 200

    def descendants(self, module: str) -> list[int]:
        """Return the processes below the server that run a module, or script."""
        assert self.launch.process is not None
        found = []
        for one in psutil.Process(self.launch.process.pid).children(recursive=True):
            with suppress(psutil.Error):
                if any(module in part for part in one.cmdline()):
                    found.append(one.pid)
        return found

    @property
    def stub(self) -> "service_pb2_grpc.GRPCInferenceServiceStub":
        """Return a client over gRPC."""
        options = [("grpc.use_local_subchannel_pool", 1)]
        return service_pb2_grpc.GRPCInferenceServiceStub(grpc.insecure_channel(self.grpc, options))

    def load_sent(self) -> None:
        """Load a model whose files come with the request, and unload it; raises RpcError."""
        request = pb.RepositoryModelLoadRequest(model_name="sent")
        # One that was not compiled before.
        config = {"max_batch_size": 4, "parameters": {"batch_sizes": {"string_value": "1,2,4"}}}
        request.parameters["config"].string_param = json.dumps(config)
        for path in (self.launch.folder / "plus" / "1").iterdir():
            request.parameters[f"file:1/{path.name}"].bytes_param = path.read_bytes()
        self.stub.RepositoryModelLoad(request, timeout=_MOST_SECONDS)
        self.stub.RepositoryModelUnload(
            pb.RepositoryModelUnloadRequest(model_name="sent"), timeout=_MOST_SECONDS
        )

    def chat(self) -> None:
        """Have a template rendered; raises OSError."""
        self.post("chat/completions", model="chat", messages=[{"role": "user", "content": "0"}])

    def follow(self) -> None:
        """Have a grammar compiled that was not compiled before; raises OSError."""
        self.compiled += 1
        said = {"type": "json_schema", "json_schema": {"name": "a", "schema": self.schema()}}
        messages = [{"role": "user", "content": "0"}]
        self.post("chat/completions", model="chat", messages=messages, response_format=said)

    def schema(self) -> Mapping[str, Any]:
        """Return a schema that no other turn uses."""
        return {"type": "integer", "maximum": self.compiled}

    def tokenize(self) -> None:
        """Have tokens made of a text by a tokenizer that may take long; raises OSError."""
        self.post("completions", model="slow", prompt="0")

    def post(self, path: str, **body: Any) -> None:
        """Ask as OpenAI's clients do; raises OSError."""
        connection = self.connect()
        connection.request(
            "POST",
            f"/v1/{path}",
            json.dumps({**body, "max_tokens": 1}),
            {"Content-Type": "application/json"},
        )
        answer = connection.getresponse()
        said = answer.read()
        connection.close()
        if answer.status != 200:
            raise OSError(f"{answer.status} {said[:200]!r}")


@dataclass(frozen=True)
class Kind:
    """A kind of process, and the visible effects of stopping it."""

    layout: str
    stop: Callable[[Stage], "Stopped"]


@dataclass
class Stopped:
    """A stopped process: when it stopped, what fails meanwhile, and how it ends."""

    pid: int
    unready: str
    """Path of the readiness check that fails meanwhile; empty where none does."""
    wait: Callable[[], None]
    """Returns once the replacement works; raises if it failed."""
    end: Callable[[], None] = lambda: None
    """Returns once everything that waited for that work has ended; raises if it failed."""
    began: float = field(default_factory=time.monotonic)
    asks: Callable[[Stage, HTTPConnection], object] = Stage.ask
    """Sends requests of other clients meanwhile; raises OSError."""
    is_kept: bool = False
    """Whether it goes on rather than being replaced: nobody else may do its work."""


def _stopped(pid: int) -> int:
    os.kill(pid, signal.SIGSTOP)
    return pid


def _until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + _MOST_SECONDS
    while time.monotonic() < end:
        with suppress(OSError, HTTPException):
            if holds():
                return
        time.sleep(_PACE_SECONDS)
    raise TimeoutError("it did not come")


def _of_server(number: int) -> Callable[[Stage], Stopped]:
    def stop(stage: Stage) -> Stopped:
        victim = _stopped(stage.worker(number))
        stage.leave(victim)
        seen = stage.looking

        def is_replaced() -> bool:
            is_new = stage.worker(number) != victim
            return is_new and stage.says(seen, "/v2/health/ready")

        # All inferences of front ends are the engine's: what they answer alone is asked.
        asks = _live if number == 0 and "process_roles" in stage.launch.flags else Stage.ask
        return Stopped(victim, "/v2/health/ready", lambda: _until(is_replaced), asks=asks)

    return stop


def _live(stage: Stage, connection: HTTPConnection) -> None:
    if not stage.says(connection, "/v2/health/live"):
        raise OSError("not live")


def _parent(stage: Stage) -> Stopped:
    assert stage.launch.process is not None
    victim = _stopped(stage.launch.process.pid)
    seen, before = stage.looking, stage.started()

    def wait() -> None:
        os.kill(victim, signal.SIGCONT)
        _until(lambda: stage.says(seen, "/v2/health/ready"))
        if stage.started() != before:
            raise OSError("a worker was replaced")

    return Stopped(victim, "/v2/health/ready", wait, is_kept=True)


def _model(stage: Stage) -> Stopped:
    with_model = stage.connect()
    victim = _stopped(stage.ask(with_model, "spawned"))

    def is_replaced() -> bool:
        return stage.ask(stage.connect(), "spawned") != victim

    return Stopped(victim, "/v2/models/spawned/ready", lambda: _until(is_replaced))


def _text(script: str, ask: Callable[[Stage], None]) -> Callable[[Stage], Stopped]:
    """Stop a process that computes texts of clients, and have another one compute the next."""

    def stop(stage: Stage) -> Stopped:
        ask(stage)
        # With its fork: the next text waits for either.
        found = stage.descendants(script)
        for pid in found:
            _stopped(pid)
        return Stopped(found[0], "", lambda: ask(stage))

    return stop


def _loading(module: str) -> Callable[[Stage], Stopped]:
    """Stop a process while a load waits for it, which ends as if nothing had been."""

    def stop(stage: Stage) -> Stopped:
        errors: list[BaseException] = []

        def load() -> None:
            try:
                stage.load_sent()
            except BaseException as error:
                errors.append(error)

        before = set(stage.descendants(module)) if module.endswith("trial") else set[int]()
        loading = threading.Thread(target=load, daemon=True)
        loading.start()
        found: list[int] = []

        def is_there() -> bool:
            found[:] = [pid for pid in stage.descendants(module) if pid not in before]
            return bool(found) or not loading.is_alive()

        _until(is_there)
        victim = _stopped(found[0])

        def is_replaced() -> bool:
            return not set(stage.descendants(module)) <= {victim, *before} or bool(errors)

        def end() -> None:
            loading.join(_MOST_SECONDS)
            if errors or loading.is_alive():
                raise OSError(f"the load: {errors or 'no end'}")

        return Stopped(victim, "", lambda: _until(is_replaced), end)

    return stop


KINDS: Mapping[str, Kind] = {
    "worker": Kind("workers", _of_server(0)),
    "parent": Kind("workers", _parent),
    "front end": Kind("front ends", _of_server(1)),
    "engine": Kind("front ends", _of_server(0)),
    "process of a Python model": Kind("models", _model),
    "process of a template": Kind("models", _text("template_process", Stage.chat)),
    "process of grammars": Kind("models", _text("grammar_process", Stage.follow)),
    "process of a tokenizer": Kind("models", _text("tokenizer_process", Stage.tokenize)),
    "process that compiles": Kind("models", _loading("xlaserve.runtime.programs.compilers.child")),
    "trial load": Kind("models", _loading("xlaserve.runtime.trial")),
}
"""Every kind of process that a server has."""
_LAYOUTS: Mapping[str, tuple[int, Mapping[str, object]]] = {
    "workers": (2, {"processes": 2}),
    "front ends": (2, {"processes": 3, "process_roles": "front-ends"}),
    "models": (1, {"compile_processes": 1}),
}
"""Layouts: the number of processes that answer clients, and the flags."""


def stop_each(folder: Path, *, count: int = 20, kinds: str = "", timed: bool = True) -> Outcome:
    """Stop a process of each kind so many times, every other time under a watchdog.

    `timed` judges how long it takes: a machine that is busy may take longer to start a process.
    """
    wanted = {name: kind for name, kind in KINDS.items() if not kinds or name in kinds.split(",")}
    outcome, seen = Outcome(), {name: _Seen() for name in wanted}
    for layout in dict.fromkeys(kind.layout for kind in wanted.values()):
        of_layout = [name for name, kind in wanted.items() if kind.layout == layout]
        for has_watchdog in (False, True):
            turns = count // 2 + (count % 2 if not has_watchdog else 0)
            if not turns:
                continue
            place = folder / f"{layout.replace(' ', '-')}-{has_watchdog}"
            with _serving(place, layout, has_watchdog=has_watchdog) as stage:
                for _ in range(turns):
                    until = time.monotonic() + _TURN_SECONDS
                    for name in of_layout:
                        _turn(stage, layout, wanted[name], seen[name])
                    if "processes" in _LAYOUTS[layout][1]:
                        time.sleep(max(0.0, until - time.monotonic()))
    for name, one in seen.items():
        _judge(name, one, count, outcome, timed=timed)
    return outcome


@dataclass
class _Seen:
    unready: list[float] = field(default_factory=list)
    replaced: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    asked: int = 0
    problems: list[str] = field(default_factory=list)


def _judge(name: str, seen: _Seen, count: int, outcome: Outcome, *, timed: bool) -> None:
    outcome.at_least(f"{name}: stopped", len(seen.replaced), count)
    outcome.none(f"{name}: not as expected", seen.problems)
    outcome.none(f"{name}: failed of {seen.asked} requests to others", seen.failed)
    for what, seconds, most in (
        ("not ready within", seen.unready, UNREADY_SECONDS),
        ("replaced within", seen.replaced, REPLACED_SECONDS),
    ):
        if seconds:
            outcome.note(f"{name}: {what}, median", f"{statistics.median(seconds):.2f} s")
        if seconds and timed:
            outcome.at_most(f"{name}: {what}", round(max(seconds), 2), most, " s")
        elif seconds:
            outcome.note(f"{name}: {what}", f"{max(seconds):.2f} s")


def _turn(stage: Stage, layout: str, kind: Kind, seen: _Seen) -> None:
    stage.connect_all(_LAYOUTS[layout][0])
    stopped = kind.stop(stage)
    with _others_asked(stage, seen, stopped):
        try:
            if stopped.unready:
                looking = stage.looking
                _until(lambda: not stage.says(looking, stopped.unready))
                seen.unready.append(time.monotonic() - stopped.began)
            again = time.monotonic() if stopped.is_kept else stopped.began
            stopped.wait()
            seconds = time.monotonic() - again
            stopped.end()
            seen.replaced.append(seconds)
        except (OSError, HTTPException) as error:
            seen.problems.append(f"{type(error).__name__}: {error}")
        finally:
            with suppress(ProcessLookupError):
                os.kill(stopped.pid, signal.SIGCONT)


@contextmanager
def _others_asked(stage: Stage, seen: _Seen, stopped: Stopped) -> Iterator[None]:
    """Have those that are not stopped asked for the length of a block, also on new connections."""
    is_over = threading.Event()

    def ask(connection: HTTPConnection | None) -> None:
        while not is_over.is_set():
            one = stage.connect() if connection is None else connection
            try:
                stopped.asks(stage, one)
            except (OSError, HTTPException) as error:
                kind = "a new connection" if connection is None else "a connection"
                seen.failed.append(f"{kind}: {type(error).__name__} {error}")
                one.close()
            seen.asked += 1
            if connection is None:
                one.close()
            is_over.wait(_PACE_SECONDS)

    # Where the parent is stopped, which accepts them, new ones wait.
    own: list[HTTPConnection | None] = [None] if not stopped.is_kept else []
    kept = [found[1] for found in stage.connections.values()]
    threads = [threading.Thread(target=ask, args=(one,)) for one in (*own, *kept)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join(_MOST_SECONDS)


@contextmanager
def _serving(folder: Path, layout: str, *, has_watchdog: bool) -> Iterator[Stage]:
    _, flags = _LAYOUTS[layout]
    models = folder / "models"
    python_models.write_function(models, "who", several.WHO, several.CONFIG)
    if layout == "models":
        python_models.write_function(models, "spawned", several.WHO, several.CONFIG + _IN_PROCESS)
        how: dict[str, Any] = {"template": scripted_language.HERMES, "scripts": ["12"]}
        scripted_language.export(models / "chat", **how, grammars="true")
        slow = scripted_language.export(models / "slow", **how)
        _make_slow(slow / "1" / "tokenizer.json")
        export_plus(folder, "plus", 1)
    # Idle ones end at once: each load starts one.
    given: dict[str, Any] = {"allow_python_models": True, "readiness": "startup", **flags}
    with ExitStack() as stack:
        variables = {}
        if has_watchdog:
            manager = stack.enter_context(_manager(folder / "notify"))
            variables = dict(manager)
        launch = Launch(folder, given, variables=variables)
        try:
            subject = launch.start()
            stage = Stage(launch, subject.http, subject.grpc)
            if "processes" in flags:
                connection = stage.connect()
                _until(lambda: stage.says(connection, "/v2/health/ready"))
            yield stage
        finally:
            if launch.process is not None:
                launch.stop()
                launch.process.wait()


def _make_slow(path: Path) -> None:
    """Give a tokenizer a regular expression that may go back and forth."""
    found = json.loads(path.read_text())
    pattern = {"type": "Split", "pattern": {"Regex": "(?:a|b)+[cx]"}, "behavior": "Isolated"}
    parts = [pattern | {"invert": False}, found["pre_tokenizer"]]
    found["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": parts}
    path.write_text(json.dumps(found))


@contextmanager
def _manager(path: Path) -> Iterator[Mapping[str, str]]:
    """Listen as systemd would, and yield a watched service's notifications."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        # The path of a socket has few characters.
        name = f"\0xlaserve-{os.getpid()}-{path.parent.name}"
        listening.bind(name)
        listening.settimeout(0.2)
        is_over = threading.Event()

        def listen() -> None:
            while not is_over.is_set():
                with suppress(TimeoutError):
                    listening.recv(1 << 16)

        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        yield {
            "NOTIFY_SOCKET": f"@{name[1:]}",
            "WATCHDOG_USEC": str(round(_WATCHDOG_SECONDS * 1e6)),
        }
        is_over.set()
        thread.join()
