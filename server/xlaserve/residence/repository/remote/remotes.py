"""Repository parts in stores, and their shared cache."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

from xlaserve.errors import LoadFailed, OutOfFiles, OutOfSpace
from xlaserve.residence.repository.exhaustion import LoadFailure
from xlaserve.residence.repository.remote.part import LocalReading, RemoteLimits, RemotePart
from xlaserve.settings import Settings
from xlaserve.settings.cache_home import cache_home
from xlaserve.storage.attempts import Attempts
from xlaserve.storage.cache import ModelCache
from xlaserve.storage.fetching import FetchCounts
from xlaserve.storage.stores import StoreLimits, open_store
from xlaserve.storage.urls import url_of

_AUTO = "auto"


class Remotes:
    """Asks stores for all of their parts; its methods block."""

    def __init__(
        self,
        parts: Sequence[RemotePart] = (),
        cache: ModelCache | None = None,
        attempts: Mapping[str, Attempts] = MappingProxyType({}),
    ) -> None:
        """`attempts` are those of the parts' stores, by URL."""
        self._attempts = attempts
        self.parts = tuple(parts)
        self._cache = cache

    @classmethod
    def of_settings(cls, settings: Settings, reading: LocalReading) -> "Remotes":
        """Make them from the settings; raises InvalidSettings for an unusable cache."""
        roots = [
            (root, url_of(root))
            for root in (settings.repository, *settings.model_repository)
            if url_of(root)
        ]
        if not roots:
            return cls()
        cache = ModelCache(
            _directory(settings), settings.remote_cache_max_bytes, settings.remote_threads
        )
        cache.prepare()
        of_store = StoreLimits(
            settings.remote_stall_seconds, settings.remote_max_objects, settings.remote_threads
        )
        attempts = {
            url: Attempts(cache.counts, seconds=settings.remote_stall_seconds) for _, url in roots
        }
        limits = RemoteLimits(settings.max_models, settings.remote_fetch_seconds)

        def part(root: Path, url: str) -> RemotePart:
            opening = partial(open_store, url, of_store, attempts[url])
            return RemotePart(root, url, opening, cache=cache, reading=reading, limits=limits)

        return cls([part(root, url) for root, url in roots], cache, attempts)

    def __bool__(self) -> bool:
        """Tell whether there are any parts."""
        return bool(self.parts)

    @property
    def counts(self) -> FetchCounts | None:
        """Return the fetch counters; None without stores."""
        return None if self._cache is None else self._cache.counts

    @property
    def problems(self) -> Mapping[str, str]:
        """Return each store's last problem, by URL; empty if it answered."""
        return {url: attempts.problem for url, attempts in self._attempts.items()}

    def look(self) -> None:
        """Test every store once, cheaply; raises nothing."""
        for part in self.parts:
            part.look()

    @property
    def directory(self) -> Path:
        """Return the directory of the cache."""
        assert self._cache is not None
        return self._cache.directory

    @property
    def fetching(self) -> int:
        """Return the number of fetches in progress."""
        return 0 if self._cache is None else self._cache.fetching

    def at(self, root: Path) -> RemotePart | None:
        """Return the part of a root; None for one of the disk."""
        return next((part for part in self.parts if part.root == root), None)

    @property
    def unlisted(self) -> RemotePart | None:
        """Return the first part without a listing; None for none."""
        return next((part for part in self.parts if not part.is_listed), None)

    def refresh(self, older_than_seconds: float = 0.0) -> None:
        """List every store, unless its listing is recent."""
        for part in self.parts:
            part.refresh(older_than_seconds)

    def prepare(self, name: str, config_text: str | None = None) -> None:
        """Have a model ready to be found, whichever part has it.

        Raises a `LoadFailure` where no part has it, and one could not be asked.
        """
        failures: list[LoadFailure] = []
        for part in self.parts:
            try:
                part.prepare(name, config_text)
            except (LoadFailed, OutOfSpace, OutOfFiles) as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def close(self) -> None:
        """Cancel fetches and retries, and remove prepared files."""
        for attempts in self._attempts.values():
            attempts.close()
        if self._cache is not None:
            self._cache.close()
        for part in self.parts:
            part.close()


def _directory(settings: Settings) -> Path:
    said = settings.remote_cache_directory
    if said == _AUTO:
        return cache_home("xlaserve-models", "remote_cache_directory")
    return Path(said)
