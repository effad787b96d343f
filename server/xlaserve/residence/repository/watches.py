"""Changes in several repositories: a model that two of them hold is served from neither."""

from collections import Counter
from collections.abc import Sequence

import structlog

from xlaserve.residence.repository.repository import Repository
from xlaserve.residence.repository.watching import Changes, RepositoryWatch


class RepositoryWatches:
    """Watches of all parts of a repository, as one."""

    def __init__(self, repository: Repository, unload_fraction: float = 1.0) -> None:
        """If more than this fraction of a part's models is gone, a second scan decides."""
        self._repository = repository
        self._watches = tuple(RepositoryWatch(part, unload_fraction) for part in repository.parts)
        self._shared: frozenset[str] = frozenset()
        """Names that the last look found in several parts."""
        self._log = structlog.get_logger("repository")

    @property
    def problem(self) -> str:
        """Return why the last scan failed; empty if it succeeded."""
        return next((watch.problem for watch in self._watches if watch.problem), "")

    @property
    def unreadable(self) -> str:
        """Return the first part that the last look could not tell; empty for none."""
        found = (watch for watch in self._watches if watch.problem)
        return next((watch.place for watch in found), "")

    @property
    def doubted(self) -> bool:
        """Tell whether the last scan missed so many models that a second one decides."""
        return any(watch.doubted for watch in self._watches)

    @property
    def seen(self) -> bool:
        """Tell whether any scan of every part has succeeded."""
        return all(watch.seen for watch in self._watches)

    @property
    def skipped(self) -> int:
        """Return the number of skipped entries."""
        return sum(watch.skipped for watch in self._watches)

    def names(self) -> Sequence[str] | None:
        """Look, and return the names of all models; None where that cannot be told of some part.

        Waits for the disk.
        """
        found = [watch.names() for watch in self._watches]
        if any(names is None for names in found):
            return None
        self._tell_shared()
        return sorted({name for names in found for name in names or ()})

    def changes(self) -> Changes:
        """Look, and compare with what `changes` saw before. Waits for the disk.

        A model is gone when no part has it, or a second one has it too; it has changed
        when but one is left.
        """
        held_before = {name for watch in self._watches for name in watch.known}
        looks = [watch.changes() for watch in self._watches]
        held = {name for watch in self._watches for name in watch.known}
        before = self._shared
        self._tell_shared()
        changed = {name for look in looks for name in look.changed}
        gone = {name for look in looks for name in look.gone} - held
        # One that moved from a part to another has changed.
        changed |= (before - self._shared) & held
        new = self._shared - before
        gone |= new & held_before
        # To load one that nobody had before says why it cannot be.
        changed = (changed - self._shared) | (new - held_before)
        return Changes(tuple(sorted(changed - gone)), tuple(sorted(gone)))

    def _tell_shared(self) -> None:
        counts = Counter(name for watch in self._watches for name in watch.known - watch.doubted)
        shared = frozenset(name for name, count in counts.items() if count > 1)
        for name in sorted(shared - self._shared):
            reason = self._repository.ambiguity(name)
            self._log.error("model not served", model=name, reason=reason)
        self._shared = shared
