"""A part of the model repository: a directory, or a place in a store."""

from pathlib import Path
from typing import Protocol

from xlaserve.residence.repository.fingerprints import Fingerprint
from xlaserve.residence.repository.listing import Listing
from xlaserve.residence.repository.sources import ModelSource


class Part(Protocol):
    """One repository of several; each is listed and watched by itself."""

    @property
    def root(self) -> Path:
        """Return the directory, or the path that holds the URL."""
        ...

    @property
    def place(self) -> str:
        """Return the directory or the URL, as a log names it."""
        ...

    def listing(self) -> Listing:
        """Return what it holds; raises OSError unless the whole of it can be read."""
        ...

    def fingerprint(self, name: str) -> Fingerprint:
        """Return what changes when anything of a model does."""
        ...

    def hint(self, listing: Listing) -> str:
        """Suggest another root if it has no models."""
        ...

    def is_holder(self, name: str) -> bool:
        """Tell whether it has this model."""
        ...

    def directory(self, name: str) -> str:
        """Return where a model of it is, be it there or not."""
        ...

    def find_own(self, name: str, config_text: str | None) -> ModelSource:
        """Read what a load of the model would load. Raises ModelNotFound and LoadFailed."""
        ...

    def remove_leftovers(self) -> int:
        """Remove leftovers of killed processes, and return their number."""
        ...
