"""Detects changes in several repositories; a model in two of them is not served."""

from collections import Counter
from collections.abc import Sequence

import structlog

from xlaserve.residence.repository.repository import Repository
from xlaserve.residence.repository.watching import Changes, RepositoryWatch


class RepositoryWatches:
    """Combines the watches of all parts of a repository."""

    def __init__(self, repository: Repository, unload_fraction: float = 1.0) -> None:
        """If more than this fraction of a part's models is missing, a second scan decides."""
        self._repository = repository
        self._watches = tuple(RepositoryWatch(part, unload_fraction) for part in repository.parts)
        self._shared: frozenset[str] = frozenset()
        """Names that the last scan found in several parts."""
        self._log = structlog.get_logger("repository")

    @property
    def problem(self) -> str:
        """Return why the last scan failed; empty if it succeeded."""
        return next((watch.problem for watch in self._watches if watch.problem), "")

    @property
    def unreadable(self) -> str:
        """Return the first part that the last scan could not read; empty if there was none."""
        found = (watch for watch in self._watches if watch.problem)
        return next((watch.place for watch in found), "")

    @property
    def doubted(self) -> bool:
        """Tell whether many models were missing in the last scan, so that the next one decides."""
        return any(watch.doubted for watch in self._watches)

    @property
    def seen(self) -> bool:
        """Tell whether every part has been scanned successfully at least once."""
        return all(watch.seen for watch in self._watches)

    @property
    def skipped(self) -> int:
        """Return the number of skipped entries."""
        return sum(watch.skipped for watch in self._watches)

    def names(self) -> Sequence[str] | None:
        """Scan, and return the names of all models; None if a part could not be read.

        Blocks on disk I/O.
        """
        found = [watch.names() for watch in self._watches]
        if any(names is None for names in found):
            return None
        self._tell_shared()
        return sorted({name for names in found for name in names or ()})

    def changes(self) -> Changes:
        """Scan, and return the differences from the previous call. Blocks on disk I/O.

        A model is gone if no part has it, or a second part has it too. It has changed if only one
        of several parts still has it.
        """
        held_before = {name for watch in self._watches for name in watch.known}
        scans = [watch.changes() for watch in self._watches]
        held = {name for watch in self._watches for name in watch.known}
        before = self._shared
        self._tell_shared()
        changed = {name for scan in scans for name in scan.changed}
        gone = {name for scan in scans for name in scan.gone} - held
        # A model that moved from one part to another has changed.
        changed |= (before - self._shared) & held
        new = self._shared - before
        gone |= new & held_before
        # A new ambiguous model counts as changed: its load then fails with an explanation.
        changed = (changed - self._shared) | (new - held_before)
        return Changes(tuple(sorted(changed - gone)), tuple(sorted(gone)))

    def _tell_shared(self) -> None:
        counts = Counter(name for watch in self._watches for name in watch.known - watch.doubted)
        shared = frozenset(name for name, count in counts.items() if count > 1)
        for name in sorted(shared - self._shared):
            reason = self._repository.ambiguity(name)
            self._log.error("model not served", model=name, reason=reason)
        self._shared = shared
