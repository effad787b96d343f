"""The multi-model container of SageMaker: models loaded from URLs under arbitrary names."""

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
"""Maximum and default number of models per page of the list."""
MAX_NAME_BYTES = 1024
"""A longer name might not fit into the path of the request that unloads the model."""

_HELD = frozenset({State.READY, State.RELOADING, State.UNLOADING})
"""States in which a version holds memory, or is releasing it."""


class NoDefaultModel(InvalidRequest):
    """A request without a model name, when several models are loaded or none."""

    def __init__(self, loaded: int) -> None:
        super().__init__(
            f"the request names no model, {loaded} models are loaded and default_model is not set"
        )


@dataclass(frozen=True, slots=True)
class HostedModel:
    """A loaded model."""

    name: str
    url: str
    """The URL from the load request, or the model's directory in the repository."""


@dataclass(frozen=True, slots=True)
class Page:
    """One page of the list of loaded models, ordered by name."""

    models: tuple[HostedModel, ...]
    last: str
    """The last name on this page, after which the next page starts; empty on the final page."""


class MultiModelContainer:
    """Loads and unloads models for a platform that packs as many as fit into memory.

    A model is unknown before its load, unlike a model of the repository. Models loaded by other
    means are listed and can be unloaded here as well.
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
        """Tell whether the container is healthy, even without models (SageMaker, /ping)."""
        return self._control.follower.server_ready

    async def load(self, name: str, url: str) -> None:
        """Load the unpacked model at a URL, and serve it under this name.

        Raises ModelAlreadyLoaded (also while another request loads it), OutOfMemory, LoadFailed,
        ModelControlForbidden or InvalidName (SageMaker, Load Model API).
        """
        self._control.require_explicit("load")
        require_all_seen()  # the URL may name the files of any model
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
            # Forget a failed load: the platform never unloads a model that it failed to load.
            self._registry.forget(name)
        for instance in _instances(self._registry.find(name)):
            # Stored in the instance, so that a reload or unload discards it.
            instance.url = url

    async def unload(self, name: str) -> None:
        """Unload a model and return once its memory is free.

        Waits for an unload in progress. Raises ModelNotFound if the model is not loaded, or
        ModelControlForbidden (SageMaker, Unload Model API).
        """
        self._control.require_explicit("unload")
        require_seen_now(name)
        model = self._registry.find(name)
        if model is None or not any(v.state in _HELD for v in model.versions.values()):
            raise self._registry.standing.absent(name)
        evict = partial(self._control.evict, name)
        await self._control.plane.apply(Change(ChangeKind.EVICT, name), evict)

    def get(self, name: str) -> HostedModel:
        """Return a loaded model, or raise ModelNotFound (SageMaker, Get Model API)."""
        require_seen_now(name)
        model = self._registry.find(name)
        if model is None or model.newest() is None:
            raise self._registry.standing.absent(name)
        return self.hosted(model)

    def page(self, limit: int = MAX_PAGE, after: str = "") -> Page:
        """Return one page of the loaded models, starting after the last name of the previous page.

        Paging by name neither skips nor repeats a model when others are loaded or unloaded between
        two pages. A limit outside 1..MAX_PAGE means MAX_PAGE (SageMaker, List Model API).
        """
        self._registry.standing.require_listed(self._repository.parts[0].place)
        size = limit if 1 <= limit <= MAX_PAGE else MAX_PAGE
        names = [name for name in self._names() if name > after]
        last = names[size - 1] if len(names) > size else ""
        return Page(tuple(map(self.get, names[:size])), last)

    def default(self) -> str:
        """Return the model for a request without a model name.

        Raises NoDefaultModel, or StillStarting while more models may still be loaded.
        """
        if self._default_model and seen_now()(self._default_model):
            return self._default_model
        self._registry.standing.require_settled()
        names = self._names()
        if len(names) != 1:
            raise NoDefaultModel(len(names))
        return names[0]

    def _names(self) -> list[str]:
        """List the loaded models that the current caller may see."""
        sees = seen_now()
        return [
            model.name
            for model in self._registry.models()
            if model.newest() is not None and sees(model.name)
        ]

    def hosted(self, model: Model) -> HostedModel:
        """Return a model with its URL, or its directory if it was not loaded from a URL."""
        newest = model.newest()
        instance = newest.instance if newest else None
        url = instance.url if instance else ""
        return HostedModel(model.name, url or self._repository.url(model.name))

    def _is_taken(self, name: str) -> bool:
        """Tell whether a model with this name is loaded or loading; not while it is unloading."""
        model = self._registry.find(name)
        leaving = (State.UNAVAILABLE, State.UNLOADING)
        return model is not None and any(v.state not in leaving for v in model.versions.values())


def _instances(model: Model | None) -> list[Instance]:
    versions = model.versions.values() if model else ()
    return [version.instance for version in versions if version.instance is not None]


def _check_key(name: str) -> None:
    """Raise InvalidName for a name that is not UTF-8, empty or too long."""
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise InvalidName("model name", name, "it is not UTF-8") from None
    if not 1 <= size <= MAX_NAME_BYTES:
        raise InvalidName("model name", name, f"expected 1 to {MAX_NAME_BYTES} bytes")
