"""Lists and describes the models that clients see, in memory or in the repository."""

import asyncio
from dataclasses import dataclass
from functools import partial

from xlaserve.concurrency.control_plane import ControlPlane, OneProcess
from xlaserve.concurrency.workers import Workers
from xlaserve.errors import RepositoryUnreadable, StillStarting
from xlaserve.residence.failed_loads import NOT_LOADED
from xlaserve.residence.lifecycle import State
from xlaserve.residence.registry import Registry
from xlaserve.residence.reports.monitor import VersionReport, report
from xlaserve.residence.repository.names import check_version_text
from xlaserve.residence.repository.repository import Repository
from xlaserve.runtime.config_served import ServedConfig
from xlaserve.runtime.handling import SaysReady
from xlaserve.runtime.loaded import ModelInfo
from xlaserve.serving.access.sight import require_seen_now, seen_now
from xlaserve.settings import Settings

_REFRESH_SECONDS = 2.0
"""How long an index request waits for the listing of object stores, in seconds. Shorter than the
time that a process waits for another's index."""

READY_SECONDS = 5.0
"""Time limit of a model's own readiness check, in seconds, as in Triton. After it the model counts
as not ready."""


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One row of the repository index (model repository extension, Index)."""

    name: str
    version: str
    """Version number; empty for a model that is not loaded."""
    state: str
    reason: str


class Catalog:
    """Answers queries about models without changing their state."""

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        repository: Repository,
        workers: Workers,
        *,
        plane: ControlPlane | None = None,
    ) -> None:
        self._settings = settings
        self._plane = plane or OneProcess()
        self._registry = registry
        self._repository = repository
        self._workers = workers
        self._refreshing: asyncio.Future[None] | None = None
        """The listing of stores in progress or done last; None before the first."""

    async def index(self, *, ready: bool = False) -> list[IndexEntry]:
        """List every known version, and every model of the repository that has none.

        Lists only models visible to the caller. Raises StillStarting or RepositoryUnreadable until
        the repository has been listed completely.
        """
        self._registry.standing.require_listed(self._repository.parts[0].place)
        rows = await self.known(ready=ready)
        unlisted = None if ready else self._repository.remotes.unlisted
        if unlisted is not None:
            raise RepositoryUnreadable(unlisted.place, unlisted.problem)
        return rows

    async def known(self, *, ready: bool = False) -> list[IndexEntry]:
        """Return the index without checking that the repository was listed completely."""
        rows, sees = [], seen_now()
        for model in self._registry.models():
            if not sees(model.name):
                continue
            for version in sorted(model.versions.values(), key=lambda v: int(v.number)):
                state, reason = self._registry.shown_state(version)
                rows.append(IndexEntry(model.name, version.number, state, reason))
        if ready:
            return [row for row in rows if row.state == State.READY.public]
        known = {row.name for row in rows}
        for name in {*await self.names(), *self._registry.failed.reasons} - known:
            if sees(name):
                reason = self.why_not_loaded(name)
                rows.append(IndexEntry(name, "", State.UNAVAILABLE.public, reason))
        return sorted(rows, key=lambda row: row.name)

    def why_not_loaded(self, name: str) -> str:
        """Return the reason shown in the index for a model without a version."""
        failed = self._registry.failed.reason(name)
        return failed or self._repository.ambiguity(name) or NOT_LOADED

    async def ready(self, name: str, version: str = "") -> bool:
        """Tell whether a model, or one version of it, is ready to serve.

        Raises ModelNotFound for an unknown model. Raises StillStarting for a model that is not
        ready while some process of the server has not finished its first read of the repository.
        """
        check_version_text(name, version)
        require_seen_now(name, version)
        standing = self._registry.standing
        if self._registry.find(name) is None and not await self.could_load(name):
            raise standing.absent(name, version)
        model = self._registry.find(name)
        if version and model is not None and version not in model.versions:
            raise standing.absent(name, version, is_other=True)
        if not self._registry.ready(name, version) or self._plane.conceals(name, version):
            standing.require_settled(name, version)
            if not self._plane.has_started:
                raise StillStarting(name, version, "other processes of the server load it")
            return False
        return await self._says_ready(name, version)

    async def _says_ready(self, name: str, version: str) -> bool:
        """Run the model's own readiness check, if it has one."""
        runner = self._registry.resolve(name, version)[1].runner
        code = getattr(runner, "handling", None) or runner  # a sequence model wraps the user's code
        answers = code.ask_ready() if isinstance(code, SaysReady) else ()
        if not answers:
            return True
        done, late = await asyncio.wait(map(asyncio.wrap_future, answers), timeout=READY_SECONDS)
        return not late and all(one.result() for one in done)

    def absent(self, name: str) -> Exception:
        """Return the error for an unknown model."""
        return self._registry.standing.absent(name)

    def describe(self, name: str, version: str = "") -> tuple[ModelInfo, list[str]]:
        """Return a model's metadata and its ready versions; raises as an inference request does."""
        require_seen_now(name, version)
        info = self._registry.resolve(name, version)[1].info
        model = self._registry.find(name)
        assert model is not None
        answering = (v for v in model.versions.values() if v.state.answers)
        return info, sorted((v.number for v in answering), key=int)

    def config(self, name: str, version: str = "") -> ServedConfig:
        """Return the configuration of a loaded model; raises as an inference request does."""
        require_seen_now(name, version)
        _, instance = self._registry.resolve(name, version)
        return ServedConfig(name, instance.config, instance.info, seen_now())

    def statistics(self, name: str = "", version: str = "") -> list[VersionReport]:
        """Return the statistics of the ready versions; see `report`."""
        if name:
            require_seen_now(name, version)
            return report(self._registry, name, version)
        sees = seen_now()
        return [found for found in report(self._registry) if sees(found.name)]

    async def could_load(self, name: str) -> bool:
        if self._settings.modelmesh:
            return False
        return await self._workers.wait(self._repository.holds, name)

    async def names(self) -> list[str]:
        """List the repository's models, sorted, including those hidden from the caller.

        Empty with ModelMesh, which does not use the repository.
        """
        if self._settings.modelmesh:
            return []
        if self._repository.remotes:
            await self._refresh()
        return await self._workers.wait(self._repository.names)

    async def _refresh(self) -> None:
        """List the object stores, at most once per poll interval, within a time limit.

        After the time limit the index uses the last complete listing.
        """
        if self._refreshing is None or self._refreshing.done():
            refresh = self._repository.remotes.refresh
            call = partial(refresh, self._settings.poll_interval_seconds)
            self._refreshing = asyncio.wrap_future(self._workers.fetch(call))
        await asyncio.wait([self._refreshing], timeout=_REFRESH_SECONDS)
