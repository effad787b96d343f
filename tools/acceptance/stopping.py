"""D8: SIGSTOP of each kind of serving process, with and without a watchdog."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from acceptance.figures import Outcome
from acceptance.stage import Stage, Turns, asked, halves, served, until

UNREADY_SECONDS = 3.0
REPLACED_SECONDS = 15.0
_UNREADY, _REPLACED = "not ready within", "replaced within"
_LIMITS = {_UNREADY: UNREADY_SECONDS, _REPLACED: REPLACED_SECONDS}
_TURN_SECONDS = 16.0
"""Interval between crashes: five within a minute would end the server."""


@dataclass(frozen=True)
class Kind:
    """A kind of process, and the visible effects of stopping it."""

    layout: str
    stop: Callable[[Stage], "Stopped"]


@dataclass
class Stopped:
    """A stopped process, the check that fails meanwhile, and how to wait for recovery."""

    pid: int
    unready: str
    """Path of the readiness check that fails meanwhile, or empty if none does."""
    wait: Callable[[], None]
    """Returns once the replacement works; raises if it failed."""
    began: float = field(default_factory=time.monotonic)
    asks: Callable[[Stage, HTTPConnection], object] = Stage.ask
    """Sends requests of other clients meanwhile; raises OSError."""
    is_kept: bool = False
    """Whether it is continued rather than replaced, because no other process may do its work."""


def _stopped(pid: int) -> int:
    os.kill(pid, signal.SIGSTOP)
    return pid


def _of_server(number: int) -> Callable[[Stage], Stopped]:
    def stop(stage: Stage) -> Stopped:
        victim = _stopped(stage.worker(number))
        stage.leave(victim)
        seen = stage.looking

        def is_replaced() -> bool:
            is_new = stage.worker(number) != victim
            return is_new and stage.says(seen, "/v2/health/ready")

        # With process roles, the engine runs all inferences: send what front ends answer alone.
        asks = _live if number == 0 and "process_roles" in stage.launch.flags else Stage.ask
        return Stopped(victim, "/v2/health/ready", lambda: until(is_replaced), asks=asks)

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
        until(lambda: stage.says(seen, "/v2/health/ready"))
        if stage.started() != before:
            raise OSError("a worker was replaced")

    return Stopped(victim, "/v2/health/ready", wait, is_kept=True)


KINDS: Mapping[str, Kind] = {
    "worker": Kind("workers", _of_server(0)),
    "parent": Kind("workers", _parent),
    "front end": Kind("front ends", _of_server(1)),
    "engine": Kind("front ends", _of_server(0)),
}
"""Every kind of process that serves."""
_LAYOUTS: Mapping[str, tuple[int, Mapping[str, object]]] = {
    "workers": (2, {"processes": 2}),
    "front ends": (2, {"processes": 3, "process_roles": "front-ends"}),
}
"""Layouts: the number of processes that answer clients, and the flags."""


def stop_each(folder: Path, *, count: int = 20, kinds: str = "", timed: bool = True) -> Outcome:
    """Stop a process of each kind several times, every other time under a watchdog.

    `timed` enables the time limits; a busy machine may take longer to start a process.
    """
    wanted = {name: kind for name, kind in KINDS.items() if not kinds or name in kinds.split(",")}
    outcome, seen = Outcome(), {name: Turns() for name in wanted}
    for layout in dict.fromkeys(kind.layout for kind in wanted.values()):
        of_layout = [name for name, kind in wanted.items() if kind.layout == layout]
        for place, turns, has_watchdog in halves(folder / layout.replace(" ", "-"), count):
            with _serving(place, layout, has_watchdog=has_watchdog) as stage:
                for _ in range(turns):
                    due = time.monotonic() + _TURN_SECONDS
                    for name in of_layout:
                        _turn(stage, layout, wanted[name], seen[name])
                    time.sleep(max(0.0, due - time.monotonic()))
    for name, one in seen.items():
        one.judge(name, count, _LIMITS, outcome, timed=timed)
    return outcome


def _turn(stage: Stage, layout: str, kind: Kind, seen: Turns) -> None:
    stage.connect_all(_LAYOUTS[layout][0])
    stopped = kind.stop(stage)
    # A stopped parent accepts no connections, so new ones have to wait.
    own: list[HTTPConnection | None] = [None] if not stopped.is_kept else []
    kept = [found[1] for found in stage.connections.values()]
    with asked([*own, *kept], stage, seen.others, stopped.asks):
        try:
            if stopped.unready:
                looking = stage.looking
                until(lambda: not stage.says(looking, stopped.unready))
                seen.note(_UNREADY, time.monotonic() - stopped.began)
            again = time.monotonic() if stopped.is_kept else stopped.began
            stopped.wait()
            seen.note(_REPLACED, time.monotonic() - again)
        except (OSError, HTTPException) as error:
            seen.problems.append(f"{type(error).__name__}: {error}")
        finally:
            with suppress(ProcessLookupError):
                os.kill(stopped.pid, signal.SIGCONT)


@contextmanager
def _serving(folder: Path, layout: str, *, has_watchdog: bool) -> Iterator[Stage]:
    _, flags = _LAYOUTS[layout]
    with served(folder, {"readiness": "startup", **flags}, has_watchdog=has_watchdog) as stage:
        with closing(stage.connect()) as connection:
            until(lambda: stage.says(connection, "/v2/health/ready"))
        yield stage
