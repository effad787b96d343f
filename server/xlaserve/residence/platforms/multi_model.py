"""The models of a multi-model container: loaded from urls, under names that mean nothing."""

from dataclasses import dataclass
from functools import partial

from xlaserve.concurrency.control_plane import Change, ChangeKind
from xlaserve.errors import InvalidName, InvalidRequest, ModelAlreadyLoaded
from xlaserve.residence.control import ModelControl
from xlaserve.residence.lifecycle import State
from xlaserve.residence.registry import Instance, Model, Registry
from xlaserve.residence.repository.repository import Repository
from xlaserve.residence.repository.sources import Location
from xlaserve.serving.access.sight import require_all_seen, require_seen_now, seen_now

MAX_PAGE = 100
"""Models on one page of the list, at most and by default."""
MAX_NAME_BYTES = 1024
"""A longer name might not fit into the path of the request that unloads it."""

_HELD = frozenset({State.READY, State.RELOADING, State.UNLOADING})
"""States of a version that has memory, or is releasing it."""


class NoDefaultModel(InvalidRequest):
    """A request without a model's name, where several could be meant."""

    def __init__(self, loaded: int) -> None:
        super().__init__(
            f"the request names no model, {loaded} models are loaded and default_model is not set"
        )


@dataclass(frozen=True, slots=True)
class HostedModel:
    """A loaded model."""

    name: str
    url: str
    """Its url, as in the request, or its directory in the repository."""


@dataclass(frozen=True, slots=True)
class Page:
    """Part of the list of the loaded models, by name."""

    models: tuple[HostedModel, ...]
    last: str
    """The last name of this page; empty on the final page."""


class MultiModelContainer:
    """Loads and unloads models as a platform asks, which packs as many as memory allows.

    Unlike the model repository it knows nothing of a model before it is loaded. What was loaded
    otherwise is listed and unloaded here as well.
    """

    def __init__(
        self,
        control: ModelControl,
        registry: Registry,
        repository: Repository,
        *,
        default_model: str = "",
    ) -> None:
        self._control = control
        self._registry = registry
        self._repository = repository
        self._default_model = default_model
        self._loading: set[str] = set()
        control.plane.handle(
            ChangeKind.LOAD_URL,
            lambda change: self._load_here(change.subject, change.arguments["url"]),
        )

    @property
    def healthy(self) -> bool:
        """Tell whether the container is healthy; it may be without models (SageMaker, /ping)."""
        return self._control.follower.server_ready

    async def load(self, name: str, url: str) -> None:
        """Load the model that is unpacked at the url and answer to the name from now on.

        Raises ModelAlreadyLoaded, also while another request loads it, OutOfMemory, LoadFailed,
        ModelControlForbidden or InvalidName (SageMaker, Load Model API).
        """
        self._control.require_explicit("load")
        require_all_seen()  # an url names the files of any model
        _check_key(name)
        if name in self._loading or self._is_taken(name):
            raise ModelAlreadyLoaded(name)
        change = Change(ChangeKind.LOAD_URL, name, {"url": url})
        await self._control.plane.apply(change, partial(self._load_here, name, url))

    async def _load_here(self, name: str, url: str) -> None:
        if name in self._loading or self._is_taken(name):
            raise ModelAlreadyLoaded(name)
        self._loading.add(name)
        try:
            find = partial(self._repository.find_archive, name, url)
            await self._control.load_from(name, Location(url), find)
        finally:
            self._loading.discard(name)
            # Nobody unloads what was never loaded: of a failure nothing is kept.
            self._registry.forget(name)
        for instance in _instances(self._registry.find(name)):
            # A reload from elsewhere and an unload leave nothing to tidy up.
            instance.url = url

    async def unload(self, name: str) -> None:
        """Unload a model and return once its memory is free.

        One that is already on its way out is waited for. Raises ModelNotFound for one that is not
        loaded, or ModelControlForbidden (SageMaker, Unload Model API).
        """
        self._control.require_explicit("unload")
        require_seen_now(name)
        model = self._registry.find(name)
        if model is None or not any(v.state in _HELD for v in model.versions.values()):
            raise self._registry.standing.absent(name)
        evict = partial(self._control.evict, name)
        await self._control.plane.apply(Change(ChangeKind.EVICT, name), evict)

    def get(self, name: str) -> HostedModel:
        """Return a loaded model; raises ModelNotFound (SageMaker, Get Model API)."""
        require_seen_now(name)
        model = self._registry.find(name)
        if model is None or model.newest() is None:
            raise self._registry.standing.absent(name)
        return self.hosted(model)

    def page(self, limit: int = MAX_PAGE, after: str = "") -> Page:
        """Return a page of the loaded models, starting after the last name of the page before.

        So nothing is left out or listed twice when models come and go between two pages. A limit
        outside of 1 to MAX_PAGE is MAX_PAGE (SageMaker, List Model API).
        """
        self._registry.standing.require_listed(self._repository.parts[0].place)
        size = limit if 1 <= limit <= MAX_PAGE else MAX_PAGE
        names = [name for name in self._names() if name > after]
        last = names[size - 1] if len(names) > size else ""
        return Page(tuple(map(self.get, names[:size])), last)

    def default(self) -> str:
        """Return the model of a request that names none.

        Raises NoDefaultModel, or StillStarting while the only one may not stay the only one.
        """
        if self._default_model and seen_now()(self._default_model):
            return self._default_model
        self._registry.standing.require_settled()
        names = self._names()
        if len(names) != 1:
            raise NoDefaultModel(len(names))
        return names[0]

    def _names(self) -> list[str]:
        """List loaded models visible to the current caller."""
        sees = seen_now()
        return [
            model.name
            for model in self._registry.models()
            if model.newest() is not None and sees(model.name)
        ]

    def hosted(self, model: Model) -> HostedModel:
        """Return a model with its url, or its directory."""
        newest = model.newest()
        instance = newest.instance if newest else None
        url = instance.url if instance else ""
        return HostedModel(model.name, url or self._repository.url(model.name))

    def _is_taken(self, name: str) -> bool:
        """Tell whether a model has the name; one being unloaded frees it."""
        model = self._registry.find(name)
        leaving = (State.UNAVAILABLE, State.UNLOADING)
        return model is not None and any(v.state not in leaving for v in model.versions.values())


def _instances(model: Model | None) -> list[Instance]:
    versions = model.versions.values() if model else ()
    return [version.instance for version in versions if version.instance is not None]


def _check_key(name: str) -> None:
    """Raise InvalidName for a name that cannot be transmitted."""
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise InvalidName("model name", name, "it is not UTF-8") from None
    if not 1 <= size <= MAX_NAME_BYTES:
        raise InvalidName("model name", name, f"expected 1 to {MAX_NAME_BYTES} bytes")
