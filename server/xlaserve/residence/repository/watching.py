"""Detects changes in a repository, and tells deleted models from an unmounted volume.

A model is gone if the root could be read completely and no longer has an entry with its name. When
in doubt, models stay loaded:

- If the root cannot be read (unmounted volume, network failure), nothing changes.
- The same holds if the root is a different directory than before and has no models: this is the
  empty mount point of an unmounted volume. A different directory with models is a new repository.
- If a scan finds no models, or too many are missing, they are gone only if a second scan misses
  them too: an object store may return an empty listing.
- An entry that still exists but cannot be read keeps its loaded model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import structlog

from xlaserve.errors import XlaserveError
from xlaserve.residence.repository.fingerprints import Fingerprint
from xlaserve.residence.repository.listing import Listing
from xlaserve.residence.repository.parts import Part

_LOGGED = 20
"""Maximum number of skipped entries logged per scan; the others are only counted."""


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes that one scan found."""

    changed: tuple[str, ...] = ()
    """New and changed models."""
    gone: tuple[str, ...] = ()
    """Removed models."""


class RepositoryWatch:
    """Remembers the last scan of one part, and logs each problem once."""

    def __init__(self, repository: Part, unload_fraction: float = 1.0) -> None:
        """If more than this fraction of the models is missing, a second scan decides."""
        self._repository = repository
        self._unload_fraction = unload_fraction
        self.doubted: frozenset[str] = frozenset()
        """Models missing from the last scan; they stay loaded unless they are missing from the next
        scan too."""
        self._listing: Listing | None = None
        self._fingerprints: Mapping[str, Fingerprint] = {}
        self._skipped: Mapping[str, str] = {}
        self._hint = ""
        self.problem = ""
        """Why the last scan failed; empty if it succeeded."""
        self._log = structlog.get_logger("repository")

    @property
    def place(self) -> str:
        """Return the directory or URL being scanned."""
        return self._repository.place

    @property
    def known(self) -> frozenset[str]:
        """Return the names of the models, according to the last successful scan."""
        return frozenset(self._listing.models if self._listing else ()) | self._fingerprints.keys()

    @property
    def seen(self) -> bool:
        """Tell whether any scan has succeeded."""
        return self._listing is not None

    @property
    def skipped(self) -> int:
        """Return the number of skipped entries."""
        return len(self._skipped)

    def names(self) -> Sequence[str] | None:
        """Scan, and return the names of all models; None if the root could not be read.

        Blocks on disk I/O.
        """
        listing = self._scan()
        return None if listing is None else listing.models

    def changes(self) -> Changes:
        """Scan, and return the differences from the previous call. Blocks on disk I/O."""
        listing = self._scan()
        if listing is None:
            return Changes()
        before, now = self._fingerprints, self._read_fingerprints(listing)
        there = {*listing.models, *listing.skipped}
        gone = self._sure(frozenset(name for name in before if name not in there), len(before))
        kept = {name: mark for name, mark in before.items() if name not in gone}
        self._fingerprints = kept | now
        changed = tuple(name for name in now if before.get(name) != now[name])
        return Changes(changed, tuple(name for name in before if name in gone))

    def _sure(self, gone: frozenset[str], of: int) -> frozenset[str]:
        """Return the models known to be gone; if many are missing, a second scan decides."""
        missed, self.doubted = self.doubted, frozenset()
        if not gone or (len(gone) < of and len(gone) <= self._unload_fraction * of):
            return gone
        sure = gone & missed
        self.doubted = gone - sure
        if self.doubted:
            self._log.error(
                "models missing from the repository, kept until the next poll",
                path=self._repository.place,
                gone=len(self.doubted),
                models=of,
                some=sorted(self.doubted)[:_LOGGED],
            )
        return sure

    def _scan(self) -> Listing | None:
        try:
            listing = self._repository.listing()
        except OSError as error:
            self._tell_problem(f"it cannot be read: {error.strerror or error}")
            return None
        if self._seems_unmounted(listing):
            self._tell_problem("it is a different directory than before, and empty")
            return None
        self._tell_problem("")
        self._tell_skipped(listing.skipped)
        self._tell_hint(listing)
        self._listing = listing
        return listing

    def _seems_unmounted(self, now: Listing) -> bool:
        before = self._listing
        return (
            before is not None
            and bool(before.models)
            and not now.models
            and before.root != now.root
        )

    def _read_fingerprints(self, listing: Listing) -> dict[str, Fingerprint]:
        found: dict[str, Fingerprint] = {}
        for name in listing.models:
            try:
                found[name] = self._repository.fingerprint(name)
            except (XlaserveError, OSError) as error:
                # Loading the model will report the error; it counts as changed when the error
                # changes.
                found[name] = (str(error),)
        return found

    # --- Logging, once per change ---

    def _tell_problem(self, problem: str) -> None:
        if problem and problem != self.problem:
            self._log.error(
                "repository unreadable, its models stay loaded",
                path=self._repository.place,
                reason=problem,
            )
        if self.problem and not problem:
            self._log.info("repository readable again", path=self._repository.place)
        self.problem = problem

    def _tell_skipped(self, skipped: Mapping[str, str]) -> None:
        new = [name for name, reason in skipped.items() if self._skipped.get(name) != reason]
        for name in islice(sorted(new), _LOGGED):
            self._log.warning(
                "repository entry skipped",
                entry=name,
                reason=skipped[name],
                to_do="make it a model directory, or give it a name that starts with a dot",
            )
        if len(new) > _LOGGED:
            self._log.warning("more repository entries skipped", count=len(new) - _LOGGED)
        self._skipped = skipped

    def _tell_hint(self, listing: Listing) -> None:
        hint = self._repository.hint(listing)
        if hint and hint != self._hint:
            self._log.warning("no models found", path=self._repository.place, hint=hint)
        self._hint = hint
