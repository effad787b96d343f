"""The main program of a worker process; takes the descriptor of its channel as argument."""

import asyncio
import faulthandler
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import structlog
import uvloop

from xlaserve.app.server import Application, prepare
from xlaserve.concurrency.control_plane import ControlPlane
from xlaserve.concurrency.others import Others
from xlaserve.errors import XlaserveError
from xlaserve.language.text_settings import text_limits
from xlaserve.process.best_effort import best_effort, finish, open_standard_streams
from xlaserve.process.children import shield_from_signals
from xlaserve.process.endings import end_with_parent
from xlaserve.process.endpoints import Listener
from xlaserve.process.output import logged_output
from xlaserve.process.silence import Silence
from xlaserve.process.systemd import ServiceManager
from xlaserve.runtime import loaders
from xlaserve.serving.access.quota_table import QuotaTable
from xlaserve.serving.access.quotas import Admits
from xlaserve.serving.access.shared_quotas import SharedQuotas
from xlaserve.serving.observability.events import Events
from xlaserve.settings import Settings
from xlaserve.workers.channel import Channel, ChannelError, to_worker
from xlaserve.workers.fronts.engine import FrontEnds
from xlaserve.workers.fronts.front_end import FrontEnd, Limits
from xlaserve.workers.handing import HandedConnections
from xlaserve.workers.link import Link
from xlaserve.workers.messages import (
    LOADED,
    Alive,
    Begin,
    Connections,
    EventsAre,
    Failed,
    Here,
    Listening,
    Part,
    Ping,
    Ready,
    Reload,
    Reloaded,
    Reloading,
    Stop,
    ToWorker,
)
from xlaserve.workers.offload.board import WorkerBoard
from xlaserve.workers.offload.offloading import Offloading
from xlaserve.workers.others import OtherWorkers
from xlaserve.workers.parent_events import ParentEvents
from xlaserve.workers.shares import decoded
from xlaserve.workers.worker_process import IMPORTS

_REPORT_SECONDS = 0.02
"""Interval for reporting the number of connections, in seconds."""
_FAILED = 1

_log = structlog.get_logger("worker")


@dataclass(frozen=True, slots=True)
class HandedListeners:
    """The server's endpoints in a worker, whose connections the parent hands over."""

    grpc: Sequence[Listener]
    http: Listener | None
    metrics: Listener | None
    sources: Sequence[HandedConnections]

    @classmethod
    def of(cls, begin: Begin) -> "HandedListeners":
        """Wrap the descriptors in the parent's message."""
        sources = [
            HandedConnections(socket.socket(fileno=number)) for _, _, number in begin.endpoints
        ]
        found = {
            setting: Listener(source, address, setting)
            for (setting, address, _), source in zip(begin.endpoints, sources, strict=True)
        }
        grpc = [found[name] for name in ("grpc_endpoint", "grpc_data_endpoint") if name in found]
        return cls(grpc, found.get("http_endpoint"), found.get("metrics_endpoint"), sources)

    @property
    def received(self) -> int:
        """Return how many connections were received so far."""
        return sum(source.received for source in self.sources)


class Parent:
    """The parent as seen by the application; takes the place of systemd."""

    def __init__(
        self,
        channel: "Channel[ToWorker]",
        listeners: HandedListeners,
        link: Link,
        events: ParentEvents,
        begin: Begin,
        *,
        quotas: Admits | None,
    ) -> None:
        self.listeners = listeners
        self.manager: ServiceManager = self
        self.plane: ControlPlane = link
        self.others: Others = OtherWorkers(link, begin.worker)
        self.quotas: Admits | None = quotas
        self.events: Events = events
        self.worker = begin.worker
        self.follow: Callable[[], Awaitable[None]] | None = None
        """In a front end, waits until the engine's models are shown here; None if models load
        here."""
        self._channel = channel

    def ready(self) -> None:
        """Report that startup is complete."""
        self.tell(Ready())

    def reloads(self, begins: bool) -> None:
        """Report that a reload has begun or ended."""
        self.tell(Reloading() if begins else Reloaded())

    def stopping(self) -> None:
        """Do nothing, because the parent requested the stop."""

    async def keep_alive(self) -> None:
        """Do nothing: the parent sends pings, which `_hear` answers."""

    def tell(self, message: msgspec.Struct) -> None:
        """Send a message; drop it if the parent has exited, since this process will exit too."""
        with suppress(ChannelError):
            self._channel.send(message)


