"""The composition root: creates all objects, starts the transports, and drains them."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import structlog

from xlaserve import build
from xlaserve.app.beside import running_beside
from xlaserve.app.core import Core
from xlaserve.app.devices import DeviceStart
from xlaserve.app.display import Addresses, Display, ModelRow, NoDisplay
from xlaserve.app.grpc import GrpcDoor, assemble_grpc
from xlaserve.app.http import http_routes, http_server, metrics_routes
from xlaserve.app.listeners import Bound, Listeners
from xlaserve.app.observing import observe, tracing
from xlaserve.app.parent import Parent, events_of, plane_of
from xlaserve.app.probe import probed
from xlaserve.app.python import python_host
from xlaserve.app.replacing import take_changes
from xlaserve.app.successor import Successor
from xlaserve.app.trying import beginning, try_loading
from xlaserve.concurrency.control_plane import OneProcess
from xlaserve.concurrency.others import NOBODY
from xlaserve.concurrency.workers import Workers
from xlaserve.errors import InvalidSettings
from xlaserve.grpc.http2.limits import Shared
from xlaserve.grpc.reasons import reason_of
from xlaserve.grpc.server import GrpcServer
from xlaserve.http.connection.server import HttpServer
from xlaserve.http.routing import RouteTable
from xlaserve.language.text_settings import text_limits
from xlaserve.net.ledger import Ledger
from xlaserve.net.memory import MessageMemory
from xlaserve.net.tls import MakeContext, ServerTls, server_tls
from xlaserve.process import allocator, log, signals
from xlaserve.process.endpoints import NO_ENDPOINT
from xlaserve.process.systemd import ServiceManager, Systemd
from xlaserve.python_models.changes import CodeChanges
from xlaserve.python_models.nested import NestedCalls
from xlaserve.residence.capacity import Capacity
from xlaserve.residence.catalog import IndexEntry
from xlaserve.residence.control import ModelControl
from xlaserve.residence.host import capacity_bytes, compile_processes, load_threads
from xlaserve.residence.left_behind import answer_left_behind
from xlaserve.residence.loading import Machinery, VersionLoader
from xlaserve.residence.measured import MeasuredMemory
from xlaserve.residence.platforms.predictions import FileReader
from xlaserve.residence.platforms.runtime import ModelRuntime, RuntimeLimits
from xlaserve.residence.registry import Registry
from xlaserve.residence.reloads import CHECK_SECONDS, Reloads
from xlaserve.residence.reports.history import History
from xlaserve.residence.repository.repositories import open_repositories
from xlaserve.residence.repository.wrong_root import check_roots
from xlaserve.residence.server import ServerDescription
from xlaserve.runtime import loaders
from xlaserve.runtime.devices import device
from xlaserve.runtime.devices.cuda_driver import open_driver
from xlaserve.runtime.metrics import ModelMetrics
from xlaserve.runtime.programs import compilation
from xlaserve.runtime.programs.mappings import Mappings
from xlaserve.serving.access.control import AccessControl
from xlaserve.serving.answers import Counting
from xlaserve.serving.call import current_call
from xlaserve.serving.engine import Engine
from xlaserve.serving.gates import Gates, everybody
from xlaserve.serving.inputs.image_files import ImageLimits
from xlaserve.serving.inputs.shared_memory import Regions, SharedMemoryPolicy
from xlaserve.serving.observability.failures import Failures
from xlaserve.serving.repeats import Repeats
from xlaserve.serving.response_cache import ResponseCache
from xlaserve.serving.returning import Returning
from xlaserve.serving.standing import Standing
from xlaserve.serving.stations.table import ExecutionPolicy, Stations
from xlaserve.settings import Settings
from xlaserve.settings.choices import Device, TlsEndpoint

_SWITCH_SECONDS = 0.0005
"""Switch interval of the GIL: the default of 5 ms would let compiling threads delay the loop."""

_LEAST_CLOSING_SECONDS, _MOST_CLOSING_SECONDS = 1.0, 5.0
"""Minimum and maximum time for unloading models and ending threads at shutdown."""
_ARRIVAL_SECONDS = 1.0
"""Seconds for which a draining server still admits requests."""

_log = structlog.get_logger("app")


class Application:
    """The whole server, created from the settings; `running` starts and stops it."""

    successor: Successor

    def __init__(
        self,
        settings: Settings,
        display: Display | None = None,
        systemd: Systemd | None = None,
        parent: Parent | None = None,
    ) -> None:
        check_roots(settings)
        self.settings, self.display = settings, display or NoDisplay()
        self.grpc: GrpcServer
        self.http: HttpServer | None = None
        self.metrics: HttpServer | None = None
        """The server of the separate metrics endpoint, or None."""
        self.compilation = compilation.of_settings(settings, processes=compile_processes(settings))
        self._start_device = DeviceStart(settings, self.compilation)
        self.mappings = Mappings(settings.max_memory_mappings)
        self._closing_until: float | None = None
        """Deadline for threads to end at shutdown, in event loop time."""
        self.has_threads_left = False
        """Whether threads were still running after shutdown; only the process's exit ends them."""
        self.workers = Workers(
            load_threads=load_threads(settings),
            execute_threads=settings.execute_threads,
            spare_execute_threads=settings.spare_execute_threads,
            max_abandoned=settings.max_abandoned,
        )
        self._systemd, self._parent = systemd or Systemd(), parent
        plane, others = plane_of(parent), NOBODY if parent is None else parent.others
        events, notes = events_of(settings, parent)
        self.reloads = Reloads(
            self.workers.wait,
            check_seconds=CHECK_SECONDS,
            on_signal=self._manager.reloads,
            notes=notes,
        )
        """Parts reloaded at SIGHUP, or when their files change."""
        self._tls = self._read_tls()
        self.registry = Registry(settings.max_requests_per_model, Standing())
        self.capacity = Capacity()
        counting = Counting(failures=Failures(reason_of))
        if settings.access_rules:
            # Register before reading, so that a change in between triggers another read.
            self.reloads.add(
                "access rules",
                lambda: self.access.reload(self.workers.wait),
                [Path(settings.access_rules)],
            )
        self.access = AccessControl.of(
            settings, None if parent is None else parent.quotas, self.registry.standing
        )
        """Permissions of callers, checked by the gates if there are rules or restrictions."""
        check = self.access.check if self.access.is_needed else everybody
        self.gates = Gates(permission=check, observers=[counting], trusted=settings.trusted_proxy)
        """The gates that admit every call; shared by all transports."""
        self.observing = observe(settings, self.gates, counting.failures)
        self.ledger, kept = Ledger(settings.max_held_bytes), settings.allocator_kept_bytes
        spare = MessageMemory(min(settings.max_spare_bytes, self.ledger.spare))
        self.ledger.on_pressure(spare.drop)
        self.shared = Shared(self.ledger, spare)
        self.response_cache = ResponseCache.of(settings.response_cache_bytes, self.ledger)
        self._returning = Returning(self.ledger, self.workers.wait, kept_bytes=kept)
        self.engine = Engine(
            self.registry,
            self.gates,
            self.workers.host,
            image_limits=ImageLimits(settings.max_image_bytes, settings.max_image_pixels),
            regions=Regions(SharedMemoryPolicy.of(settings), plane, self.access.sees),
        )
        nested = self._nested = NestedCalls(self.engine, self.gates)
        self._measured = MeasuredMemory(self.registry)
        metrics = ModelMetrics()
        self.stations = Stations(
            self.workers,
            ExecutionPolicy(
                settings.inline_execution_seconds,
                settings.max_requests_per_model,
                batching=settings.dynamic_batching,
                compile_seconds=settings.load_seconds,
                execution_seconds=settings.execution_seconds,
                processes=settings.processes,
            ),
            self.engine,
            cache=self.response_cache,
            counting=counting,
        )
        self.repository = open_repositories(settings)
        machinery = Machinery(
            load=loaders.load,
            predict_size=partial(loaders.predict_size, processes=settings.processes),
            try_loading=partial(
                try_loading, settings, beginning(self.compilation, self._start_device)
            ),
            release_memory=self._release_memory,
            mappings=self.mappings,
            compilation=self.compilation,
            devices=lambda: device.devices(self._start_device()),
            on_stage=self.display.stage,
            text_limits=text_limits(settings),
        )
        loader = VersionLoader(
            self.registry,
            self.workers,
            machinery,
            self.capacity,
            make_station=self.stations.build,
            drain_seconds=settings.drain_seconds,
            load_seconds=settings.load_seconds,
            memory_wait_seconds=settings.memory_wait_seconds,
            expect_unloads=settings.modelmesh,
            evict=settings.evict,
            background_compile=settings.background_compile and not settings.modelmesh,
            mmap_parameters=settings.mmap_parameters or settings.processes > 1,
            processes=settings.processes,
            max_on_demand_shapes=settings.max_on_demand_shapes,
            python=python_host(settings, nested, metrics, self._measured),
            max_sequences=settings.max_sequences_per_model,
            notes=notes,
        )
        self.control = ModelControl(
            settings,
            self.registry,
            self.repository,
            loader,
            self.workers,
            plane=plane,
            others=others,
            notes=notes,
            sees_for=lambda operation: self.access.sees(current_call.get(), operation),
        )
        self._file_reader = FileReader()
        self.tracing = tracing(settings, self.gates, self.workers, plane)
        self.history = History(self.registry, self.capacity, counting.failures, self.observing.lag)
        self._core = Core(
            settings,
            ServerDescription.of(settings, version=build.version()),
            self.workers,
            self.registry,
            self.capacity,
            self.mappings,
            self.compilation,
            self.repository,
            self.control,
            self.engine,
            Repeats.of(self.registry, self.gates, self.response_cache),
            self.gates,
            self.access,
            self.shared,
            self._file_reader,
            metrics,
            self.tracing,
            self.observing,
            self.history,
            events,
            others,
        )

    @property
    def _manager(self) -> ServiceManager:
        return self._systemd if self._parent is None else self._parent.manager

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Addresses]:
        """Serve while the context is active; the ports are open before JAX is imported.

        Leaving the context drains the server: requests in flight get `grace_seconds` to complete.
        """
        changes = CodeChanges(self.control, self.registry, self.workers)
        self._nested.bind(asyncio.get_running_loop(), changes.make)
        self._measured.bind(asyncio.get_running_loop())
        async with AsyncExitStack() as stack:
            stack.callback(self._end_threads)
            stack.callback(self._file_reader.close)
            stack.callback(self.engine.regions.close)
            answer_left_behind(
                self.control.plane, self.registry, self.engine.regions, self.response_cache
            )
            listeners = self._bind(stack.enter_context(ExitStack()))
            door = assemble_grpc(self._core)
            self.grpc = door.server
            why = self.control.follower.why_not_ready
            await stack.enter_async_context(probed(self.settings.probe_socket, self._is_ready, why))
            # Entered first, so that it also runs during the drain.
            await stack.enter_async_context(running_beside(self._manager.keep_alive()))
            # Registered before listening: libuv aborts if a socket is closed while it polls it.
            stack.push_async_callback(self._stop, door)
            door.listen(listeners.grpc, self._tls)
            self._listen_http(listeners, door)
            await stack.enter_async_context(running_beside(self._returning.run()))
            await stack.enter_async_context(running_beside(self.observing.watch()))
            await stack.enter_async_context(running_beside(self.history.watch()))
            if self.settings.access_rules:
                keys = self.access.follow_keys(self.workers.wait)
                await stack.enter_async_context(running_beside(keys))
            await stack.enter_async_context(running_beside(self.reloads.follow()))
            http = listeners.http.address if listeners.http else None
            metrics = listeners.metrics.address if listeners.metrics else None
            grpc = [listener.address for listener in listeners.grpc] or [NO_ENDPOINT]
            addresses = Addresses(grpc[0], http, grpc_data=grpc[-1], metrics=metrics)
            more = {"version": build.version(), **({"metrics": metrics} if metrics else {})}
            _log.info("listening", grpc=grpc[0], grpc_data=grpc[-1], http=http, **more)
            self.display.listening(addresses)
            yield addresses

    async def load(self) -> None:
        """Start the device and load the startup models.

        Raises DeviceUnavailable if the device in the settings is not available.
        """
        follow = None if self._parent is None else self._parent.follow
        if follow is not None:
            await follow()
        else:
            await self._prepare_devices()
        await self.control.follower.start()
        if self.settings.exit_on_error and self._systemd.predecessor is None:
            self.control.follower.check_start()
        rows = await self.rows()
        ready = sum(row.size_bytes is not None for row in rows)
        _log.info("started", ready=ready, models=len(rows))
        self.display.started(rows)

    async def _prepare_devices(self) -> None:
        platform = await self.workers.wait(self._start_device)
        await self.workers.wait(loaders.load_modules)
        if self.settings.processes > 1 and platform != Device.CPU:
            expected = f"1 with a device of {platform}, which one process owns"
            raise InvalidSettings("processes", expected, int(self.settings.processes))
        if platform == "cuda" and self.engine.regions.is_on:
            self.engine.regions.driver = await self.workers.wait(open_driver)
        devices = await self.workers.wait(device.devices, platform)
        memory = await self.workers.wait(device.memory, platform)
        limits = [memory[name][1] if name in memory else None for name in devices.names]
        of_each = [capacity_bytes(self.settings, one, devices.count, platform) for one in limits]
        of_host = capacity_bytes(self.settings, None, 1)
        totals = dict(zip(devices.names, of_each, strict=True))
        self.capacity.limit(totals, of_host, devices.kind)
        if self.settings.modelmesh:
            RuntimeLimits.of(self.settings, min(of_each) * self.settings.processes)
            # With ModelMesh, requests wait for loads: prepare for the first one now.
            await self.workers.wait(loaders.prepare, self.compilation, platform)
        await self.workers.wait(allocator.freeze_heap)
        if not self.mappings.is_counted:
            _log.info("memory mappings not counted", reason="/proc/self/maps does not exist")
        _log.info(
            "device ready",
            platform=platform,
            devices=devices.count,
            capacity_bytes=self.capacity.total_bytes,
        )
        if unused := compilation.without_effect(self.settings, platform):
            _log.warning("settings without effect", platform=platform, settings=list(unused))

    def _release_memory(self) -> None:
        device.release_memory()
        self.mappings.count()

    async def rows(self) -> list[ModelRow]:
        """Return all known model versions with their memory and compile time."""
        return [self._row(entry) for entry in await self.control.catalog.known()]

    def _row(self, entry: IndexEntry) -> ModelRow:
        model = self.registry.find(entry.name)
        version = model.versions.get(entry.version) if model else None
        if version is None or version.instance is None:
            return ModelRow(entry, None, None)
        instance = version.instance
        return ModelRow(entry, instance.memory.total_bytes, instance.info.compile_seconds)

    async def serve(self) -> None:
        """Load the startup models, then poll the repository if enabled, until cancelled."""
        await self.load()
        if isinstance(plane := self.control.plane, OneProcess):
            await take_changes(self._systemd, self.settings, plane)
        self._manager.ready()
        while True:
            await asyncio.sleep(self.settings.poll_interval_seconds)
            await self.control.follower.check()

    # --- start ---

    def _read_tls(self) -> ServerTls | None:
        tls = server_tls(self.settings)
        if tls is not None:
            # Register before reading, so that a change in between triggers another read.
            self.reloads.add("tls", partial(self.workers.wait, tls.reload), tls.files)
            tls.reload()
        return tls

    def _is_ready(self) -> bool:
        return self.control.follower.server_ready

    def _bind(self, stack: ExitStack) -> Bound:
        if self._parent is not None:
            return self._parent.listeners
        bound = Listeners(self.settings, self._systemd, stack)
        plane = self.control.plane
        assert isinstance(plane, OneProcess)
        self.successor = Successor(self.settings, bound.every, self._systemd, plane, self._is_ready)
        stack.callback(self.successor.close)
        return bound

    def _listen_http(self, listeners: Bound, door: GrpcDoor) -> None:
        if listeners.http is not None:
            self.http = http_server(self._core, self.http_routes(door.mesh), door.runner)
            self.http.listen(listeners.http.socket, self._contexts(TlsEndpoint.HTTP))
        if listeners.metrics is not None:
            listener = listeners.metrics
            self.metrics = http_server(self._core, metrics_routes(self._core, self._connections()))
            tls = self._contexts(TlsEndpoint.METRICS)
            self.metrics.listen(listener.socket, tls, name=listener.setting)

    def _contexts(self, endpoint: TlsEndpoint) -> MakeContext | None:
        return None if self._tls is None else self._tls.of(endpoint)

    def http_routes(self, mesh: ModelRuntime | None = None) -> RouteTable:
        """Return all HTTP routes; `mesh` is the runtime that ModelMesh controls, or None."""
        return http_routes(self._core, self._connections(), mesh)

    def _connections(self) -> Mapping[str, Callable[[], int]]:
        return {
            "grpc": lambda: self.grpc.connections,
            "http": lambda: sum(server.connections for server in self._http_servers()),
        }

    @property
    def open_connections(self) -> int:
        """Return the number of connections of all endpoints, including TLS handshakes."""
        http = sum(server.connections + server.in_handshake for server in self._http_servers())
        return self.grpc.connections + self.grpc.in_handshake + http

    def _http_servers(self) -> list[HttpServer]:
        return [server for server in (self.http, self.metrics) if server is not None]

    # --- stop ---

    async def _stop(self, door: GrpcDoor) -> None:
        _log.info("shutting down")
        self._manager.stopping()
        self.control.begin_shutdown()
        door.health.close()
        door.streams.close()
        loop = asyncio.get_running_loop()
        # Admit requests for a moment: clients may send some before they learn of the shutdown.
        refusing = loop.call_later(_ARRIVAL_SECONDS, self.gates.drain)
        self.repository.remotes.close()
        until = loop.time() + self.settings.grace_seconds
        servers: list[GrpcServer | HttpServer] = [self.grpc, *self._http_servers()]
        await asyncio.gather(*(server.drain(self.settings.grace_seconds) for server in servers))
        refusing.cancel()
        self.gates.drain()
        await self.tracing.close()
        await self.observing.close(self.workers)
        self._closing_until = loop.time() + min(
            _MOST_CLOSING_SECONDS, max(_LEAST_CLOSING_SECONDS, until - loop.time())
        )
        try:
            async with asyncio.timeout_at(self._closing_until):
                await self.control.close()
        except TimeoutError:
            _log.warning("not all models unloaded", reason="threads that do not end still use it")
        _log.info("stopped")

    def _end_threads(self) -> None:
        """End the threads, waiting a limited time; a computing thread cannot be stopped."""
        # First, because load threads wait for the compilation processes.
        self.compilation.close()
        until = self._closing_until
        seconds = None if until is None else max(0.0, until - asyncio.get_running_loop().time())
        self.has_threads_left = not self.workers.close(seconds)
        if self.has_threads_left:
            _log.warning("threads still running", abandoned=len(self.workers.abandoned))


def prepare(
    settings: Settings,
    display: Display | None = None,
    systemd: Systemd | None = None,
    parent: Parent | None = None,
) -> Application:
    """Configure the interpreter for serving, and return the application."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    allocator.give_back_large_blocks(kept_bytes=settings.allocator_kept_bytes)
    application = Application(settings, display, systemd, parent)
    # At SIGHUP, restore the log levels, which clients may have changed (logging extension).
    application.reloads.add("access log", application.observing.reopen)
    application.reloads.add("log", partial(log.set_levels, log.levels()))
    return application


async def run(
    settings: Settings, display: Display | None = None, systemd: Systemd | None = None
) -> bool:
    """Serve until SIGTERM or SIGINT; a second one kills the process. SIGHUP reloads files.

    Return whether threads are still running, which would block the interpreter's regular exit.
    """
    application = prepare(settings, display, systemd)
    async with application.running():
        serving = asyncio.ensure_future(application.serve())
        handled = signals.handled(serving, application.reloads.request, application.successor)
        with handled, suppress(asyncio.CancelledError):
            await serving
    return application.has_threads_left
