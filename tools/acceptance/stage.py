"""A server whose processes are stopped and killed, and clients that must not be affected."""

import json
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import MappingProxyType

import psutil
from support import python_models, several

from acceptance.figures import Outcome
from acceptance.subjects import Launch

MOST_SECONDS = 90.0
PACE_SECONDS = 0.02
_WATCHDOG_SECONDS = 6.0


@dataclass
class Stage:
    """A server, and connections to each of its processes."""

    launch: Launch
    http: str = ""
    grpc: str = ""
    connections: dict[int, list[HTTPConnection]] = field(default_factory=dict)
    """Connections for readiness checks and concurrent requests, by the process that serves them."""

    def started(self) -> list[tuple[int, int]]:
        """Return number and process id of every worker started so far, in order."""
        found = []
        for line in self.launch.log.read_text().splitlines():
            with suppress(ValueError):
                record = json.loads(line)
                if record.get("event") == "worker started":
                    found.append((record["worker"], record["pid"]))
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
        return HTTPConnection(self.http, timeout=MOST_SECONDS)

    def connect_all(self, count: int) -> None:
        """Open two connections to each of `count` processes."""
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
            time.sleep(PACE_SECONDS)

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

    def leave_all(self) -> None:
        """Close the connections to all processes."""
        for pid in tuple(self.connections):
            self.leave(pid)

    @property
    def looking(self) -> HTTPConnection:
        """Return a connection to a running process, for readiness checks."""
        return next(iter(self.connections.values()))[0]

    def says(self, connection: HTTPConnection, path: str) -> bool:
        """Tell whether a readiness check succeeds."""
        connection.request("GET", path)
        answer = connection.getresponse()
        answer.read()
        return answer.status == 200

    def descendants(self, module: str) -> list[int]:
        """Return the ids of descendants whose command line contains a module or script."""
        assert self.launch.process is not None
        found = []
        for one in psutil.Process(self.launch.process.pid).children(recursive=True):
            with suppress(psutil.Error):
                if any(module in part for part in one.cmdline()):
                    found.append(one.pid)
        return found


@dataclass
class Bystanders:
    """Requests of other clients, and the errors of those that failed."""

    asked: int = 0
    failed: list[str] = field(default_factory=list)


@dataclass
class Turns:
    """What the turns of one kind of process have shown."""

    others: Bystanders = field(default_factory=Bystanders)
    problems: list[str] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Durations of each turn, by what they measure."""

    def note(self, what: str, seconds: float) -> None:
        """Add a duration."""
        self.seconds.setdefault(what, []).append(seconds)

    def judge(
        self, name: str, count: int, limits: Mapping[str, float], outcome: Outcome, *, timed: bool
    ) -> None:
        """Add the figures; `limits` has the longest duration of each measure, and ends with that
        at the end of each turn.
        """
        *_, last = limits
        outcome.at_least(f"{name}: turns", len(self.seconds.get(last, ())), count)
        outcome.none(f"{name}: not as expected", self.problems)
        outcome.none(
            f"{name}: failed of {self.others.asked} requests to others", self.others.failed
        )
        for what, seconds in self.seconds.items():
            outcome.note(f"{name}: {what}, median", f"{statistics.median(seconds):.2f} s")
            longest = round(max(seconds), 2)
            if timed:
                outcome.at_most(f"{name}: {what}", longest, limits[what], " s")
            else:
                outcome.note(f"{name}: {what}", f"{longest} s")


def halves(folder: Path, count: int) -> Iterator[tuple[Path, int, bool]]:
    """Yield a folder, a number of turns, and whether a watchdog watches: half of them each."""
    for name, has_watchdog in (("alone", False), ("watched", True)):
        turns = count // 2 + (count % 2 if not has_watchdog else 0)
        if turns:
            yield folder / name, turns, has_watchdog


def until(holds: Callable[[], bool]) -> None:
    """Return once the condition holds; raises TimeoutError."""
    end = time.monotonic() + MOST_SECONDS
    while time.monotonic() < end:
        with suppress(OSError, HTTPException):
            if holds():
                return
        time.sleep(PACE_SECONDS)
    raise TimeoutError("it did not come")


@contextmanager
def asked(
    connections: Sequence[HTTPConnection | None],
    stage: Stage,
    seen: Bystanders,
    ask: Callable[[Stage, HTTPConnection], object] = Stage.ask,
) -> Iterator[None]:
    """Send requests for the duration of a block; None opens a new connection for each."""
    is_over = threading.Event()

    def send(connection: HTTPConnection | None) -> None:
        while not is_over.is_set():
            one = stage.connect() if connection is None else connection
            try:
                ask(stage, one)
            except (OSError, HTTPException) as error:
                kind = "a new connection" if connection is None else "a connection"
                seen.failed.append(f"{kind}: {type(error).__name__} {error}")
                one.close()
            seen.asked += 1
            if connection is None:
                one.close()
            is_over.wait(PACE_SECONDS)

    threads = [threading.Thread(target=send, args=(one,)) for one in connections]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join(MOST_SECONDS)


@contextmanager
def served(
    folder: Path,
    flags: Mapping[str, object],
    *,
    has_watchdog: bool,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Stage]:
    """Serve the directory's `models` and `who`, optionally under systemd's watchdog."""
    python_models.write_function(folder / "models", "who", several.WHO, several.CONFIG)
    with ExitStack() as stack:
        watched = stack.enter_context(manager(folder / "notify")) if has_watchdog else {}
        given = {"allow_python_models": True, **flags}
        launch = Launch(folder, given, variables={**variables, **watched})
        try:
            subject = launch.start()
            stage = Stage(launch, subject.http, subject.grpc)
            stack.callback(stage.leave_all)
            yield stage
        finally:
            if launch.process is not None and launch.process.poll() is None:
                launch.stop()
                launch.process.wait()


@contextmanager
def manager(path: Path) -> Iterator[Mapping[str, str]]:
    """Listen as systemd does on a socket; yield the environment of a watched service."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        # Socket paths are limited to about 100 characters, so use an abstract name.
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
