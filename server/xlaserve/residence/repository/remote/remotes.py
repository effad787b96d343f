"""All repositories in object stores, and their shared cache."""

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
    """Forwards calls to every repository in an object store; methods block."""

    def __init__(
        self,
        parts: Sequence[RemotePart] = (),
        cache: ModelCache | None = None,
        attempts: Mapping[str, Attempts] = MappingProxyType({}),
    ) -> None:
        """`attempts` has the retry state of each store, by URL."""
        self._attempts = attempts
        self.parts = tuple(parts)
        self._cache = cache

    @classmethod
    def of_settings(cls, settings: Settings, reading: LocalReading) -> "Remotes":
        """Create the parts and their cache from the settings; raises InvalidSettings."""
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
        """Tell whether there are any repositories in object stores."""
        return bool(self.parts)

    @property
    def counts(self) -> FetchCounts | None:
        """Return the fetch counters, or None without object stores."""
        return None if self._cache is None else self._cache.counts

    @property
    def problems(self) -> Mapping[str, str]:
        """Return each store's last problem by URL; an empty string if it answered."""
        return {url: attempts.problem for url, attempts in self._attempts.items()}

    def check(self) -> None:
        """Check that every store answers, with a cheap request; never raises."""
        for part in self.parts:
            part.check()

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
        """Return the part with this root; None if it is a local directory."""
        return next((part for part in self.parts if part.root == root), None)

    @property
    def unlisted(self) -> RemotePart | None:
        """Return the first part that was never listed, or None."""
        return next((part for part in self.parts if not part.is_listed), None)

    def refresh(self, older_than_seconds: float = 0.0) -> None:
        """List every store whose listing is older than this many seconds."""
        for part in self.parts:
            part.refresh(older_than_seconds)

    def prepare(self, name: str, config_text: str | None = None) -> None:
        """Prepare a model for `find`, in every store that has it.

        Raises the first failure of a store, after trying all of them.
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
        """Cancel fetches and retries, and remove skeletons."""
        for attempts in self._attempts.values():
            attempts.close()
        if self._cache is not None:
            self._cache.close()
        for part in self.parts:
            part.close()


def _directory(settings: Settings) -> Path:
    setting = settings.remote_cache_directory
    if setting == _AUTO:
        return cache_home("xlaserve-models", "remote_cache_directory")
    return Path(setting)
