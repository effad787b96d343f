"""The parent: owns the ports, starts and replaces workers, and drains them."""

import asyncio
import socket
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import structlog

from xlaserve.app.beside import running_beside
from xlaserve.app.listeners import Listeners
from xlaserve.app.probe import probed
from xlaserve.app.replacing import take_changes
from xlaserve.app.successor import Successor
from xlaserve.concurrency.control_plane import ChangeKind
from xlaserve.errors import WorkerDied
from xlaserve.errors.panics import ENDS, answerable
from xlaserve.process import signals
from xlaserve.process.endpoints import Listener
from xlaserve.process.silence import Stopped
from xlaserve.process.systemd import Systemd
from xlaserve.serving.access.quota_table import QuotaTable
from xlaserve.serving.observability.events import MAX_TEXT, Event, EventKind, EventLog, cut
from xlaserve.settings import Settings
from xlaserve.workers.channel import ChannelError
from xlaserve.workers.control import Control
from xlaserve.workers.handing import Handing
from xlaserve.workers.messages import (
    Ask,
    AskAll,
    AskEvents,
    EventsAre,
    FromWorker,
    GiveUp,
    Happened,
    Here,
    Listening,
    Part,
    Ready,
    Reload,
    Reloaded,
    Reloading,
    State,
    Stop,
)
from xlaserve.workers.offload.board import WorkerBoard
from xlaserve.workers.shares import (
    check_supported,
    encoded,
    has_front_ends,
    offloads,
    parts_of,
    share_of,
)
from xlaserve.workers.spare import Spare
from xlaserve.workers.worker_process import Role, WorkerProcess

_MOST_DEATHS = 5
"""Number of deaths of one worker, within `_DEATHS_SECONDS`, that ends the server."""
_DEATHS_SECONDS = 60.0
_FIRST_BACKOFF_SECONDS = 0.1
"""Delay before a worker is replaced; doubles with each of its recent deaths."""
_START_SECONDS = 120.0
"""How long a worker may be unresponsive before it is ready, since it has to import JAX."""
_ENDING_SECONDS = 10.0
"""How long a worker may take to exit, in addition to `grace_seconds`."""

_MOST_BETWEEN = 8
"""Workers exchange batches with up to eight neighbors on each side: a bridge costs files and
memory."""

_log = structlog.get_logger("processes")


