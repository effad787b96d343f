"""Loads, reloads and unloads models for clients, at startup, and on repository changes."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import structlog

from xlaserve.concurrency.control_plane import Change, ChangeKind, ControlPlane, OneProcess
from xlaserve.concurrency.others import NOBODY, Others
from xlaserve.concurrency.sharing import CalledOff, SingleFlight, Turns
from xlaserve.concurrency.workers import Workers
from xlaserve.errors import (
    FilesMissing,
    LoadCancelled,
    LoadFailed,
    ModelControlForbidden,
    ModelNotFound,
    ShuttingDown,
    Unsupported,
    XlaserveError,
)
from xlaserve.residence.cancelling import Cancelling
from xlaserve.residence.catalog import Catalog
from xlaserve.residence.dependents import Dependents
from xlaserve.residence.following import RepositoryFollower
from xlaserve.residence.loading import VersionLoader
from xlaserve.residence.lost import answer_answering
from xlaserve.residence.of_all import OfAll
from xlaserve.residence.registry import Registry
from xlaserve.residence.repository.overrides import (
    LoadParameter,
    LoadParameters,
    Override,
    read_unload_parameters,
)
from xlaserve.residence.repository.repository import Repository
from xlaserve.residence.repository.sources import ModelSource
from xlaserve.residence.steps import with_steps_in_sight
from xlaserve.serving.access.sight import (
    NOT_IN_REPOSITORY,
    Sees,
    everything,
    require_seen_now,
    seen_now,
    step_now,
)
from xlaserve.serving.call import Operation, owner_now
from xlaserve.serving.observability.event_notes import EventNotes, cause_now
from xlaserve.serving.observability.events import Cause
from xlaserve.settings import Settings
from xlaserve.settings.choices import ModelControlMode

_NOTHING: Mapping[str, LoadParameter] = MappingProxyType({})
_PLAIN = LoadParameters()


def _nothing() -> None:
    pass


class ModelControl:
    """Controls which models are loaded.

    Operations on one model are serialized; different models load and unload concurrently.
    """

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        repository: Repository,
        loader: VersionLoader,
        workers: Workers,
        *,
        others: Others = NOBODY,
        plane: ControlPlane | None = None,
        notes: EventNotes | None = None,
        sees_for: Callable[[Operation], Sees] = lambda _: everything,
    ) -> None:
        """`sees_for` returns which models the current caller may use for an operation."""
        self._sees_for = sees_for
        self._notes = notes or EventNotes()
        self.failed_loads: Mapping[str, int] = self._notes.failed_loads
        """Failed loads per model, including loads that failed before a version was known."""
        self.plane = plane or OneProcess()
        self.plane.handle(ChangeKind.LOAD, self._load_change)
        self.plane.handle(
            ChangeKind.FOLLOW, lambda change: self._load_checked(change.subject, _PLAIN)
        )
        self.plane.handle(ChangeKind.UNLOAD, self._unload_change)
        self.plane.handle(ChangeKind.EVICT, lambda change: self.evict(change.subject))
        self.plane.handle(ChangeKind.PURGE, lambda _: self.purge())
        self._settings = settings
        self._registry = registry
        self._repository = repository
        self._loader = loader
        self._workers = workers
        self._turns = Turns()
        self._loads: SingleFlight[None] = SingleFlight(abandonable=True)
        self._cancelling = Cancelling(registry, self._notes)
        self._unloads: SingleFlight[None] = SingleFlight(abandonable=False)
        self._overrides: dict[str, Override] = {}
        if isinstance(self.plane, OneProcess):
            self.plane.files_of_model = partial(_files_of, self._overrides)
        self._dependents = Dependents(registry)
        self.catalog = Catalog(settings, registry, repository, workers, plane=self.plane)
        self.of_all = OfAll(self.catalog, others)
        self.follower = RepositoryFollower(
            settings,
            registry,
            repository,
            workers,
            load=partial(self._load_checked, checked=_PLAIN),
            unload=partial(self._unload_shared, dependents=False),
            plane=self.plane,
        )
        answer_answering(self.plane, registry, self.follower)
        self._stopping = False
        self._purging = 0
        self._purges = 0
        """Counts the starts and ends of purges: a load that finds the count changed is
        cancelled."""
        self._log = structlog.get_logger("control")

    # --- Requests of clients ---

    async def load(self, name: str, parameters: Mapping[str, LoadParameter] = _NOTHING) -> None:
        """Load or reload a model, and return once it answers without further preparation.

        Concurrent loads of one model are coalesced. Raises ModelControlForbidden, ModelNotFound,
        LoadFailed, OutOfMemory, OutOfSpace, or an InvalidRequest for the parameters (model
        repository extension, Load).
        """
        self.require_explicit("load")
        checked = _read(self._settings, name, parameters)
        require_seen_now(name, detail=NOT_IN_REPOSITORY)
        scalars = {key: value for key, value in parameters.items() if not isinstance(value, bytes)}
        files = {key: value for key, value in parameters.items() if isinstance(value, bytes)}
        change = Change(ChangeKind.LOAD, name, scalars, files)
        if checked != _PLAIN:
            _refuse_unseen(self.plane, "a load with a configuration or files")
        await self.plane.apply(change, partial(self._load_checked, name, checked))

    async def unload(self, name: str, parameters: Mapping[str, LoadParameter] = _NOTHING) -> None:
        """Unload a model and return once its memory is free. No error if it is not loaded.

        With `unload_dependents`, the ensembles that use the model are unloaded first, and models
        that were loaded only for it are unloaded after it (model repository extension, Unload).
        Models that the client may not manage stay loaded.
        """
        self.require_explicit("unload")
        dependents = read_unload_parameters(parameters)
        require_seen_now(name)
        if self._registry.find(name) is None:
            # A load in progress may not have reached the registry yet.
            await self._loads.over(_of(name))
        if self._registry.find(name) is None:
            if not await self.catalog.could_load(name):
                raise self._registry.standing.absent(name)
            return
        sees = seen_now()
        if dependents:
            _refuse_unseen(self.plane, "unload_dependents")
        leaving = self._dependents.leaving_with(name) if dependents else [name]
        change = Change(
            ChangeKind.UNLOAD,
            name,
            {"models": [one for one in leaving if one == name or sees(one)]}
            # Only the process that loads models knows which ones were loaded for this model.
            | ({} if self.plane.loads else {"dependents": dependents}),
        )
        await self.plane.apply(
            change, partial(self._unload_shared, name, dependents=dependents, sees=sees)
        )

    def begin_shutdown(self) -> None:
        """Report the server as not ready, so that clients go elsewhere, and cancel every load."""
        self.follower.stop()
        self._stopping = True
        self._cancelling.stop()
        self._loads.cancel()
        self._registry.notify()

    def require_explicit(self, operation: str) -> None:
        """Raise ModelControlForbidden unless the control mode lets clients load and unload."""
        mode = self._settings.model_control_mode
        if mode is not ModelControlMode.EXPLICIT:
            raise ModelControlForbidden(operation, mode.value)

    # --- Requests of ModelMesh and SageMaker ---

    async def load_from(
        self,
        name: str,
        key: Hashable,
        find: Callable[[], ModelSource],
        *,
        before: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Load a model from outside the repository; `find` locates its files.

        Concurrent loads with the same name and key are coalesced, and a model already loaded from
        the same files stays loaded. `before` runs as the first part of the load, so an eviction
        cancels it too. Raises the exceptions of `load`.
        """

        async def load() -> None:
            if before is not None:
                await before()
            await self._load_found(name, find)

        await self._share(name, key, load)
        self._dependents.named(name)

    def expect_unloads(self, are_expected: Callable[[], bool]) -> None:
        """Set the predicate by which loads decide whether to wait for memory of further unloads."""
        self._loader.expect_unloads = are_expected

    async def evict(self, name: str) -> None:
        """Cancel a model's loads, unload and forget it, and return once its memory is free.

        Any name is accepted. Loads are cancelled even before they find their files, when the
        registry does not know the model yet.
        """
        with self._cancelling.unloading(name):
            await self._loads.call_off(_of(name))
        if self._registry.find(name) is not None:
            await self._unload_shared(name, dependents=False)
            self._registry.forget(name)

    async def purge(self) -> None:
        """Cancel every load, unload every model, and return once all memory is free.

        Loads that arrive in the meantime are cancelled too, since the caller is about to report
        that nothing is loaded (ModelMesh SPI, runtimeStatus).
        """
        self._purges += 1
        self._purging += 1
        try:
            with self._cancelling.unloading():
                await self._loads.call_off()
            await asyncio.gather(*(self.evict(model.name) for model in self._registry.models()))
            await self._loader.close()
        finally:
            self._purging -= 1
            self._purges += 1

    # --- Shutdown ---

    async def close(self) -> None:
        """Unload everything and remove every override directory. Does nothing in a front end."""
        if not self.plane.loads:
            return
        models = self._registry.models()
        await self._loader.unload([v for model in models for v in model.versions.values()])
        await self._loader.close()
        for override in self._overrides.values():
            await self._workers.wait(override.remove)
        self._overrides.clear()

    # --- Requests forwarded by other processes ---

    async def _load_change(self, change: Change) -> None:
        parameters = {**change.arguments, **change.files}
        await self._load_checked(change.subject, _read(self._settings, change.subject, parameters))

    async def _unload_change(self, change: Change) -> None:
        names = change.arguments["models"]
        if change.arguments.get("dependents"):
            names = self._dependents.leaving_with(change.subject)
        for name in names:
            await self._unload_one(name)

    # --- Loading ---

    async def _load_checked(self, name: str, checked: LoadParameters) -> None:
        if checked == _PLAIN:
            await self._load_shared(name)
        else:
            # With a unique key, no other load is coalesced with this one. A cancellation of all
            # loads still includes it.
            load = partial(self._load, name, checked)
            await self._share(name, object(), partial(self._registry.failed.noting, name, load))
        self._dependents.named(name)

    async def _load_shared(self, name: str) -> None:
        # A load checks the permissions of its caller, so restricted callers do not share their
        # loads with others. Their loads find the models that other loads have finished.
        key = None if self._sees_for(Operation.MANAGE) is everything else owner_now()
        # Callers that arrive after this load has read its files may know of newer ones, so they
        # start a new load.
        reads = partial(self._loads.close, (name, key))
        load = partial(self._load, name, _PLAIN, reads)
        await self._share(name, key, partial(self._registry.failed.noting, name, load))

    async def _share(
        self, name: str, key: Hashable, load: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        try:
            await self._loads.run((name, key), partial(self._cancelling.load, name, load))
        except CalledOff:
            raise ShuttingDown() if self._stopping else LoadCancelled(name) from None

    async def _load(
        self, name: str, parameters: LoadParameters, reads: Callable[[], None] = _nothing
    ) -> None:
        override = await self._write_override(name, parameters)
        if override is None and self._repository.remotes:
            await self._workers.fetch_for(self._repository.prepare, name, parameters.config)
        find = partial(
            self._repository.find, name, config_text=parameters.config, override=override
        )
        if parameters.config is not None or override is not None:
            # Permission to load this model does not include permission to infer its steps.
            find = partial(with_steps_in_sight, find, self._sees_for(Operation.INFER))
        try:
            forced = parameters != _PLAIN
            await self._load_found(name, find, override, forced=forced, reads=reads)
        finally:
            if override is not None and self._overrides.get(name) is not override:
                await self._workers.wait(override.remove)

    async def _load_found(
        self,
        name: str,
        find: Callable[[], ModelSource],
        override: Override | None = None,
        *,
        forced: bool = False,
        reads: Callable[[], None] = _nothing,
    ) -> None:
        """Load the model that `find` returns; `reads` is called just before the files are read."""
        if self._stopping:
            raise ShuttingDown
        purges = self._purges
        was_free = self._turns.is_free(name)
        if was_free:
            reads()
        try:
            source = await self._workers.wait(find)
        except ModelNotFound:
            if cause_now() is not Cause.START:
                # The directory may be missing because its volume is not mounted yet.
                self._registry.standing.require_settled(name)
            raise
        await self._load_steps(source)
        is_free = was_free and self._turns.is_free(source.name)
        async with self._turns.of(source.name):
            if not was_free:
                reads()
            if source.config.is_ensemble or not is_free:
                # Another load may have finished in the meantime.
                source = await self._workers.wait(find)
            # A purge unloads only models that are registered when it begins, and this model is not.
            if self._purging or purges != self._purges:
                raise LoadCancelled(source.name)
            before = self._overrides.pop(source.name, None)
            try:
                await self._load_versions(source, forced=forced)
            finally:
                await self._keep_override(source, before, override)

    async def _write_override(self, name: str, parameters: LoadParameters) -> Override | None:
        if not parameters.files:
            return None
        return await self._workers.wait(
            Override.write, name, parameters.files, self._settings.scratch_directory
        )

    async def _keep_override(
        self, source: ModelSource, before: Override | None, new: Override | None
    ) -> None:
        """Keep the override directory that the model now serves from, and remove the other one."""
        name = source.name
        marks = [version.fingerprint for version in source.versions]
        model = self._registry.find(name)
        uses_new = model is not None and any(
            v.instance is not None and v.instance.fingerprint in marks
            for v in model.versions.values()
        )
        kept, left = (new, before) if uses_new else (before, None)
        if kept is not None:
            self._overrides[name] = kept
        if left is not None:
            await self._workers.wait(left.remove)

    async def _load_versions(self, source: ModelSource, *, forced: bool) -> None:
        failures: list[XlaserveError] = []
        for wanted in source.versions:
            version = self._registry.version(source.name, str(wanted.number))
            current = version.instance
            is_same = current is not None and current.fingerprint == wanted.fingerprint
            if current and is_same and not forced and self._registry.is_planned(current):
                continue
            try:
                await self._loader.load(version, source, wanted)
            except XlaserveError as error:
                failures.append(error)
        if failures:
            raise failures[0]
        wanted_numbers = {str(version.number) for version in source.versions}
        known = self._registry.find(source.name)
        assert known is not None
        await self._loader.unload(
            [v for v in known.versions.values() if v.number not in wanted_numbers]
        )

    # --- Ensembles ---

    async def _load_steps(self, source: ModelSource) -> None:
        if not source.config.is_ensemble:
            return
        await self._refuse_cycle(source, (source.name,))
        for step in source.config.steps:
            if not self._registry.ready(step.model_name, step.model_version):
                if not self._sees_for(Operation.MANAGE)(step.model_name):
                    name = step_now(step.model_name)
                    raise LoadFailed(
                        source.name,
                        f"its step {name} is not loaded, and this caller may not load it: ask its"
                        " owner to load it",
                    )
                self._dependents.brought(source.name, step.model_name)
                try:
                    await self._load_shared(step.model_name)
                except (ModelNotFound, LoadFailed) as error:
                    is_gone = isinstance(error, (ModelNotFound, FilesMissing))
                    kind = FilesMissing if is_gone else LoadFailed
                    raise kind(source.name, f"its step failed: {error}") from error

    async def _refuse_cycle(self, source: ModelSource, path: tuple[str, ...]) -> None:
        for step in source.config.steps:
            if step.model_name in path:
                names = " -> ".join(map(step_now, (*path, step.model_name)))
                raise LoadFailed(path[0], f"its steps form a cycle: {names}")
            try:
                following = await self._workers.wait(self._repository.find, step.model_name)
            except (ModelNotFound, LoadFailed):
                continue  # it may be loaded from an override; if not, the load fails later
            await self._refuse_cycle(following, (*path, step.model_name))

    # --- Unloading ---

    async def _unload_shared(self, name: str, *, dependents: bool, sees: Sees = everything) -> None:
        await self._unloads.run(
            (name, dependents, sees), lambda: self._unload(name, sees, dependents=dependents)
        )

    async def _unload(self, name: str, sees: Sees, *, dependents: bool) -> None:
        for leaving in self._dependents.leaving_with(name) if dependents else [name]:
            if leaving == name or sees(leaving):
                await self._unload_one(leaving)

    async def _unload_one(self, name: str) -> None:
        async with self._turns.of(name):
            model = self._registry.find(name)
            if model is not None:
                await self._loader.unload(model.versions.values())
            self._dependents.left(name)
            self.follower.forget(name)
            override = self._overrides.pop(name, None)
            if override is not None:
                await self._workers.wait(override.remove)
            if not await self.catalog.could_load(name):
                self._registry.forget(name)


def _files_of(overrides: Mapping[str, Override], name: str) -> Mapping[str, bytes]:
    """Return the override files that a client sent with a load; reads them from disk."""
    override = overrides.get(name)
    return {} if override is None else override.files()


def _of(name: str) -> Callable[[Hashable], bool]:
    """Return a predicate for the load keys of a model, which begin with its name."""
    return lambda key: isinstance(key, tuple) and key[0] == name


def _read(settings: Settings, name: str, parameters: Mapping[str, LoadParameter]) -> LoadParameters:
    return LoadParameters.read(
        name,
        parameters,
        max_files=settings.max_override_files,
        max_bytes=settings.max_override_bytes,
    )


def _refuse_unseen(plane: ControlPlane, what: str) -> None:
    """Raise Unsupported if another process would act on models that this caller may not see.

    The engine behind front ends does not know the caller and sees every model.
    """
    if not plane.loads and seen_now() is not everything:
        raise Unsupported(
            f"{what} by a caller that may not see every model, with front ends (process_roles),"
        )