async def serve(end: socket.socket) -> bool:
    """Serve until the parent sends Stop; return whether stuck threads are left."""
    channel = await Channel.open(end, to_worker())
    begin = await channel.receive()
    assert isinstance(begin, Begin)
    level = str(begin.settings["log_level"])
    try:
        with logged_output(level, worker=begin.worker, given=begin.outputs):
            return await _serve(channel, begin)
    except* XlaserveError as group:
        error = group.exceptions[0]
        channel.send(Failed(type(error).__name__, str(error)))
        await channel.flush()
        sys.exit(_FAILED)


async def _serve(channel: "Channel[ToWorker]", begin: Begin) -> bool:
    listeners = HandedListeners.of(begin)
    settings = decoded(begin.settings)
    is_front = begin.part is Part.FRONT_END
    link = Link(channel, settings.scratch_directory, loads=not is_front)
    events = ParentEvents(channel, begin.worker)
    quotas = _quotas_of(begin, settings)
    parent = Parent(channel, listeners, link, events, begin, quotas=quotas)
    application = prepare(settings, parent=parent)
    link.on_state = application.registry.notify
    bridged = _bridged(begin, parent, link, application)
    link.is_loaded = application.registry.ready
    link.versions = application.registry.answering

    async def loaded(_: object) -> list[str]:
        models = application.registry.models()
        return [model.name for model in models if application.registry.ready(model.name)]

    link.answer(LOADED, loaded)
    hearing: list[asyncio.Task[None]] = []
    try:
        async with application.running():
            if begin.part is Part.ENGINE:
                # The engine has no clients, but answers questions from front ends.
                application.http_routes()
            parent.tell(Listening())
            serving = asyncio.ensure_future(application.serve())
            reload = application.reloads.request
            silence = Silence(begin.answer_seconds)
            hearing += [
                asyncio.ensure_future(
                    _hear(channel, link, events, serving, reload, silence=silence)
                ),
                asyncio.ensure_future(_listen(silence, link)),
            ]
            tasks = [
                asyncio.ensure_future(_say_ready(parent, application)),
                asyncio.ensure_future(_count(parent, listeners, application)),
            ]
            if bridged is not None:
                tasks.append(asyncio.ensure_future(bridged))
                tasks[-1].add_done_callback(_end_without_bridges)
            try:
                with suppress(asyncio.CancelledError):
                    await serving
            finally:
                _cancel(tasks)
    finally:
        # Keep listening until draining ends, since clients may wait for changes that need the
        # parent.
        _cancel(hearing)
    return application.has_threads_left


def _cancel(tasks: "Sequence[asyncio.Task[None]]") -> None:
    for task in tasks:
        task.cancel()


def _end_without_bridges(bridging: "asyncio.Future[None]") -> None:
    """Exit if this process cannot connect to its peers, so that a replacement tries again."""
    if not bridging.cancelled() and (error := bridging.exception()) is not None:
        _log.error("process connection failed", reason=str(error), consequence="this worker ends")
        os._exit(_FAILED)


