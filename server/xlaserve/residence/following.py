"""Loads models at the start, and follows a polled repository."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import structlog

from xlaserve.concurrency.control_plane import Change, ChangeKind, ControlPlane
from xlaserve.concurrency.workers import Workers
from xlaserve.errors import (
    ModelNotFound,
    RepositoryUnreadable,
    StartFailed,
    StillStarting,
    XlaserveError,
)
from xlaserve.files.temporary import remove_leftovers
from xlaserve.residence.host import load_threads
from xlaserve.residence.registry import Registry
from xlaserve.residence.reports.failing import told_failures
from xlaserve.residence.repository.repository import Repository
from xlaserve.residence.repository.watches import RepositoryWatches
from xlaserve.residence.repository.watching import Changes
from xlaserve.serving.access.sight import NOT_IN_REPOSITORY
from xlaserve.serving.observability.event_notes import because
from xlaserve.serving.observability.events import Cause
from xlaserve.serving.standing import State
from xlaserve.settings import Settings
from xlaserve.settings.choices import ModelControlMode, Readiness

EVERY_MODEL = "*"
"""Stands for all models of the repository, in the setting `load_model`."""

_NEXT: Mapping[ModelControlMode, str] = MappingProxyType(
    {
        ModelControlMode.EXPLICIT: "load it with the repository API, or restart the server",
        ModelControlMode.POLL: "the next poll of the repository loads it",
        ModelControlMode.NONE: "restart the server",
    }
)
"""The trigger that loads a repaired model."""


class RepositoryFollower:
    """Loads models at the start by the control mode, and follows changes on disk."""

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        repository: Repository,
        workers: Workers,
        *,
        load: Callable[[str], Awaitable[None]],
        unload: Callable[[str], Awaitable[None]],
        plane: ControlPlane,
    ) -> None:
        """`load` and `unload` are `ModelControl`'s, serialized with clients' requests."""
        self._settings = settings
        self._registry = registry
        self._repository = repository
        self._workers = workers
        self._load = load
        self._unload = unload
        self._plane = plane
        self.watch = RepositoryWatches(repository, settings.poll_unload_fraction)
        self._failed: dict[str, tuple[str, str]] = {}
        """Models of the start that could not be loaded, each with the class of its error and the
        text; some may answer by now."""
        self._standing = registry.standing
        self._is_on = False
        """Whether `start` has ended, and `stop` was not called."""
        self._log = structlog.get_logger("control")

    @property
    def is_started(self) -> bool:
        """Whether every load of the start has ended."""
        return self._is_on and self._standing.row.is_settled

    @property
    def server_ready(self) -> bool:
        """Tell whether the start is done, and went as the readiness setting demands.

        Of a server of several processes, in all of them.
        """
        return self.is_ready_here and self._plane.is_ready

    @property
    def is_ready_here(self) -> bool:
        """Tell whether this process is ready."""
        if self._settings.readiness is Readiness.MODELS:
            return self.is_started and all(map(self._registry.ready, self._failed))
        return self.is_started

    @property
    def failed(self) -> Mapping[str, tuple[str, str]]:
        """Return the models whose load failed, with the error's class and text."""
        return self._failed

    def forget(self, name: str) -> None:
        """Drop the recorded failure of a model that was unloaded."""
        self._failed.pop(name, None)
        self._registry.failed.forget(name)

    def why_not_ready(self) -> str:
        """Return why the server is not ready, with each model that failed; empty where it is.

        Of the models that the call which is answered now may see.
        """
        if not self._standing.row.is_settled:
            return self._standing.row.says
        if not self._is_on:
            return "the server is shutting down"
        if not self.is_ready_here:
            return told_failures(self._registry, sorted(self._failed))
        return "" if self._plane.is_ready else "another process of the server is not ready"

    def check_start(self) -> None:
        """Raise StartFailed if a required model is not loaded."""
        if self._failed:
            raise StartFailed(sorted(self._failed))

    def stop(self) -> None:
        """Be ready no more."""
        self._is_on = False

    async def start(self) -> None:
        """Load the models of the control mode; failures are logged and indexed."""
        self._standing.state = State.UNREAD
        await self._workers.wait(self._remove_leftovers)
        await self._read_first()
        self._is_on = True
        self._registry.notify()

    async def _read_first(self) -> None:
        """Read the repository and load its models; it is settled after a complete read."""
        with because(Cause.START):
            first = await self._changes_at_start()
            is_whole = not self._polls or self.watch.seen
            self._standing.state = State.LOADING if is_whole else State.AWAY
            await self._each(first.changed, partial(self._load_logged, load=self._load))
            await self._each(first.gone, self._unload_here)
        if is_whole:
            self._standing.state = State.SETTLED

    @property
    def _polls(self) -> bool:
        """Tell whether this process loads the repository's models once it is readable."""
        polls = self._settings.model_control_mode is ModelControlMode.POLL
        return polls and self._plane.loads and not self._settings.modelmesh

    def _remove_leftovers(self) -> None:
        count = remove_leftovers(self._settings.scratch_directory)
        if not self._settings.modelmesh:
            count += self._repository.remove_leftovers()
        if count:
            self._log.info("leftovers of killed processes removed", count=count)

    async def _changes_at_start(self) -> Changes:
        if self._polls:
            await self._refresh()
            return await self._workers.wait(self.watch.changes)
        return Changes(tuple(await self._names_at_start()))

    async def _names_at_start(self) -> Sequence[str]:
        settings = self._settings
        if settings.modelmesh or not self._plane.loads:
            return ()
        await self._refresh()
        # SageMaker makes the directory with the first model.
        look = self._repository.names if settings.sagemaker_multi_model else self.watch.names
        every = await self._workers.wait(look)
        explicit = settings.model_control_mode is ModelControlMode.EXPLICIT
        if explicit and EVERY_MODEL not in settings.load_model:
            return settings.load_model
        if every is None:
            # Nothing would ever load them.
            raise RepositoryUnreadable(self.watch.unreadable, self.watch.problem)
        return every

    async def _load_logged(self, name: str, *, load: Callable[[str], Awaitable[None]]) -> None:
        try:
            await load(name)
        except XlaserveError as error:
            self._failed[name] = (type(error).__name__, str(error))
            if isinstance(error, ModelNotFound | StillStarting) and not self._polls:
                # No list of the repository has it: it was asked for by its name.
                missing = ModelNotFound(name, detail=NOT_IN_REPOSITORY)
                self._registry.failed.note(name, str(missing))
            to_do = f"fix its files, then {_NEXT[self._settings.model_control_mode]}"
            said = {"model": name, "error": str(error), "to_do": to_do}
            self._log.error("model not loaded from the repository", **said)
        except Exception as error:
            self._failed[name] = (type(error).__name__, str(error))
            self._log.exception("model not loaded from the repository", model=name)

    async def poll(self) -> None:
        """Scan the repository once, and load, reload and unload changed models."""
        was = self.server_ready, self.is_ready_here, self.is_started
        try:
            if not self._standing.row.is_settled:
                await self._read_first()
                return
            await self._refresh()
            changes = await self._workers.wait(self.watch.changes)
            self._standing.state = self._state_after_look()
            everywhere = partial(self._load_logged, load=self._load_everywhere)
            with because(Cause.REPOSITORY):
                await self._each(changes.changed, everywhere)
                await self._each(changes.gone, self._unload_gone)
        except Exception:
            # What serves goes on serving, and the next look comes.
            self._log.exception("repository not followed")
        finally:
            if was != (self.server_ready, self.is_ready_here, self.is_started):
                self._registry.notify()

    def _state_after_look(self) -> State:
        if self.watch.problem:
            return State.MISSING
        return State.DOUBTED if self.watch.doubted else State.SETTLED

    async def look(self) -> None:
        """Look for changes where the control mode says so, else at stores alone."""
        if self._settings.model_control_mode is not ModelControlMode.POLL:
            if self._repository.remotes:
                await self.look_at_stores()
        # Until each process has read it, each looks for itself.
        elif self._plane.leads or not self._registry.standing.row.is_settled:
            await self.poll()

    async def look_at_stores(self) -> None:
        """Check every store, and log changes of its availability."""
        remotes = self._repository.remotes
        before = remotes.problems
        await self._workers.fetch_for(remotes.look)
        for url, problem in remotes.problems.items():
            if problem and not before[url]:
                self._log.warning("store unreachable", store=url, reason=problem)
            elif before[url] and not problem:
                self._log.info("store reachable again", store=url)

    async def _refresh(self) -> None:
        """List the stores for the next scan."""
        if self._repository.remotes:
            await self._workers.fetch_for(self._repository.remotes.refresh)

    async def _unload_here(self, name: str) -> None:
        self.forget(name)
        if self._registry.find(name) is not None:
            await self._unload(name)

    async def _unload_gone(self, name: str) -> None:
        self.forget(name)
        if self._registry.find(name) is not None:
            change = Change(ChangeKind.UNLOAD, name, {"models": [name]})
            await self._plane.apply(change, partial(self._unload, name))

    async def _load_everywhere(self, name: str) -> None:
        await self._plane.apply(Change(ChangeKind.FOLLOW, name), partial(self._load, name))

    async def _each(self, names: Iterable[str], work: Callable[[str], Awaitable[None]]) -> None:
        queue = iter(list(names))

        async def take() -> None:
            for name in queue:
                await work(name)

        async with asyncio.TaskGroup() as group:
            for _ in range(load_threads(self._settings) + 1):
                group.create_task(take())
