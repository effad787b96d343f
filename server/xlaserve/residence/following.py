"""Loads models at startup and follows changes of a polled repository."""

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
from xlaserve.residence.reports.failing import describe_failures, describe_loading
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
"""Value of the setting `load_model` that means every model of the repository."""

_NEXT: Mapping[ModelControlMode, str] = MappingProxyType(
    {
        ModelControlMode.EXPLICIT: "load it with the repository API, or restart the server",
        ModelControlMode.POLL: "the next poll of the repository loads it",
        ModelControlMode.NONE: "restart the server",
    }
)
"""How to load a model after its files are fixed, by control mode."""


class RepositoryFollower:
    """Loads models at startup according to the control mode, and follows changes on disk."""

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
        """`load` and `unload` are methods of `ModelControl`, which serializes them."""
        self._settings = settings
        self._registry = registry
        self._repository = repository
        self._workers = workers
        self._load = load
        self._unload = unload
        self._plane = plane
        self.watch = RepositoryWatches(repository, settings.poll_unload_fraction)
        self._failed: dict[str, tuple[str, str]] = {}
        """Models that failed to load from the repository, with the class and text of the error.
        Some of them may answer by now."""
        self._standing = registry.standing
        self._is_on = False
        """True between the end of `start` and `stop`."""
        self._log = structlog.get_logger("control")

    @property
    def is_started(self) -> bool:
        """Whether every model due at startup has been loaded or has failed."""
        return self._is_on and self._standing.row.is_settled

    @property
    def server_ready(self) -> bool:
        """Tell whether startup is done and satisfies the `readiness` setting, in every process."""
        return self.is_ready_here and self._plane.is_ready

    @property
    def is_ready_here(self) -> bool:
        """Tell whether startup is done and satisfies the `readiness` setting, in this process."""
        if self._settings.readiness is Readiness.MODELS:
            return self.is_started and all(map(self._registry.ready, self._failed))
        return self.is_started

    @property
    def failed(self) -> Mapping[str, tuple[str, str]]:
        """Return the models that failed to load, with the class and text of the error."""
        return self._failed

    def forget(self, name: str) -> None:
        """Drop the recorded failures of a model that was unloaded."""
        self._failed.pop(name, None)
        self._registry.failed.forget(name)

    def why_not_ready(self) -> str:
        """Return why the server is not ready, naming models that load or failed; empty if it is.

        Models hidden from the current caller are not named.
        """
        if not self._standing.row.is_settled:
            loading = describe_loading(self._registry)
            return self._standing.row.says + (f": {loading}" if loading else "")
        if not self._is_on:
            return "the server is shutting down"
        if not self.is_ready_here:
            return describe_failures(self._registry, sorted(self._failed))
        return "" if self._plane.is_ready else "another process of the server is not ready"

    def check_start(self) -> None:
        """Raise StartFailed if a required model is not loaded."""
        if self._failed:
            raise StartFailed(sorted(self._failed))

    def stop(self) -> None:
        """Report the server as not ready from now on."""
        self._is_on = False

    async def start(self) -> None:
        """Load the models selected by the control mode; log failures and show them in the index."""
        self._standing.state = State.UNREAD
        await self._workers.wait(self._remove_leftovers)
        await self._read_first()
        self._is_on = True
        self._registry.notify()

    async def _read_first(self) -> None:
        """Read the repository and load its models; a complete read makes the state SETTLED."""
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
        """Tell whether this process polls the repository for models to load."""
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
        # SageMaker creates the directory only with the first model.
        names = self._repository.names if settings.sagemaker_multi_model else self.watch.names
        every = await self._workers.wait(names)
        explicit = settings.model_control_mode is ModelControlMode.EXPLICIT
        if explicit and EVERY_MODEL not in settings.load_model:
            return settings.load_model
        if every is None:
            # Without polling, nothing would load the models later.
            raise RepositoryUnreadable(self.watch.unreadable, self.watch.problem)
        return every

    async def _load_logged(self, name: str, *, load: Callable[[str], Awaitable[None]]) -> None:
        try:
            await load(name)
        except XlaserveError as error:
            self._failed[name] = (type(error).__name__, str(error))
            if isinstance(error, ModelNotFound | StillStarting) and not self._polls:
                # The model was requested by name, so no listing of the repository includes it.
                missing = ModelNotFound(name, detail=NOT_IN_REPOSITORY)
                self._registry.failed.note(name, str(missing))
            to_do = f"fix its files, then {_NEXT[self._settings.model_control_mode]}"
            fields = {"model": name, "error": str(error), "to_do": to_do}
            self._log.error("model not loaded from the repository", **fields)
        except Exception as error:
            self._failed[name] = (type(error).__name__, str(error))
            self._log.exception("model not loaded from the repository", model=name)

    async def poll(self) -> None:
        """Scan the repository once, and load, reload or unload the models that changed."""
        was = self.server_ready, self.is_ready_here, self.is_started
        try:
            if not self._standing.row.is_settled:
                await self._read_first()
                return
            await self._refresh()
            changes = await self._workers.wait(self.watch.changes)
            self._standing.state = self._state_after_scan()
            everywhere = partial(self._load_logged, load=self._load_everywhere)
            with because(Cause.REPOSITORY):
                await self._each(changes.changed, everywhere)
                await self._each(changes.gone, self._unload_gone)
        except Exception:
            # Loaded models continue to serve, and the next poll tries again.
            self._log.exception("repository changes not applied")
        finally:
            if was != (self.server_ready, self.is_ready_here, self.is_started):
                self._registry.notify()

    def _state_after_scan(self) -> State:
        if self.watch.problem:
            return State.MISSING
        return State.DOUBTED if self.watch.doubted else State.SETTLED

    async def check(self) -> None:
        """Poll the repository if the control mode says so; otherwise only check the stores."""
        if self._settings.model_control_mode is not ModelControlMode.POLL:
            if self._repository.remotes:
                await self.check_stores()
        # Until its first complete read, each process polls for itself.
        elif self._plane.leads or not self._registry.standing.row.is_settled:
            await self.poll()

    async def check_stores(self) -> None:
        """Check every object store, and log when it becomes unavailable or available again."""
        remotes = self._repository.remotes
        before = remotes.problems
        await self._workers.fetch_for(remotes.check)
        for url, problem in remotes.problems.items():
            if problem and not before[url]:
                self._log.warning("store unreachable", store=url, reason=problem)
            elif before[url] and not problem:
                self._log.info("store reachable again", store=url)

    async def _refresh(self) -> None:
        """List the object stores for the next scan."""
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