class Supervisor:
    """Keeps the configured number of workers running, until cancelled."""

    def __init__(self, settings: Settings, listeners: Sequence[Listener], systemd: Systemd) -> None:
        self._settings = settings
        self._listeners = listeners
        self._systemd = systemd
        self._workers: dict[int, WorkerProcess] = {}
        self._stopping = False
        self._is_ready = False
        self.was_ready = False
        """Whether all workers have been ready at some time."""
        self.control = Control(
            lambda: [worker for worker in self.workers if worker.makes_changes],
            settings.scratch_directory,
        )
        self._taking: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails if this server cannot take over from the one it replaces."""
        self._tasks: set[asyncio.Task[None]] = set()
        """Changes and questions in progress."""
        self._reloading: set[int] = set()
        """Numbers of workers that have not finished a requested reload."""
        self._quotas: QuotaTable | None = None
        if settings.access_rules:
            self._quotas = QuotaTable.create(int(settings.processes), settings.max_principals)
        quotas = -1 if self._quotas is None else self._quotas.descriptor
        self._board = WorkerBoard.create(int(settings.processes)) if offloads(settings) else None
        self._events = EventLog(settings.max_event_bytes)
        # In a replacement, `take_changes` decides which load failures are fatal.
        passed_on = (
            settings if systemd.predecessor is None else replace(settings, exit_on_error=False)
        )
        endpoints = [(listener.setting, listener.address) for listener in listeners]
        # systemd's watchdog limit applies to each process.
        answer_seconds = min(
            settings.process_answer_seconds,
            systemd.watchdog_seconds or settings.process_answer_seconds,
        )
        self._handings: dict[str, Handing] = {}
        self._roles = [
            Role(
                number,
                encoded(share_of(passed_on, part)),
                # The engine has no clients.
                [] if part is Part.ENGINE else endpoints,
                answer_seconds,
                -1 if part is Part.ENGINE else quotas,
                part,
                -1 if self._board is None else self._board.descriptor,
            )
            for number, part in enumerate(parts_of(settings))
        ]
        self._has_engine = has_front_ends(settings)
        engines = (role for role in self._roles if role.part is Part.ENGINE)
        self._spare = Spare(next(engines, None) if settings.spare_engine else None)

    @property
    def workers(self) -> Sequence[WorkerProcess]:
        """Return the workers that were started and are not known to have exited."""
        return list(self._workers.values())

    async def serve(self) -> None:
        """Run the workers until cancelled, then drain them; raises fatal errors."""
        handings = self._handings = {
            listener.setting: Handing(listener.setting, listener.socket, lambda: self.workers)
            for listener in self._listeners
        }
        keeping = [asyncio.ensure_future(self._keep(role)) for role in self._roles]
        try:
            done, _ = await asyncio.wait(
                [self._taking, *keeping], return_when=asyncio.FIRST_EXCEPTION
            )
            for task in done:
                task.result()
        finally:
            self._stopping = True
            self._systemd.stopping()
            _log.info("shutting down")
            self.control.stop()
            for handing in handings.values():
                handing.stop(drain=True)
            for listener in self._listeners:
                listener.socket.close()
            await self._spare.close()
            await self._drain(keeping)
            self.control.close()
            _log.info("stopped")

    async def _drain(self, keeping: "Sequence[asyncio.Task[None]]") -> None:
        """Wait until every worker has exited; kill those that exceed the grace period.

        The engine exits after the front ends, because it executes the requests of their clients.
        """
        seconds = self._settings.grace_seconds + _ENDING_SECONDS
        for is_last in (False, True) if self._has_engine else (True,):
            ending = [
                task
                for role, task in zip(self._roles, keeping, strict=True)
                if is_last or role.part is not Part.ENGINE
            ]
            for worker in self.workers:
                if is_last or worker.role.part is not Part.ENGINE:
                    worker.tell(Stop())
            _, late = await asyncio.wait(ending, timeout=seconds)
            for task in late:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)

    def reload(self) -> None:
        """Make every worker reload everything that SIGHUP reloads."""
        if self.was_ready and not self._reloading:
            self._systemd.reloading()
        for number, worker in self._workers.items():
            self._reloading.add(number)
            worker.tell(Reload())

    # --- The life of a worker ---

    async def _keep(self, role: Role) -> None:
        deaths: deque[float] = deque(maxlen=_MOST_DEATHS)
        while not self._stopping:
            reason = await self._run(role)
            if self._quotas is not None:
                self._quotas.clear(role.worker)
            if self._board is not None:
                self._board.say_idle(role.worker, False)
            if self._stopping:
                return
            now = time.monotonic()
            deaths.append(now)
            while now - deaths[0] > _DEATHS_SECONDS:
                deaths.popleft()
            _log.error("worker died", worker=role.worker, reason=reason, deaths=len(deaths))
            self._note(EventKind.WORKER_DIED, role, reason)
            if not self.was_ready or len(deaths) == _MOST_DEATHS:
                raise WorkerDied(role.worker, reason, len(deaths))
            await asyncio.sleep(_FIRST_BACKOFF_SECONDS * 2 ** (len(deaths) - 1))

    async def _run(self, role: Role) -> str:
        """Run a worker until it exits, and return why it exited."""
        try:
            worker = await self._spare.started(role)
        except (OSError, ChannelError) as error:
            return str(error)
        self._workers[role.worker] = worker
        _log.info("worker started", worker=role.worker, pid=worker.process.pid)
        self._note(EventKind.WORKER_STARTED, role)
        if self._stopping:
            worker.tell(Stop())
        self._bridge(worker)
        watching = asyncio.ensure_future(self._watch(worker))
        try:
            with suppress(ChannelError):
                while True:
                    self._heard(worker, await worker.channel.receive())
            worker.is_listening = False
            self._hand_again(worker)
            return await worker.ended()
        finally:
            watching.cancel()
            del self._workers[role.worker]
            self._say_state()
            self._reloaded(role.worker)
            if worker.process.returncode is None:
                worker.kill()
                await worker.ended()

    def _bridge(self, worker: WorkerProcess) -> None:
        """Connect a new process with its peers by bridges."""
        for other in self.workers:
            if self._are_bridged(worker.role, other.role):
                one, its = socket.socketpair()
                with one, its:
                    worker.hand_bridge(one)
                    other.hand_bridge(its)

    def _are_bridged(self, one: Role, other: Role) -> bool:
        if one.part is not Part.WORKER:
            return {one.part, other.part} == {Part.ENGINE, Part.FRONT_END}
        between = abs(one.worker - other.worker)
        between = min(between, len(self._roles) - between)
        return self._board is not None and 0 < between <= _MOST_BETWEEN

    def _heard(self, worker: WorkerProcess, message: FromWorker) -> None:
        worker.heard(message)
        number = worker.role.worker
        match message:
            case Ask() | GiveUp() | AskAll():
                self._on_request(worker, message)
            case Here():
                self._say_state()
            case Listening():
                worker.makes_changes = True
                # During startup, hand over connections early, so that liveness checks are answered.
                # A replacement gets connections only after replaying the changes.
                worker.is_listening = not self.was_ready
            case Ready():
                self._begin(self._join(worker))
            case Reloading():
                self._reloading.add(number)
            case Reloaded():
                self._reloaded(number)
            case Happened(event):
                self._events.note(event)
            case AskEvents(request):
                worker.tell(EventsAre(request, self._events.kept()))
            case _:
                pass

    def _on_request(self, worker: WorkerProcess, message: Ask | GiveUp | AskAll) -> None:
        match message:
            case Ask():
                self._begin(self.control.change(worker, message))
            case AskAll():
                self._begin(self.control.ask_all(worker, message))
            case GiveUp(number):
                self.control.give_up(worker, number)

    async def _join(self, worker: WorkerProcess) -> None:
        """Replay changes to a started worker, then hand it connections."""
        await self.control.replay(worker)
        if self.was_ready:
            await self.control.converge(worker)
        if not worker.makes_changes:
            return  # the worker has died in the meantime
        worker.is_listening = worker.is_ready = True
        ready = sum(one.is_ready for one in self.workers)
        if ready == len(self._roles) and not self.was_ready:
            try:
                await take_changes(self._systemd, self._settings, self.control)
            except BaseException as error:
                if isinstance(error, ENDS):
                    raise
                self._taking.set_exception(answerable(error))
                return
            self.was_ready = True
            _log.info("workers ready", workers=ready)
            self._systemd.ready()
        self._say_state()
        if self.was_ready:
            # Not earlier, because it would compete for CPU with processes that are starting.
            await self._spare.prepare()

    @property
    def is_ready(self) -> bool:
        """Whether the server is ready, as its workers report to clients."""
        return self._is_ready and not self._stopping

    def _say_state(self) -> None:
        """Send the server's state to every worker; a worker that is restarting does not count."""
        first = self.was_ready
        counted = [worker for worker in self.workers if worker.is_ready or not first]
        silent = [worker.role.worker for worker in self.workers if worker.is_silent]
        is_ready = first and not silent and all(worker.is_ready_here for worker in counted)
        leading = [
            worker for worker in counted if worker.makes(ChangeKind.FOLLOW) and not worker.is_silent
        ]
        leader = next(iter(leading), None)
        is_whole = leader is not None or not self._has_engine
        self._is_ready = is_ready and is_whole
        for worker in self.workers:
            worker.tell(State(self._is_ready, worker is leader, first, is_whole, silent))

    # --- Unresponsive workers ---

    async def _watch(self, worker: WorkerProcess) -> None:
        """Ping a worker, and kill it if it is unresponsive for too long."""
        silence, stopped = worker.silence, Stopped(worker.process.pid)
        while not self._stopping:
            worker.ping()
            await asyncio.sleep(min(silence.step, stopped.step))
            silence.look()
            stopped.look()
            if reason := self._overdue(worker, stopped):
                worker.failure = reason
                worker.kill()
                return
            is_silent = worker.is_ready and (silence.is_long or stopped.is_long)
            if is_silent is not worker.is_silent:
                seconds = stopped.limit if stopped.is_long else silence.limit
                self._say_silent(worker, is_silent, seconds)

    def _overdue(self, worker: WorkerProcess, stopped: Stopped) -> str:
        """Return why a worker must be killed; empty if it need not be."""
        silence = worker.silence
        limit = silence.limit if worker.is_ready else max(silence.limit, _START_SECONDS)
        if self._stopping:
            return ""
        if silence.seconds >= limit:
            return f"it did not respond for {silence.seconds:.0f} s"
        if stopped.is_over and self.was_ready:
            return f"it was stopped for {stopped.seconds:.0f} s (SIGSTOP)"
        return ""

    def _say_silent(self, worker: WorkerProcess, is_silent: bool, seconds: float) -> None:
        worker.is_silent = is_silent
        fields = {"worker": worker.role.worker, "pid": worker.process.pid}
        if is_silent:
            _log.error("worker unresponsive", **fields, replaced_after_seconds=seconds)
            self._hand_again(worker)
        else:
            _log.info("worker responsive again", **fields)
        self._say_state()

    def _hand_again(self, worker: WorkerProcess) -> None:
        """Hand connections that a worker has not taken to other workers."""
        for setting, connection in list(worker.take_back()):
            if setting in self._handings:
                self._handings[setting].hand_again(connection)
            else:
                connection.close()

    def _note(self, kind: EventKind, role: Role, reason: str = "") -> None:
        text = cut(reason, MAX_TEXT)
        self._events.note(
            Event(kind, time.time_ns(), failed=bool(reason), text=text, worker=role.worker)
        )

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _reloaded(self, number: int) -> None:
        if number in self._reloading:
            self._reloading.discard(number)
            # During startup, systemd is notified when all workers are ready.
            if self.was_ready and not self._reloading and not self._stopping:
                self._systemd.ready()


async def run(settings: Settings, systemd: Systemd) -> None:
    """Serve with several processes until SIGTERM or SIGINT; a second signal exits immediately.

    Raises InvalidSettings, WorkerDied, or a fatal error of a worker.
    """
    check_supported(settings)
    with ExitStack() as stack:
        bound = Listeners(settings, systemd, stack)
        listeners = bound.every
        shown = {
            listener.setting.removesuffix("_endpoint"): listener.address for listener in listeners
        }
        _log.info("listening", **shown, processes=int(settings.processes))
        supervisor = Supervisor(settings, listeners, systemd)
        control = supervisor.control
        successor = Successor(settings, listeners, systemd, control, lambda: supervisor.was_ready)
        stack.callback(successor.close)
        serving = asyncio.ensure_future(supervisor.serve())
        handled = signals.handled(serving, supervisor.reload, successor)
        async with (
            running_beside(systemd.keep_alive()),
            probed(settings.probe_socket, lambda: supervisor.is_ready),
        ):
            with handled, suppress(asyncio.CancelledError):
                await serving