def _bridged(
    begin: Begin, parent: Parent, link: Link, application: Application
) -> Coroutine[Any, Any, None] | None:
    """Return the coroutine that serves bridges to other processes, or None without bridges."""
    if begin.bridges < 0:
        return None
    source = HandedConnections(socket.socket(fileno=begin.bridges))
    registry, ledger = application.registry, application.ledger
    if begin.part is Part.WORKER:
        os.set_inheritable(begin.board, False)
        board = WorkerBoard(begin.board, int(application.settings.processes))
        follower = application.control.follower
        helping = Offloading(
            begin.worker,
            board,
            application.settings,
            ledger,
            threads=application.workers.host,
            is_started=lambda: follower.is_started,
        )
        application.stations.helpers = helping
        link.on_state = partial(_know_silent, helping, link, registry.notify)
        return helping.run(source)
    if begin.part is Part.ENGINE:
        follower = application.control.follower
        fronts = FrontEnds(application.engine, registry, ledger, lambda: follower.is_started)
        link.shown = fronts.mirror.shown
        return fronts.serve(source)
    settings = application.settings
    limits = Limits(
        settings.front_end_shared_bytes,
        settings.max_front_end_requests,
        text_limits(settings),
    )
    front = FrontEnd(registry, application.capacity, ledger, application.stations.build, limits)
    front.may_show = lambda: link.is_whole or not link.has_started
    front.engine_answers = lambda: link.engine_answers
    link.on_state = partial(_show, front, registry.notify)
    parent.follow = front.started
    return front.serve(source)


def _know_silent(helping: Offloading, link: Link, changed: Callable[[], None]) -> None:
    helping.know_silent(link.silent)
    changed()


def _show(front: FrontEnd, changed: Callable[[], None]) -> None:
    front.show()
    changed()


def _quotas_of(begin: Begin, settings: Settings) -> Admits | None:
    if begin.quotas < 0:
        return None
    os.set_inheritable(begin.quotas, False)
    table = QuotaTable(begin.quotas, int(settings.processes), settings.max_principals)
    return SharedQuotas(table, begin.worker)


async def _hear(
    channel: "Channel[ToWorker]",
    link: Link,
    events: ParentEvents,
    serving: "asyncio.Task[None]",
    reload: Callable[[], None],
    *,
    silence: Silence,
) -> None:
    """Process the parent's messages, also while draining; drain if the parent has exited."""
    try:
        while True:
            message = await channel.receive()
            silence.heard()
            match message:
                case Ping():
                    channel.send(Alive())
                case Reload():
                    reload()
                case Stop():
                    serving.cancel()
                case EventsAre():
                    events.heard(message)
                case _:
                    link.heard(message)
    except ChannelError as error:
        _log.error("parent lost", reason=str(error))
        link.hears_no_more()
        serving.cancel()


async def _listen(silence: Silence, link: Link) -> None:
    """Report not ready while the parent is unresponsive; after a limit, fail pending waits."""
    while True:
        await asyncio.sleep(silence.step)
        silence.look()
        link.hears(not silence.is_long)
        if silence.is_over:
            link.hears_no_more()


async def _say_ready(parent: Parent, application: Application) -> None:
    """Report to the parent whenever this process becomes ready or not ready."""
    changed = asyncio.Event()
    reported = False
    with application.registry.observe(changed.set):
        while True:
            now = application.control.follower.is_ready_here
            if now != reported:
                parent.tell(Here(now))
                reported = now
            await changed.wait()
            changed.clear()


async def _count(parent: Parent, listeners: HandedListeners, application: Application) -> None:
    """Report the number of connections to the parent whenever it changes."""
    reported = Connections(0, 0)
    while True:
        now = Connections(application.open_connections, listeners.received)
        if now != reported:
            parent.tell(now)
            reported = now
        await asyncio.sleep(_REPORT_SECONDS)


def main() -> None:
    """Serve as a worker until the parent sends Stop or exits."""
    end_with_parent(int(sys.argv[2]))
    # Only the parent handles signals, since terminals and systemd send them to all processes.
    shield_from_signals()
    open_standard_streams()
    sys.stderr = best_effort(sys.stderr)
    faulthandler.enable(sys.stderr)
    end = socket.socket(fileno=int(sys.argv[1]))
    end.set_inheritable(False)
    if sys.argv[3:] == [IMPORTS]:
        # A spare imports JAX ahead of time, so that it starts quickly when it replaces an engine.
        loaders.load_modules()
    left = uvloop.run(serve(end))
    finish(sys.stderr)
    if left:
        # A normal exit would wait for the stuck threads.
        os._exit(0)


if __name__ == "__main__":
    main()
